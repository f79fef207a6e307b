"""A laboratory: nodes that are joined by a slow network, on one machine.

``python benchmarks/slow_link.py --nodes 2 --ranks 1 --rate 200mbit -- COMMAND`` builds one network namespace a node and
a switch between them, shapes every cable in both directions with ``tc tbf``, runs COMMAND as the nodes would, and says
what their network cards really sent. Loopback inside a node is not shaped, as in a real machine.

COMMAND runs once for each rank, with the environment that torch's launchers set. ``accelerate launch ...`` runs once for
each node, and is given the nodes, the rank of the machine and the address to meet at. So is any command that holds
``{machine_rank}``; ``{nodes}``, ``{ranks}``, ``{world_size}``, ``{master_addr}`` and ``{master_port}`` are filled in too.

Needs root, `ip` and `tc`. Everything lives in namespaces of its own, switch included, so nothing outside is touched, and
deleting the namespaces, which happens after a crash, Ctrl-C or SIGTERM too, leaves nothing behind.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

CARD = "eth0"
_labs = itertools.count()


class LabError(RuntimeError):
    """The laboratory cannot be built here."""


def why_not() -> str | None:
    """Why no laboratory can be built here, in one line; None if one can."""
    if os.geteuid() != 0:
        return "the slow-link laboratory needs root (network namespaces); run it with sudo"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"the slow-link laboratory needs {' and '.join(missing)} (package iproute2)"
    return None


class SlowLink:
    """``with SlowLink(nodes=2, rate="200mbit") as lab: lab.run([...])``. ``rate=None`` leaves the cables unshaped."""

    def __init__(self, nodes: int = 2, *, ranks: int = 1, rate: str | None = None):
        reason = why_not()
        if reason is not None:
            raise LabError(reason)
        self.nodes, self.ranks, self.rate = nodes, ranks, rate
        self._prefix = f"slow{os.getpid()}x{next(_labs)}"
        self._switch = f"{self._prefix}sw"
        self._processes: list[subprocess.Popen] = []

    def namespace(self, node: int) -> str:
        return f"{self._prefix}n{node}"

    @staticmethod
    def address(node: int) -> str:
        return f"10.77.0.{node + 1}"

    def __enter__(self) -> SlowLink:
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _build(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge0", "up")
        for node in range(self.nodes):
            name, port = self.namespace(node), f"port{node}"
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", CARD, "netns", name)
            _ip("-n", self._switch, "link", "set", port, "master", "bridge0", "up")
            _ip("-n", name, "addr", "add", f"{self.address(node)}/24", "dev", CARD)
            _ip("-n", name, "link", "set", CARD, "up")
            if self.rate is not None:
                _shape(name, CARD, self.rate)
                _shape(self._switch, port, self.rate)

    def close(self) -> None:
        """End what still runs in the nodes and remove them. May be called again."""
        for process in self._processes:
            _end(process)
        self._processes = []
        for name in [*map(self.namespace, range(self.nodes)), self._switch]:
            if Path("/run/netns", name).exists():
                subprocess.run(["ip", "netns", "delete", name], check=False)

    # Running.

    def start(
        self, command: Sequence[str], *, environment: Mapping[str, str] | None = None, output: int | None = None
    ) -> list[subprocess.Popen]:
        """Start the command in all nodes; ``output`` is for every rank but the first."""
        port = str(_free_port())
        world_size = self.nodes * self.ranks
        once_a_node = any("{machine_rank}" in word for word in command) or list(command[:2]) == ["accelerate", "launch"]
        started = []
        for node in range(self.nodes):
            filled = self._fill(command, node, port) if once_a_node else list(command)
            for local_rank in range(1 if once_a_node else self.ranks):
                rank = node * self.ranks + local_rank
                variables = {
                    "MASTER_ADDR": self.address(0),
                    "MASTER_PORT": port,
                    "GLOO_SOCKET_IFNAME": CARD,
                    "NCCL_SOCKET_IFNAME": CARD,
                    "TP_SOCKET_IFNAME": CARD,
                    "OMP_NUM_THREADS": "1",
                    "ACCELERATE_USE_CPU": "true",
                    "TORCH_CPP_LOG_LEVEL": "ERROR",  # addresses without a name are no cause for a warning here
                }
                if not once_a_node:
                    variables |= {
                        "RANK": str(rank),
                        "WORLD_SIZE": str(world_size),
                        "LOCAL_RANK": str(local_rank),
                        "LOCAL_WORLD_SIZE": str(self.ranks),
                        "GROUP_RANK": str(node),
                    }
                process = subprocess.Popen(
                    ["ip", "netns", "exec", self.namespace(node), *filled],
                    env={**os.environ, **variables, **(environment or {})},
                    stdout=None if rank == 0 else output,
                    stderr=None if rank == 0 else output,
                    start_new_session=True,  # one group a process, so that a launcher's children end with it
                )
                started.append(process)
                self._processes.append(process)
        return started

    def run(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        timeout: float | None = None,
        output: int | None = None,
    ) -> int:
        """Run the command as all nodes and return the first exit code that is not 0; one failure ends the others."""
        processes = self.start(command, environment=environment, output=output)
        deadline = None if timeout is None else time.monotonic() + timeout
        code = 0
        while None in (codes := [process.poll() for process in processes]):
            failed = [code for code in codes if code]
            if failed:
                code = failed[0]
                time.sleep(3)  # the others may have something to say about it
                break
            if deadline is not None and time.monotonic() > deadline:
                print(f"slow_link: stopped after {timeout:.0f} s", file=sys.stderr)
                code = 124
                break
            time.sleep(0.05)
        for process in processes:
            _end(process)
            self._processes.remove(process)
        return code or next((process.returncode for process in processes if process.returncode), 0)

    def _fill(self, command: Sequence[str], node: int, port: str) -> list[str]:
        values = {
            "nodes": self.nodes,
            "ranks": self.ranks,
            "world_size": self.nodes * self.ranks,
            "machine_rank": node,
            "master_addr": self.address(0),
            "master_port": port,
        }
        words = list(command)
        if words[:2] == ["accelerate", "launch"] and not any("machine_rank" in word for word in words):
            meet = "--num_machines {nodes} --num_processes {world_size} --machine_rank {machine_rank}"
            meet += " --main_process_ip {master_addr} --main_process_port {master_port}"
            kind = (
                [] if "--config_file" in words else ["--multi_gpu", "--mixed_precision", "no", "--dynamo_backend", "no"]
            )
            words[2:2] = [*kind, *meet.split()]
        for name, value in values.items():
            words = [word.replace("{" + name + "}", str(value)) for word in words]
        return words

    # Reading the cards.

    def sent(self) -> list[int]:
        """Bytes that each node's card has sent so far."""
        return [_sent_bytes(self.namespace(node), CARD) for node in range(self.nodes)]


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise LabError(f"`ip {' '.join(words)}` failed: {done.stderr.strip()}")


def _shape(namespace: str, device: str, rate: str) -> None:
    """A token bucket. It holds 128 kB, two of the largest packets that veth carries, and queues up to 4 MB."""
    words = ["tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf"]
    words += ["rate", rate, "burst", "128kb", "limit", "4mb"]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise LabError(f"`{' '.join(words)}` failed: {done.stderr.strip()}; a rate is written 200mbit or 1gbit")


def _sent_bytes(namespace: str, device: str) -> int:
    words = ["ip", "netns", "exec", namespace, "cat", f"/sys/class/net/{device}/statistics/tx_bytes"]
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


def _free_port() -> int:
    """Nothing else listens in a namespace of our own; one port for each laboratory keeps restarts apart."""
    return 20000 + (os.getpid() * 7 + next(_ports)) % 10000


_ports = itertools.count()


def _end(process: subprocess.Popen, patience: float = 5) -> None:
    """End a process and the group it leads: politely, then not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
            if number == signal.SIGKILL:
                return
            patience = 1
    process.wait()


@contextlib.contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """SIGTERM and SIGHUP leave through ``finally`` as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="ranks on each node")
    parser.add_argument("--rate", help="of every cable, as tc writes it: 200mbit, 1gbit; unshaped when left out")
    parser.add_argument("--timeout", type=float, help="seconds after which everything is ended")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    parsed = parser.parse_args(arguments)
    command = parsed.command[1:] if parsed.command[:1] == ["--"] else parsed.command
    if not command:
        parser.error("a COMMAND to run in the nodes is needed after --")
    try:
        with _signals_as_exceptions(), SlowLink(parsed.nodes, ranks=parsed.ranks, rate=parsed.rate) as lab:
            code = lab.run(command, timeout=parsed.timeout)
            sent = ", ".join(f"node {node} {count / 1e6:.1f} MB" for node, count in enumerate(lab.sent()))
            print(f"slow_link: sent by the network cards: {sent}", file=sys.stderr)
            return code
    except LabError as error:
        print(f"slow_link: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
