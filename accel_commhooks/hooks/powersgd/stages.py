"""The stages of a PowerSGD step (arXiv:1905.13727), shared by both hooks.

Each gradient matrix M [n, m] is sent as factors P [n, r] and Q [m, r]; what they miss stays in a residual that is added to
the next gradient. The order of events in one backward:

- for each bucket, as DDP hands it over: M = gradient + residual, P = M Q; P and all vectors start their all-reduce;
- at the last bucket, in bucket order: wait for P, orthogonalise it, Q = M^T P, start Q's all-reduce;
- then, in bucket order: wait for Q, write P Q^T into the bucket, keep M - P Q^T, complete the bucket's Future.

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

from ...comm.hierarchy import NodeReduction
from ...comm.pending import PendingResult
from ...comm.process_group import GradBucket
from ...comm.wire import wire_dtype_named
from ...config.errors import launched_rank, warn_once
from ..base import HookContext, QueueHook, State, new_future
from .figures import CompressionStats
from .lowrank import add_and_project, approximate, orthogonalize, random_factor
from .options import LowRankOptions
from .units import Memory, ShapeGroup, Unit

logger = logging.getLogger("accel_commhooks")


class LowRankHook(QueueHook):
    """The stages of a step, for whatever is compressed together. Subclasses say what that is.

    Steps before compression starts go through the queue of plain averaging.
    """

    def __init__(self, options: LowRankOptions, context: HookContext):
        super().__init__(options, context)
        self._wire_dtype = wire_dtype_named(options.wire_dtype)
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
        self._memory = Memory()
        self._units: dict[tuple[int, ...], Unit] = {}
        self._in_flight: list[Unit] = []
        self._compressed_steps = 0
        self._compressed_now = False
        self._stats = CompressionStats()

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
        zero = queue[0].flat.new_zeros(())
        for unit in queue:
            zero = zero + self._second_stage(unit)
        fine = zero == 0
        for unit in queue:
            self._third_stage(unit, fine)
        self._stats.done()
        self._units = {key: unit for key, unit in self._units.items() if unit in queue}

    # The three stages of a unit.

    def first_stage(self, unit: Unit) -> None:
        """M = gradient + residual; start sending the first factor and vectors."""
        unit.started = True
        unit.wait()
        scale = self.context.loss_scale(unit.m.device)
        if scale is not None:
            unit.m.mul_(scale.reciprocal())
        if self.context.finds_unused:
            self._note_used(unit)
        unit.pack_vectors()
        for group in unit.groups:
            if self._sends_q():
                group.p.copy_(self._basis(group.start_p()))
            else:
                group.q.copy_(self._basis(group.start_q() if self.options.warm_start else self._fresh_q(group)))
            self._multiply(unit, group, transposed=self._sends_q(), add_errors=True)
        self._stats.begin(self._compressed_steps)
        self._stats.at_gradient(unit)
        if self.options.alternate:
            self._stats.at_factor(unit, "q" if self._sends_q() else "p")
        unit.pending = self._send(unit, unit.right if self._sends_q() else unit.left)

    def _second_stage(self, unit: Unit) -> torch.Tensor:
        """Wait for the first factor, start the second. Returns 0, or NaN if a gradient anywhere was not finite."""
        unit.wait()
        sent = unit.right if self._sends_q() else unit.left
        zero = (unit.flat[sent] * 0).sum() + (unit.flat[unit.small] * 0).sum()
        if not self.options.alternate:
            for group in unit.groups:
                group.p.copy_(self._basis(group.p))
                self._multiply(unit, group, transposed=True)
            self._stats.at_factor(unit, "q")
            if unit.groups:
                unit.pending = [self._average(unit.flat[unit.right], self._wire_dtype)]
        return zero

    def _third_stage(self, unit: Unit, fine: torch.Tensor) -> None:
        """Wait for the second factor; the approximation is the result, the rest the new residual."""
        unit.wait()
        fine = fine & ((unit.flat[unit.right] * 0).sum() == 0)
        self._memory.before_change(unit)
        for group in unit.groups:
            if self.context.finds_unused:
                # DDP leaves a parameter that no rank used as it was, so its residual and factors must stay as well.
                used = group.flags > 0
                left, kept = group.p * used, fine & used
            else:
                left, kept = group.p, fine
            for index, matrix in enumerate(group.matrices):
                view, p, q = matrix.view(unit.m), left[index], group.q[index]
                if group.errors:
                    approximate(view, group.errors[index], p, q, fine)
                else:
                    torch.mm(p.t(), q, out=view)
            if not self._sends_q() and group.p_kept is not None:
                torch.where(kept, group.p, group.p_kept, out=group.p_kept)
            else:
                torch.where(kept, group.q, group.q_kept, out=group.q_kept)
        self._stats.at_residual(unit)
        unit.unpack_vectors()
        # Whatever was non-finite must be so in the result, on every rank.
        unit.m[:1].add_(torch.where(fine, 0.0, torch.nan))
        scale = self.context.loss_scale(unit.m.device)
        if scale is not None:
            unit.m.mul_(scale)
        unit.started = False
        unit.deliver()

    # Factors.

    def _sends_q(self) -> bool:
        """Whether the only factor of this step is Q: in turn, under ``alternate``."""
        return self.options.alternate and self._compressed_steps % 2 == 1

    def _basis(self, factor: torch.Tensor) -> torch.Tensor:
        return orthogonalize(factor, self.options.orthogonalization_epsilon)

    def _fresh_q(self, group: ShapeGroup) -> torch.Tensor:
        keys = [f"{matrix.name}/{self._compressed_steps}" for matrix in group.matrices]
        return torch.stack([self.draw(key, *group.q.shape[1:]) for key in keys]).to(group.q)

    def draw(self, key: str, rank: int, n: int) -> torch.Tensor:
        return random_factor(rank, n, key=key, seed=self.options.random_seed)

    def _multiply(self, unit: Unit, group: ShapeGroup, *, transposed: bool, add_errors: bool = False) -> None:
        """P = Q M^T, or Q = P M (row factors); with ``add_errors``, M = gradient + residual first."""
        views = [matrix.view(unit.m) for matrix in group.matrices]
        errors = group.errors if add_errors else []
        if self.options.batch_tensors_with_same_shape and len(views) > 1:
            for view, error in zip(views, errors, strict=False):
                view.add_(error[:-1])
            stacked = torch.stack(views)
            if transposed:
                torch.bmm(group.p, stacked, out=group.q)
            else:
                torch.bmm(group.q, stacked.transpose(1, 2), out=group.p)
            return
        for index, view in enumerate(views):
            if errors:
                add_and_project(view, errors[index], group.p[index], group.q[index], onto_p=transposed)
            elif transposed:
                torch.mm(group.p[index], view, out=group.q[index])
            else:
                torch.mm(group.q[index], view.t(), out=group.p[index])

    def _note_used(self, unit: Unit) -> None:
        for group in unit.groups:
            for index, matrix in enumerate(group.matrices):
                largest = torch.linalg.vector_norm(matrix.view(unit.m), ord=float("inf"))
                group.flags[index].copy_((largest > 0) | largest.isnan())

    # Sending.

    def _send(self, unit: Unit, factor: slice) -> list[PendingResult]:
        """The factor with the vectors beside it in one collective, or in two where only the factor is narrowed."""
        if self._wire_dtype is None:
            both = slice(min(factor.start, unit.small.start), max(factor.stop, unit.small.stop))
            return [self._average(unit.flat[both], None)] if both.stop > both.start else []
        parts = [(factor, self._wire_dtype), (unit.small, None)]
        return [self._average(unit.flat[part], dtype) for part, dtype in parts if part.stop > part.start]

    def _average(self, tensor: torch.Tensor, wire_dtype: torch.dtype | None) -> PendingResult:
        if self._nodes is not None:
            return self._nodes.between(tensor, wire_dtype)
        return self.comm.all_reduce(tensor, wire_dtype=wire_dtype)

    # Units.

    def unit(self, key: tuple[int, ...], build: Callable[[], Unit]) -> Unit:
        """The unit of these parameters, made and filled from the memory when it is new."""
        if key not in self._units:
            self._units[key] = build()
            self._memory.move_into(self._units[key])
        return self._units[key]

    def common(self) -> dict[str, dict[str, torch.Tensor]]:
        return {**super().common(), **self._memory.factors()}

    # Checkpoints.

    def state_dict(self) -> State:
        return {
            **super().state_dict(),
            "compressed_steps": self._compressed_steps,
            "discards": self._memory.keeps_copies,
            **self._memory.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._compressed_steps = state["compressed_steps"]
        self._memory.keeps_copies = state.get("discards", False)
        self._memory.load_state_dict({kind: state[kind] for kind in ("q", "p", "error")})
        self._units.clear()

    def merge_states(self, states: Iterable[State]) -> State:
        """Factors are the same on all ranks; every new rank gets the mean residual, so their mean stays what it was."""
        merged: State = {}
        count = 0
        for count, state in enumerate(states, start=1):
            if count == 1:
                merged = state
                continue
            for name, error in state["error"].items():
                merged["error"][name] = merged["error"][name] + error
        merged["error"] = {name: error / count for name, error in merged["error"].items()}
        return merged


def in_math_dtype(gradient: torch.Tensor) -> torch.Tensor:
    """At least float32: half precision is not enough for products and residuals."""
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32))
