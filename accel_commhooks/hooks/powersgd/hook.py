"""PowerSGD: low-rank gradient compression with error feedback (arXiv:1905.13727).

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

import fnmatch
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...attachment.compatibility import warn_once
from ...comm.collectives import WIRE_DTYPES
from ...comm.hierarchy import NodeReduction, Waitable
from ...config.errors import launched_rank
from ...config.options import HookOptions, option
from ...config.registry import register_hook
from ..base import CommHook, HookContext, State, new_future
from .figures import Look
from .lowrank import add_and_project, approximate, orthogonalize, random_factor, rank_for, square_side
from .units import Matrix, Memory, ShapeGroup, Unit

logger = logging.getLogger("accel_commhooks")


@dataclass(kw_only=True)
class LowRankOptions(HookOptions):
    matrix_approximation_rank: int = option(
        4, "Rank of the approximation: bytes grow with it.", at_least=1, remedy="use name: allreduce for no compression"
    )
    start_powerSGD_iter: int = option(
        100, "Optimizer steps with plain averaging before compression starts.", at_least=0
    )
    min_compression_rate: float = option(2.0, "Matrices that would shrink by less travel uncompressed.", above=0)
    use_error_feedback: bool = option(True, "Add what compression missed to the next gradient.")
    warm_start: bool = option(True, "Start from the factors of the previous step instead of random ones.")
    orthogonalization_epsilon: float = option(0.0, "Added to norms; zero is safe here.", at_least=0)
    random_seed: int = option(0, "Seed of the first factors, the same on every rank.")
    compression_stats_logging_frequency: int = option(10_000, "Steps between two log lines.", at_least=1)
    batch_tensors_with_same_shape: bool = option(False, "Multiply matrices of one shape in one batched call.")
    alternate: bool = option(False, "Send one factor a step, P and Q in turn: half the bytes, half the collectives.")
    wire_dtype: str | None = option(None, "Type in which P and Q travel: fp16 or bf16.", choices=(None, "fp16", "bf16"))
    scope: str = option(
        "all", "all: compress between all ranks; node: average fully inside a node.", choices=("all", "node")
    )


def _are_patterns(value: list) -> str | None:
    if all(isinstance(pattern, str) for pattern in value):
        return None
    return f"patterns must be a list of texts, but got {value!r}"


def _are_ranks(value: dict) -> str | None:
    for pattern, rank in value.items():
        if not isinstance(pattern, str) or not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
            return f"ranks must map name patterns to whole numbers of at least 0, but got {pattern!r}: {rank!r}"
    return None


@dataclass(kw_only=True)
class PowerSGDOptions(LowRankOptions):
    include: list = option([], "Name patterns of the parameters to compress; empty means all.", check=_are_patterns)
    exclude: list = option([], "Name patterns of the parameters to send uncompressed.", check=_are_patterns)
    ranks: dict = option({}, "Rank by name pattern, the first that fits; 0 sends uncompressed.", check=_are_ranks)

    def rank_of(self, name: str) -> int:
        """The rank asked for a parameter; 0 for none."""
        if any(fnmatch.fnmatch(name, pattern) for pattern in self.exclude):
            return 0
        for pattern, rank in self.ranks.items():
            if fnmatch.fnmatch(name, pattern):
                return rank
        if self.include and not any(fnmatch.fnmatch(name, pattern) for pattern in self.include):
            return 0
        return self.matrix_approximation_rank


class LowRankHook(CommHook):
    """The stages of a step, for whatever is compressed together. Subclasses say what that is."""

    def __init__(self, options: LowRankOptions, context: HookContext):
        super().__init__(options, context)
        self._wire_dtype = WIRE_DTYPES[options.wire_dtype]
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
        self._queue: list[Unit] = []
        self._plain: list[tuple[torch.futures.Future, Waitable, torch.Tensor]] = []
        self._compressed_steps = 0
        self._compressed_now = False
        self._look = Look()

    def enqueue(self, bucket: dist.GradBucket, future: torch.futures.Future) -> None:
        """Take a bucket; append units to the queue, and start those that can be."""
        raise NotImplementedError

    # The lifecycle.

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = new_future(bucket.buffer().device)
        if self.step < self._start:
            self._plain.append((future, self.comm.all_reduce(bucket.buffer()), bucket.buffer()))
            if bucket.is_last():
                self._finish_plain()
            return future
        self._compressed_now = True
        self.enqueue(bucket, future)
        if bucket.is_last():
            self._finish_compressed()
        return future

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        # Here and not in step_done: a step that was skipped for an overflow must be repeated from the same side.
        self._compressed_steps += self._compressed_now
        self._compressed_now = False

    def step_done(self) -> None:
        super().step_done()
        self._compressed_now = False
        if self.step % self.options.compression_stats_logging_frequency == 0 and launched_rank() == 0:
            logger.info("%s after %d steps: %s", self.name, self.step, self.metrics())

    def metrics(self) -> dict[str, float]:
        return self._look.figures()

    def _finish_plain(self) -> None:
        plain, self._plain = self._plain, []
        for future, pending, buffer in plain:
            pending.wait()
            future.set_result(buffer)

    def _finish_compressed(self) -> None:
        queue, self._queue = self._queue, []
        for unit in queue:
            if not unit.started:
                self.first_stage(unit)
        zero = queue[0].flat.new_zeros(())
        for unit in queue:
            zero = zero + self._second_stage(unit)
        fine = zero == 0
        for unit in queue:
            self._third_stage(unit, fine)
        self._look.done()
        self._units = {key: unit for key, unit in self._units.items() if unit in queue}

    # The three stages of a unit.

    def first_stage(self, unit: Unit) -> None:
        """M = gradient + residual; the first factor and the vectors start their way."""
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
        self._look.begin(self._compressed_steps)
        self._look.at_gradient(unit)
        if self.options.alternate:
            self._look.at_factor(unit, "q" if self._sends_q() else "p")
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
            self._look.at_factor(unit, "q")
            if unit.groups:
                unit.pending = [self._average(unit.flat[unit.right], self._wire_dtype)]
        return zero

    def _third_stage(self, unit: Unit, fine: torch.Tensor) -> None:
        """Wait for the second factor; the approximation is the result, the rest the new residual."""
        unit.wait()
        fine = fine & ((unit.flat[unit.right] * 0).sum() == 0)
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
        self._look.at_residual(unit)
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
        """P = Q M^T, or Q = P M (factors lie); with ``add_errors``, M = gradient + residual first."""
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

    def _send(self, unit: Unit, factor: slice) -> list[Waitable]:
        """The factor with the vectors beside it in one collective, or in two where only the factor is narrowed."""
        if self._wire_dtype is None:
            both = slice(min(factor.start, unit.small.start), max(factor.stop, unit.small.stop))
            return [self._average(unit.flat[both], None)] if both.stop > both.start else []
        parts = [(factor, self._wire_dtype), (unit.small, None)]
        return [self._average(unit.flat[part], dtype) for part, dtype in parts if part.stop > part.start]

    def _average(self, tensor: torch.Tensor, wire_dtype: torch.dtype | None) -> Waitable:
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

    def in_math_dtype(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.to(torch.promote_types(gradient.dtype, torch.float32))

    # Checkpoints.

    def state_dict(self) -> State:
        return {**super().state_dict(), "compressed_steps": self._compressed_steps, **self._memory.state_dict()}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._compressed_steps = state["compressed_steps"]
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


@register_hook("powersgd", aliases=("power_sgd",))
class PowerSGDHook(LowRankHook):
    """Low-rank compression with error feedback: some percent of DDP's bytes."""

    Options = PowerSGDOptions

    def enqueue(self, bucket: dist.GradBucket, future: torch.futures.Future) -> None:
        """A unit a bucket. In node scope a unit goes on when the next bucket comes: by then its node has averaged it."""
        buffer, parameters = bucket.buffer(), bucket.parameters()
        unit = self.unit(tuple(map(id, parameters)), lambda: self._build(parameters, buffer))
        self._queue.append(unit)
        unit.deliver = lambda: self._deliver(unit, buffer, future)
        if self._nodes is None:
            unit.m = self.in_math_dtype(buffer)
            self.first_stage(unit)
            return
        unit.m = self.in_math_dtype(buffer)
        unit.pending = [self._nodes.inside(unit.m)]
        if len(self._queue) > 1:
            self.first_stage(self._queue[-2])

    @staticmethod
    def _deliver(unit: Unit, buffer: torch.Tensor, future: torch.futures.Future) -> None:
        if unit.m.data_ptr() != buffer.data_ptr():
            buffer.copy_(unit.m)
        unit.m = unit.flat
        future.set_result(buffer)

    def _build(self, parameters: list[torch.Tensor], buffer: torch.Tensor) -> Unit:
        matrices, vectors, offset = [], [], 0
        for parameter in parameters:
            name, numel = self.context.names[parameter], parameter.numel()
            rows = parameter.shape[0] if parameter.ndim else 1
            columns = numel // max(rows, 1)
            asked = self.options.rank_of(name)
            rank = rank_for(rows, columns, asked, self.options.min_compression_rate) if asked else 0
            if rank:
                matrices.append(Matrix(name, offset, rows, columns, rank))
            elif numel:
                vectors.append((offset, numel))
            offset += numel
        return Unit.allocate(
            offset,
            matrices,
            vectors,
            [(matrix.name, matrix.offset, matrix.rows * matrix.columns) for matrix in matrices],
            like=buffer,
            draw=self.draw,
            keeps_p=self.options.alternate,
            keeps_error=self.options.use_error_feedback,
        )


@register_hook("batched_powersgd", aliases=("batched_power_sgd",))
class BatchedPowerSGDHook(LowRankHook):
    """PowerSGD on the whole gradient as one square matrix: fewest bytes and calls, a coarser approximation.

    torch makes one square of each bucket; buckets are rebuilt after the first step, so a resumed run would not be the
    same run. One square of all parameters in the model's order has no such memory of buckets.
    """

    Options = LowRankOptions
    _NAME = "(all parameters)"

    def __init__(self, options: LowRankOptions, context: HookContext):
        super().__init__(options, context)
        self._arrived: list[tuple[dist.GradBucket, torch.futures.Future, Waitable | None]] = []

    def enqueue(self, bucket: dist.GradBucket, future: torch.futures.Future) -> None:
        inside = self._nodes.inside(bucket.buffer()) if self._nodes is not None else None
        self._arrived.append((bucket, future, inside))
        if not bucket.is_last():
            return
        arrived, self._arrived = self._arrived, []
        gradients: dict[torch.Tensor, torch.Tensor] = {}
        for each, _, waiting in arrived:
            if waiting is not None:
                waiting.wait()
            gradients.update(zip(each.parameters(), each.gradients(), strict=True))
        ordered = [(name, gradients[p]) for p, name in self.context.names.items() if p in gradients]
        unit = self.unit(tuple(id(p) for p in gradients), lambda: self._build(ordered))
        unit.m = torch.zeros(unit.numel, dtype=unit.flat.dtype, device=unit.flat.device)
        for (_, offset, length), (_, gradient) in zip(unit.residuals, ordered, strict=True):
            unit.m[offset : offset + length].copy_(gradient.reshape(-1))
        unit.deliver = lambda: self._deliver(unit, ordered, arrived)
        self._queue.append(unit)
        self.first_stage(unit)

    @staticmethod
    def _deliver(unit: Unit, ordered: list, arrived: list) -> None:
        for (_, offset, length), (_, gradient) in zip(unit.residuals, ordered, strict=True):
            gradient.copy_(unit.m[offset : offset + length].view_as(gradient))
        for error in unit.groups[0].errors:
            _, offset, length = unit.residuals[-1]
            error.view(-1)[offset + length :].zero_()  # the padding of the square is nobody's gradient
        unit.m = unit.flat
        for bucket, future, _ in arrived:
            future.set_result(bucket.buffer())

    def _build(self, ordered: list[tuple[str, torch.Tensor]]) -> Unit:
        residuals, offset = [], 0
        for name, gradient in ordered:
            residuals.append((name, offset, gradient.numel()))
            offset += gradient.numel()
        side = square_side(offset)
        rank = min(side, self.options.matrix_approximation_rank)
        return Unit.allocate(
            side * side,
            [Matrix(self._NAME, 0, side, side, rank)],
            [],
            residuals,
            like=ordered[0][1],
            draw=self.draw,
            keeps_p=self.options.alternate,
            keeps_error=self.options.use_error_feedback,
        )
