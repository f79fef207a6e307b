"""The stages of a PowerSGD step (arXiv:1905.13727), shared by both hooks.

Each gradient matrix M [n, m] is sent as factors P [n, r] and Q [m, r]; what they miss stays in a residual that is added to
the next gradient. The order of events in one backward:

- at the first bucket: the starting Qs are orthogonalised, as they do not depend on the gradient;
- for each bucket, as DDP hands it over: M = gradient + residual, P = M Q; P and all vectors start their all-reduce;
- at the last bucket, in bucket order: wait for P, orthogonalise it, Q = M^T P, start Q's all-reduce;
- then, in bucket order: wait for Q, write P Q^T into the bucket, keep M - P Q^T, complete the bucket's Future.

On a CPU the last two stages are done bucket by bucket, so that one bucket is computed while the next ones travel. On an
accelerator small kernels cost more than that gains, so all buckets are one wave: each P is waited for, then all are
orthogonalised together.

With ``alternate`` there is one factor a step, P and Q in turn, each a product with the other's last basis (ACP-SGD,
arXiv:2306.08881). ``scope: node`` averages whole gradients inside a node and compresses between nodes only.

Residuals and factors belong to parameters, by name. They are float32 (float64 for float64 gradients) in unscaled gradient
units. A non-finite gradient on any rank makes P non-finite on all: every rank then keeps every memory as it was, and hands
non-finite gradients on, so that a GradScaler skips the step everywhere. No decision is read back from a device.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable

import torch

from ...comm.hierarchy import MeanOverRanks, NodeReduction
from ...comm.process_group import GradBucket
from ...comm.wire import is_quantised, wire_dtype_named
from ...config.errors import launched_rank, warn_once
from ...upstream import foreach
from ..base import HookContext, QueueHook, State, new_future
from ..host import on_host
from ..memory import Memory, with_mean_residuals
from . import factors, lowrank, products
from .bases import orthonormal_bases
from .figures import CompressionStats
from .options import LowRankOptions
from .sending import BesideVectors, InDigits, Mean, Sending, Side
from .units import Unit

logger = logging.getLogger("accel_commhooks")


class LowRankHook(QueueHook):
    """The stages of a step, for whatever is compressed together. Subclasses say what that is.

    Steps before compression starts go through the queue of plain averaging.
    """

    def __init__(self, options: LowRankOptions, context: HookContext):
        super().__init__(options, context)
        self._start: float = options.start_powerSGD_iter
        self._nodes = None
        if options.scope == "node":
            if len(self.comm.topology.nodes) == 1:
                warn_once(
                    f"hook '{self.name}' with scope: node finds all {self.comm.size} ranks on one node, so there is nothing "
                    "to compress; gradients are averaged plainly (scope: all compresses between all ranks)"
                )
                self._start = math.inf
            else:
                self._nodes = NodeReduction(self.comm)
        self._sending = self._make_sending()
        self._memory = Memory("q", "p", "error")
        self._units: dict[tuple[int, ...], Unit] = {}
        self._in_flight: list[Unit] = []
        self._compressed_steps = 0
        self._compressed_now = False
        self._stats = CompressionStats()

    def _make_sending(self) -> Sending:
        dtype = wire_dtype_named(self.options.wire_dtype)
        mean, mean_in_full = self._mean_in(dtype), self._mean_in(None)
        if is_quantised(dtype):
            return InDigits(mean, mean_in_full, list(self.context.names.values()))
        return BesideVectors(mean, mean_in_full, narrows=dtype is not None)

    def _mean_in(self, dtype: torch.dtype | None) -> Mean:
        nodes = self._nodes
        if nodes is None:
            return MeanOverRanks(self.comm, dtype)
        return lambda tensor, lost=None: nodes.between(tensor, dtype, lost)

    def enqueue(self, bucket: GradBucket, future: torch.futures.Future) -> None:
        """Take a bucket; append its units to those in flight, and start those that can be."""
        raise NotImplementedError

    # The lifecycle.

    def start(self, bucket: GradBucket) -> Callable[[], torch.Tensor]:
        return self.comm.all_reduce(bucket.buffer()).wait

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if self.step < self._start:
            return super().reduce(bucket)
        future = new_future(bucket.buffer().device)
        self._compressed_now = True
        if bucket.index() == 0:
            self._take_bases(list(self._units.values()))
        self.enqueue(bucket, future)
        if bucket.is_last():
            self._finish_compressed()
        return future

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        # Here and not in step_done: a step that was skipped for an overflow must be repeated from the same side.
        self._compressed_steps += self._compressed_now
        self._compressed_now = False

    def step_done(self, *, weights_in_use: bool = False) -> None:
        super().step_done(weights_in_use=weights_in_use)
        self._compressed_now = False
        self._memory.commit()
        if self.step % self.options.compression_stats_logging_frequency == 0 and launched_rank() == 0:
            logger.info("%s after %d steps: %s", self.name, self.step, self.metrics())

    def discard(self, kept: torch.Tensor | None) -> None:
        self._compressed_now = False
        self._memory.roll_back(kept)

    def abandon_backward(self) -> None:
        super().abandon_backward()
        self._sending.abandon()
        for unit in self._in_flight:
            unit.abandon()
        self._in_flight = []

    def metrics(self) -> dict[str, float]:
        return self._stats.figures()

    def _finish_compressed(self) -> None:
        queue, self._in_flight = self._in_flight, []
        for unit in queue:
            if not unit.started:
                self.first_stage(unit)
        self._sending.all_given()
        waves = [[unit] for unit in queue] if on_host(queue[0].flat) else [queue]
        largest = [self._second_stage(wave) for wave in waves]
        self._sending.all_given()
        fine = torch.stack(largest).amax() < math.inf
        for wave in waves:
            self._third_stage(wave, fine)
        self._stats.done()
        self._units = {key: unit for key, unit in self._units.items() if unit in queue}

    # The three stages.

    def first_stage(self, unit: Unit) -> None:
        """M = gradient + residual; start sending the first factor and vectors."""
        unit.started = True
        unit.wait()
        scale = self.context.loss_scale(unit.m.device)
        if scale is not None:
            unit.m.div_(scale)
        if self.context.finds_unused and unit.runs:
            unit.flags.copy_(foreach.largest(unit.matrices()) != 0)  # a NaN is not zero
        vectors, sent = unit.travelling_vectors()
        foreach.copy(sent, vectors)
        if any(run.basis is None for run in unit.runs):
            self._take_bases([unit])
        for run in unit.runs:
            assert run.basis is not None
            run.left, run.right = (run.basis, run.q) if self._sends_q() else (run.p, run.basis)
        products.project(unit, onto_p=self._sends_q(), adds_errors=True, batched=self._in_batches(unit))
        self._stats.begin(self._compressed_steps)
        self._stats.at_gradient(unit)
        if self.options.alternate:
            self._stats.at_factor(unit, "q" if self._sends_q() else "p")
        self._sending.send_with_vectors(unit, "q" if self._sends_q() else "p", is_last=self.options.alternate)

    def _second_stage(self, wave: list[Unit]) -> torch.Tensor:
        """Wait for the first factors, start the second. Returns the largest value that was received; it may be NaN."""
        for unit in wave:
            self._sending.wait(unit)
        sent: Side = "q" if self._sends_q() else "p"
        received = [part for unit in wave for part in (unit.flat[unit.factor(sent)], unit.flat[unit.small])]
        if not self.options.alternate:
            runs = [run for unit in wave for run in unit.runs]
            for run, basis in zip(runs, self._bases([run.p for run in runs]), strict=True):
                run.left, run.right = basis, run.q
            for unit in wave:
                products.project(unit, onto_p=True, batched=self._in_batches(unit))
                self._stats.at_factor(unit, "q")
                self._sending.send(unit)
        return _largest_of(received)

    def _third_stage(self, wave: list[Unit], fine: torch.Tensor) -> None:
        """Wait for the second factors; the approximation is the result, the rest the new residual."""
        for unit in wave:
            self._sending.wait(unit)
        if not self.options.alternate:
            fine = fine & (_largest_of([unit.flat[unit.right] for unit in wave]) < math.inf)
        for unit in wave:
            self._memory.before_change(unit)
        takes_p = self.options.alternate and not self._sends_q()
        factors.keep(wave, "p" if takes_p else "q", fine, only_used=self.context.finds_unused)
        products.approximate(wave, fine, batched=self._in_batches(wave[0]))
        for unit in wave:
            self._stats.at_residual(unit)
        arrived = [unit.travelling_vectors() for unit in wave]
        foreach.copy(
            [vector for vectors, _ in arrived for vector in vectors], [part for _, sent in arrived for part in sent]
        )
        # Whatever was non-finite must be so in the result, on every rank.
        foreach.add_number([unit.m[:1] for unit in wave], torch.where(fine, 0.0, torch.nan))
        scale = self.context.loss_scale(wave[0].m.device)
        if scale is not None:
            foreach.multiply([unit.m for unit in wave], scale)
        for unit in wave:
            unit.started = False
            for run in unit.runs:
                run.basis = run.own = None
            unit.deliver()

    # Factors.

    def _sends_q(self) -> bool:
        """Whether the only factor of this step is Q: in turn, under ``alternate``."""
        return self.options.alternate and self._compressed_steps % 2 == 1

    def _bases(self, starts: list[torch.Tensor]) -> list[torch.Tensor]:
        return orthonormal_bases(starts, self.options.orthogonalization_epsilon)

    def _take_bases(self, units: list[Unit]) -> None:
        """The orthonormal factors that this step starts from."""
        side: Side = "p" if self._sends_q() else "q"
        if side == "p" or self.options.warm_start:
            starts = factors.kept_ones(units, side)
        else:
            starts = factors.fresh_ones(
                units, lambda x: self.draw(f"{x.name}/{self._compressed_steps}", x.rank, x.columns)
            )
        runs = [run for unit in units for run in unit.runs]
        for run, basis in zip(runs, self._bases(starts), strict=True):
            run.basis = basis

    def draw(self, key: str, rank: int, n: int) -> torch.Tensor:
        return lowrank.random_factor(rank, n, key=key, seed=self.options.random_seed)

    def _in_batches(self, unit: Unit) -> bool:
        return self.options.batch_tensors_with_same_shape or not on_host(unit.flat)

    # Units.

    def unit(self, key: tuple[int, ...], build: Callable[[], Unit]) -> Unit:
        """The unit of these parameters, made and filled from the memory when it is new."""
        if key not in self._units:
            self._units[key] = build()
            self._memory.move_into(self._units[key])
        return self._units[key]

    def common(self) -> dict[str, dict[str, torch.Tensor]]:
        return {**super().common(), **{f"factor {kind}": self._memory.of_kind(kind) for kind in ("q", "p")}}

    # Checkpoints.

    def state_dict(self) -> State:
        return {
            **super().state_dict(),
            "compressed_steps": self._compressed_steps,
            **self._memory.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._compressed_steps = state["compressed_steps"]
        self._memory.load_state_dict(state)
        self._units.clear()

    def merge_states(self, states: Iterable[State]) -> State:
        """Factors are the same on all ranks; every new rank gets the mean residual, so their mean stays what it was."""
        return with_mean_residuals(states)


def _largest_of(parts: list[torch.Tensor]) -> torch.Tensor:
    """The largest absolute value; NaN if there is one."""
    full = [part for part in parts if part.numel()]
    return foreach.largest(full).amax() if full else parts[0].new_zeros(())
