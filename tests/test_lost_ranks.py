"""A rank that is killed or stopped is named by those that are left, within the timeout that the user has set."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch.distributed as dist
from launching import SCRIPTS

TIMEOUT = 6
HOOKS = {
    "powersgd": {"start_powerSGD_iter": 1},
    "powersgd in nodes": {"start_powerSGD_iter": 1, "scope": "node", "ranks_per_node": 2},
    "post_localsgd in nodes": {"start_localSGD_iter": 1, "period": 8, "ranks_per_node": 2},
    "zero_overlap": {},
}


CASES = [
    ("powersgd in nodes", signal.SIGSTOP),
    pytest.param("post_localsgd in nodes", signal.SIGSTOP, marks=pytest.mark.slow),
    pytest.param("powersgd", signal.SIGKILL, marks=pytest.mark.slow),
    pytest.param("zero_overlap", signal.SIGKILL, marks=pytest.mark.slow),
]
FAULTS = {signal.SIGKILL: "killed", signal.SIGSTOP: "stopped"}


@pytest.mark.parametrize(("name", "fault"), CASES)
def test_the_survivors_name_it_in_time(tmp_path, name, fault):
    """Four ranks, of which rank 3 is struck at its fifth step."""
    options = {"name": name.split()[0], **HOOKS[name]}
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {**os.environ, "MASTER_PORT": str(store.port), "WORLD_SIZE": "4"}
    environment |= {"OMP_NUM_THREADS": "1", "FAULT": str(int(fault)), "OPTIONS": repr(options), "TIMEOUT": str(TIMEOUT)}
    ranks = [
        subprocess.Popen(
            [sys.executable, SCRIPTS / "struck.py"],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(4)
    ]
    try:
        outputs = [rank.communicate(timeout=90)[0] for rank in ranks[:3]]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    for output in outputs:
        assert f"LostRankError: rank 3 was {FAULTS[fault]}" in output, output
        seconds = float(output.split("seconds: ")[1].split()[0])
        assert seconds < 2 * TIMEOUT + 6, (
            "one timeout for the collective, one for those who wait for a survivor, and an answer"
        )


def test_a_slow_rank_is_no_lost_one(pool):
    assert pool.run(_slow, 2) == [3, 3]


def _slow(rank, world_size):
    from models import Net, make_ddp, train

    from accel_commhooks import attach

    ddp = make_ddp(Net(8))
    handle = attach(ddp, "powersgd", start_powerSGD_iter=1)
    train(ddp, rank, 3, on_step=lambda step: time.sleep(0.5 * rank))
    return handle.steps
