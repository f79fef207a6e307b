"""A process group that behaves like one on a device's own stream, for ranks without a device.

Gloo is kinder than NCCL: its results are there a little after a collective was issued, and it reads what it sends at once, so
code that does not wait, or writes into a buffer too early, passes on it. This group does not forgive that:

- every collective completes late, on a thread, after a random time, in the order of issue;
- its outputs are NaN (the smallest number, for whole numbers) until it is waited for;
- what is sent or received must not change, nor be freed, until then: :class:`LateGroupError` names the collective and the
  line that issued it, in wait() and once more at the end (:func:`finish`), where works that nobody waited for are looked at too;
- ranks that issue another collective, or in another order, get the same error with what each of them issued.

It calls itself ``late``, so that code does what it does on backends other than Gloo. It sends through a Gloo group of its own.
"""

from __future__ import annotations

import queue
import random
import threading
import time
import traceback
import weakref
from collections import Counter
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.utils._python_dispatch import _disable_current_modes

NAME = "late"
DELAYS = (0.0, 0.0, 0.0005, 0.002)
"""Seconds, one of which a collective is late."""
SIGNALLING = {
    torch.float16: (torch.int16, 0x7D01),
    torch.bfloat16: (torch.int16, 0x7FA5),
    torch.float32: (torch.int32, 0x7FA5A5A5),
    torch.float64: (torch.int64, 0x7FF4A5A5A5A5A5A5),
}
"""NaNs that arithmetic turns into others (IEEE 754's quiet ones), so that ``buffer.add_(1)`` is seen as a write."""
TEXT_BYTES = 128
"""Of a collective's description, which ranks compare before they run it."""


class LateGroupError(AssertionError):
    """A race that a device would have lost. Not a RuntimeError: no caller takes it for a lost rank."""


_problems: list[str] = []
_flights: weakref.WeakSet[_Flight] = weakref.WeakSet()
_held: Counter[int] = Counter()
"""How many flights hold a storage."""
_issued: list[tuple[str, str]] = []
"""Group and description of every collective, in this rank's order."""
_lock = threading.RLock()


def register() -> None:
    """Make ``init_process_group("late")`` possible."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, LateGroup, devices=["cpu"])


def finish(seconds: float = 30.0) -> list[tuple[str, str]]:
    """Raise what was found since the last call; otherwise return what was issued."""
    deadline = time.monotonic() + seconds
    for flight in list(_flights):
        if flight.done.wait(max(0.0, deadline - time.monotonic())):
            flight.check()
    problems, issued = list(_problems), list(_issued)
    for each in (_problems, _issued, _flights, _held):
        each.clear()
    if problems:
        raise LateGroupError("\n".join(dict.fromkeys(problems)))
    return issued


def compare_orders(by_rank: list[list[tuple[str, str]]]) -> None:
    """Two ranks must issue what they have in common in one order, over all their groups, or a device may wait for ever."""
    for other, theirs in enumerate(by_rank[1:], 1):
        common = {group for group, _ in by_rank[0]} & {group for group, _ in theirs}
        mine, yours = ([each for each in issued if each[0] in common] for issued in (by_rank[0], theirs))
        for number, pair in enumerate(zip(mine, yours, strict=False)):
            if pair[0][0] != pair[1][0]:
                raise LateGroupError(
                    f"groups are used in another order, at collective {number}: rank 0 {pair[0]}, rank {other} {pair[1]}"
                )


class _Flight:
    """One collective under way: what it holds, and what must not change until it is waited for."""

    def __init__(self, text: str, sent: list[torch.Tensor], received: list[torch.Tensor], run):
        """``run(gloo)`` returns what is to be received, in tensors of its own."""
        self.text, self._run = f"{text} issued at {_caller()}", run
        # .data: a collective does not count as a change of the tensor's version, and an alias shows who else holds it.
        # Not of a sparse tensor, whose alias would keep its old indices.
        self.received, self._sent = ([t if t.is_sparse else t.data for t in each] for each in (received, sent))
        self._expected: list[tuple[torch.Tensor, torch.Tensor, str]] = []
        self._results: list[torch.Tensor] | None = None
        self.error: BaseException | None = None
        self.done, self._over, self._future = threading.Event(), False, None
        for tensor in self.received:
            _poison(tensor)
        for kind, tensors in (("sent", self._sent), ("received", self.received)):
            self._expected += [(tensor, tensor.clone(), kind) for tensor in tensors]
        with _lock:
            _flights.add(self)
            _held.update(map(_storage, self._all()))

    def _all(self) -> list[torch.Tensor]:
        return [tensor for tensor in (*self._sent, *self.received) if not tensor.is_sparse]

    def complete(self, gloo, delay: float) -> None:
        """On the group's thread."""
        time.sleep(delay)
        try:
            self._results = self._run(gloo)
        except BaseException as error:
            self.error = error
            if isinstance(error, LateGroupError):
                _problems.append(str(error))
        self._note_freed()
        with _lock:
            self.done.set()
            asked = self._future is not None
        if asked:  # on another thread: torch's own PowerSGD waits, in a callback, for a later collective
            threading.Thread(target=self._fulfil, daemon=True).start()

    def _note_freed(self) -> None:
        if self._future is not None or self._over:
            return
        for tensor in self._all():
            ours = _held[_storage(tensor)]
            if tensor.numel() and torch._C._storage_Use_Count(_storage(tensor)) - 1 <= ours:  # one for the question
                _problems.append(f"a buffer was freed while it was in flight: {self.text}")

    def check(self) -> None:
        """Whether anybody wrote into what is in flight."""
        if self._over:
            return
        for tensor, expected, kind in self._expected:
            if not _same_bits(tensor, expected):
                _problems.append(f"a buffer was written to while it was {kind}: {self.text}")

    def deliver(self) -> None:
        """The results appear, after a last look at the buffers."""
        with _lock, torch.no_grad(), _disable_current_modes():
            if self._over:
                return
            before = len(_problems)
            self.check()
            self._over = True
            if self._results is not None:
                for tensor, result in zip(self.received, self._results, strict=True):
                    tensor.copy_(result.view_as(tensor) if not result.is_sparse else result)
            _held.subtract(map(_storage, self._all()))
            _flights.discard(self)
            self._results = self._expected = None
            self._sent = []
            if self.error is None and len(_problems) > before:
                self.error = LateGroupError("\n".join(_problems[before:]))

    def future(self) -> torch.futures.Future:
        with _lock:
            if self._future is None:
                self._future = torch.futures.Future()
                if self.done.is_set():
                    self._fulfil()  # nobody has added a callback yet
            return self._future

    def _fulfil(self) -> None:
        self.deliver()
        if self.error is not None:
            self._future.set_exception(self.error)
        else:
            self._future.set_result(list(self.received))


class LateWork(dist.Work):
    """What a collective returns."""

    def __init__(self, flight: _Flight):
        super().__init__()
        self._flight = flight

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._flight.done.wait()
        self._flight.deliver()
        if self._flight.error is not None:
            raise self._flight.error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._flight.done.is_set()

    def is_success(self) -> bool:
        return self._flight.done.is_set() and self._flight.error is None

    def result(self) -> list[torch.Tensor]:
        return self._flight.received

    def get_future(self) -> torch.futures.Future:
        return self._flight.future()


class LateGroup(dist.ProcessGroup):
    """The group; torch calls its methods from Python and, through a trampoline, from DDP's reducer."""

    def __init__(self, store, rank: int, size: int, timeout: timedelta):
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._count = 0
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        gloo = c10d.ProcessGroupGloo(store, rank, size, timeout)
        self._thread = threading.Thread(
            target=_work_off, args=(self._queue, gloo, size, random.Random(rank)), daemon=True
        )
        self._thread.start()

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return NAME

    def _set_group_name(self, name: str) -> None:  # the base class asks its backends, and there is none
        self._group_name = name

    @property
    def group_name(self) -> str:
        return self._group_name

    def getBackendName(self) -> str:
        return NAME

    def _get_sequence_number_for_group(self) -> int:
        return self._count

    def shutdown(self) -> None:
        self._queue.put(None)
        self._thread.join(10)

    abort = shutdown

    def _issue(self, text: str, sent: list[torch.Tensor], received: list[torch.Tensor], run) -> LateWork:
        with torch.no_grad(), _disable_current_modes():
            flight = _Flight(text, sent, received, run)
        _issued.append((self.group_name, text))
        self._count += 1
        self._queue.put((text, flight))
        return LateWork(flight)

    # In place: what is sent is taken at once, and the tensor is only received into.

    def allreduce(self, tensors, opts=None) -> LateWork:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        (tensor,) = tensors
        own = _copy(tensor)
        shape = "sparse" if tensor.is_sparse else tensor.numel()
        return self._issue(
            f"all_reduce({shape}, {tensor.dtype}, {_name(op)})", [], [tensor], lambda gloo: [_all_reduce(gloo, own, op)]
        )

    def reduce(self, tensors, opts) -> LateWork:
        (tensor,), root = tensors, opts.rootRank
        own = _copy(tensor)

        def run(gloo):
            total = _all_reduce(gloo, own, opts.reduceOp)
            if gloo.rank() != root:
                _poison(total)  # what other ranks find there is not defined
            return [total]

        op = _name(opts.reduceOp)
        return self._issue(f"reduce({tensor.numel()}, {tensor.dtype}, {op}, to {root})", [], [tensor], run)

    def broadcast(self, tensors, opts) -> LateWork:
        (tensor,), root = tensors, opts.rootRank
        own, is_root = _copy(tensor), self._rank == opts.rootRank
        options = c10d.BroadcastOptions()
        options.rootRank = root

        def run(gloo):
            gloo.broadcast([own], options).wait()
            return [] if is_root else [own]

        text = f"broadcast({tensor.numel()}, {tensor.dtype}, from {root})"
        return self._issue(text, [tensor] if is_root else [], [] if is_root else [tensor], run)

    # Out of place.

    def allgather(self, output_lists, inputs, opts=None) -> LateWork:
        (outputs,), (chunk,) = output_lists, inputs
        return self._all_gather(outputs, chunk)

    def all_gather_single(self, output, chunk, opts=None) -> LateWork:
        return self._all_gather([output], chunk)

    _allgather_base = all_gather_single

    def _all_gather(self, outputs, chunk) -> LateWork:
        own = _copy(chunk).view(-1)

        def run(gloo):
            everyone = own.new_empty(gloo.size() * own.numel())
            gloo._allgather_base(everyone, own).wait()
            return list(everyone.chunk(len(outputs))) if everyone.numel() else [everyone] * len(outputs)

        return self._issue(f"all_gather({chunk.numel()}, {chunk.dtype})", [chunk], list(outputs), run)

    def reduce_scatter_single(self, output, chunks, opts=None) -> LateWork:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        own = _copy(chunks)

        def run(gloo):
            return [_all_reduce(gloo, own, op).view(gloo.size(), -1)[gloo.rank()].clone()]

        return self._issue(f"reduce_scatter({chunks.numel()}, {chunks.dtype}, {_name(op)})", [chunks], [output], run)

    _reduce_scatter_base = reduce_scatter_single

    def all_to_all_single(self, output, data, output_splits, input_splits, opts=None) -> LateWork:
        own = _copy(data)

        def run(gloo):
            received = torch.empty(output.shape, dtype=output.dtype)
            gloo.alltoall_base(received, own, list(output_splits), list(input_splits)).wait()
            return [received]

        return self._issue(f"all_to_all({data.dtype})", [data], [output], run)

    alltoall_base = all_to_all_single

    def barrier(self, opts=None) -> LateWork:
        def run(gloo):
            gloo.barrier().wait()
            return []

        return self._issue("barrier", [], [], run)


def _work_off(todo: queue.SimpleQueue, gloo, size: int, chance: random.Random) -> None:
    """The group's thread: one collective after the other, late."""
    while (item := todo.get()) is not None:
        text, flight = item
        run = flight._run

        def compared(gloo, text=text, run=run):
            _compare(gloo, text, size)
            return run(gloo)

        flight._run = compared
        flight.complete(gloo, chance.choice(DELAYS))
        flight._run = None
        del item, flight, run, compared


def _compare(gloo, text: str, size: int) -> None:
    """All ranks must be about to run the same collective."""
    own = torch.frombuffer(bytearray(text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES)), dtype=torch.uint8)
    everyone = torch.empty(size * TEXT_BYTES, dtype=torch.uint8)
    gloo._allgather_base(everyone, own).wait()
    texts = [bytes(row.tolist()).decode().strip() for row in everyone.view(size, -1)]
    if len(set(texts)) > 1:
        told = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(texts))
        raise LateGroupError(f"ranks issue different collectives: {told}")


def _all_reduce(gloo, own: torch.Tensor, op) -> torch.Tensor:
    options = c10d.AllreduceOptions()
    mean = op == dist.ReduceOp.AVG
    options.reduceOp = dist.ReduceOp.SUM if mean else op
    gloo.allreduce([own], options).wait()
    return own.div_(gloo.size()) if mean else own


def _name(op) -> str:
    known = ("SUM", "AVG", "MAX", "MIN", "PRODUCT", "BAND", "BOR", "BXOR")
    return next((name for name in known if op == getattr(dist.ReduceOp, name)), "?")


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), _disable_current_modes():
        own = tensor.detach().clone()
        return own if own.is_sparse else own.contiguous()


def _poison(tensor: torch.Tensor) -> None:
    if tensor.is_sparse:
        _poison(tensor._values())
    elif tensor.is_complex():
        _poison(torch.view_as_real(tensor))
    elif tensor.dtype in SIGNALLING:
        whole, value = SIGNALLING[tensor.dtype]
        tensor.view(whole).fill_(value)
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).min or 0xA5)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    with torch.no_grad(), _disable_current_modes():
        if a.is_sparse:
            return (
                a._nnz() == b._nnz()
                and torch.equal(a._indices(), b._indices())
                and _same_bits(a._values(), b._values())
            )
        if a.untyped_storage().size() < a.numel() * a.element_size():
            return False  # resized away
        return a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _caller() -> str:
    """The line outside torch and this file that issued a collective."""
    for frame in reversed(traceback.extract_stack(limit=30)):
        if "/torch/" not in frame.filename and frame.filename != __file__:
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return "torch"
