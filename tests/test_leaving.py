"""The end of a script, on real ranks that really end."""

import os
import subprocess
import sys

from launching import free_port

# One core, which a thread of Gloo that has completed a collective does not get back before the script is over.
SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
from accel_commhooks.comm.collectives import Communicator
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
sys.setswitchinterval(1000)
dist.init_process_group("gloo")
comm = Communicator()
for _ in range(30):
    comm.all_reduce(torch.ones(1000)).wait()
"""


def test_nobody_aborts_when_the_script_ends_with_a_collective():
    """Without care for Gloo's threads every other such run ends with SIGABRT on one of its ranks."""
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    for _ in range(5):
        environment["MASTER_PORT"] = str(free_port())
        ranks = [
            subprocess.Popen([sys.executable, "-c", SCRIPT], env={**environment, "RANK": str(rank)})
            for rank in range(2)
        ]
        try:
            assert [rank.wait(60) for rank in ranks] == [0, 0]
        finally:
            for rank in ranks:
                rank.kill()
