"""Kernels that a hook adds to a step on an accelerator, counted without one.

``python benchmarks/kernels.py`` prints a table for the shapes of BERT-base, GPT-2 and Llama-7B, of eight ranks.

Gradients are tensors of the meta device, which takes an accelerator's path through the hooks and has no values: any look at
one from the host raises an error. Ranks are torch's fake process group. A kernel is every ATen call that is neither a view nor
an allocation. A call on a list of tensors counts once where CUDA has a kernel for the whole list, and once a tensor where it
has not (tensors of different strides). Collectives are counted apart.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend
from torch.utils._python_dispatch import TorchDispatchMode

from accel_commhooks.comm.collectives import Communicator
from accel_commhooks.comm.cost import Problem
from accel_commhooks.comm.topology import Topology
from accel_commhooks.config.config import CommHookConfig
from accel_commhooks.config.registry import get_hook
from accel_commhooks.hooks.base import CommHook, HookContext
from accel_commhooks.hooks.int8_compress import in_parcels

WORLD = 8
NO_KERNEL = (
    "aten.empty",
    "aten.new_empty",
    "aten.detach",
    "aten.alias",
    "aten.lift_fresh",
    "aten._unsafe_view",
    "aten.promote_types",
    "prim.",
    "profiler.",
)
"""Allocations, views that are not marked as such, questions about types."""
IN_KERNEL = ("aten._foreach", "aten._amp_foreach")


class KernelCount(TorchDispatchMode):
    """Counts kernels and collectives, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.collectives: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        if name.startswith("c10d."):
            self.collectives[name] += 1
        elif not function.is_view and not name.startswith(NO_KERNEL):
            self.kernels[name] += _launches(name, args)
        return function(*args, **(kwargs or {}))

    @property
    def total(self) -> int:
        return self.kernels.total()


def _launches(name: str, args: tuple) -> int:
    """One for a call; one a tensor for a call on lists that CUDA's list kernels do not take."""
    if not name.startswith(IN_KERNEL):
        return 1
    lists = [arg for arg in args if isinstance(arg, (list, tuple)) and arg and torch.is_tensor(arg[0])]
    in_one = all(
        all(t.stride() == tensors[0].stride() and t.shape == tensors[0].shape for t in tensors)
        and all(_is_dense(t) for t in tensors)
        for tensors in zip(*lists, strict=True)
    )
    return 1 if in_one else len(lists[0])


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a piece of memory, in any order of dimensions."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


# Shapes, as Transformers names and orders them.

Shapes = dict[str, tuple[int, ...]]


def _linear(shapes: Shapes, name: str, out: int, into: int, bias: bool = True) -> None:
    shapes[f"{name}.weight"] = (out, into)
    if bias:
        shapes[f"{name}.bias"] = (out,)


def _norm(shapes: Shapes, name: str, width: int, bias: bool = True) -> None:
    shapes[f"{name}.weight"] = (width,)
    if bias:
        shapes[f"{name}.bias"] = (width,)


def bert_base(layers: int = 12, width: int = 768) -> Shapes:
    shapes: Shapes = {
        f"embeddings.{kind}.weight": (n, width) for kind, n in (("word", 30522), ("position", 512), ("type", 2))
    }
    _norm(shapes, "embeddings.norm", width)
    for layer in range(layers):
        for part in ("query", "key", "value", "output"):
            _linear(shapes, f"{layer}.{part}", width, width)
        _norm(shapes, f"{layer}.attention_norm", width)
        _linear(shapes, f"{layer}.up", 4 * width, width)
        _linear(shapes, f"{layer}.down", width, 4 * width)
        _norm(shapes, f"{layer}.norm", width)
    _linear(shapes, "pooler", width, width)
    return shapes


def gpt2(layers: int = 12, width: int = 768) -> Shapes:
    shapes: Shapes = {"wte.weight": (50257, width), "wpe.weight": (1024, width)}
    for layer in range(layers):
        _norm(shapes, f"{layer}.ln_1", width)
        shapes |= {f"{layer}.c_attn.weight": (width, 3 * width), f"{layer}.c_attn.bias": (3 * width,)}
        shapes |= {f"{layer}.attn.c_proj.weight": (width, width), f"{layer}.attn.c_proj.bias": (width,)}
        _norm(shapes, f"{layer}.ln_2", width)
        shapes |= {f"{layer}.c_fc.weight": (width, 4 * width), f"{layer}.c_fc.bias": (4 * width,)}
        shapes |= {f"{layer}.mlp.c_proj.weight": (4 * width, width), f"{layer}.mlp.c_proj.bias": (width,)}
    _norm(shapes, "ln_f", width)
    return shapes


def llama_7b(layers: int = 32, width: int = 4096, inner: int = 11008) -> Shapes:
    shapes: Shapes = {"embed_tokens.weight": (32000, width)}
    for layer in range(layers):
        for part in ("q", "k", "v", "o"):
            _linear(shapes, f"{layer}.{part}_proj", width, width, bias=False)
        for part, (out, into) in {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}.items():
            _linear(shapes, f"{layer}.{part}_proj", out, into, bias=False)
        _norm(shapes, f"{layer}.input_norm", width, bias=False)
        _norm(shapes, f"{layer}.attention_norm", width, bias=False)
    _norm(shapes, "norm", width, bias=False)
    _linear(shapes, "lm_head", 32000, width, bias=False)
    return shapes


MODELS: dict[str, Callable[[], Shapes]] = {"BERT-base": bert_base, "GPT-2": gpt2, "Llama-7B": llama_7b}


# A step, without DDP.


class FakeBucket:
    """What DDP hands to a hook."""

    def __init__(self, index: int, last: bool, parameters: list[torch.nn.Parameter]):
        self._index, self._last, self._parameters = index, last, parameters
        self._buffer = torch.empty(
            sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=parameters[0].device
        )

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._last

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def parameters(self) -> list[torch.nn.Parameter]:
        return self._parameters

    def gradients(self) -> list[torch.Tensor]:
        parts = self._buffer.split([p.numel() for p in self._parameters])
        return [part.view_as(p) for part, p in zip(parts, self._parameters, strict=True)]

    def set_buffer(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer


@contextmanager
def fake_ranks(world: int = WORLD) -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=world, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class Model(torch.nn.Module):
    """Parameters of given shapes, in one flat module, on the meta device."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype = torch.float32):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(
                name.replace(".", "_"), torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
            )


@dataclass
class Run:
    """A hook at work on fake buckets."""

    hook: CommHook
    model: Model
    optimizer: torch.optim.Optimizer
    buckets: list[FakeBucket] = field(default_factory=list)

    @classmethod
    def start(cls, name: str, options: dict[str, Any], shapes: Shapes, *, finds_unused: bool = False) -> Run:
        model = Model(shapes)
        names = {parameter: name for name, parameter in model.named_parameters()}
        comm = Communicator(ranks_per_node=1)
        context = HookContext(
            comm=comm, names=names, module=model, finds_unused=finds_unused, loss_scale=lambda device: None
        )
        config = CommHookConfig.load(name, **options)
        hook = get_hook(config.name)(config.build_options(), context)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        hook.bind([optimizer])
        run = cls(hook, model, optimizer)
        by_name = dict(model.named_parameters())
        parts = Problem.of(model, comm.topology).buckets()
        run.buckets = [
            FakeBucket(index, index == len(parts) - 1, [by_name[name] for name, _ in part])
            for index, part in enumerate(parts)
        ]
        return run

    def step(self) -> None:
        """Backward as DDP runs it, then the optimizer's step."""
        self.hook.before_forward()
        _Backward.apply(torch.zeros((), requires_grad=True), self._backward).backward()
        self.hook.before_step(self.optimizer)
        self.optimizer.step()
        self.hook.after_step(self.optimizer)
        self.hook.step_done()
        self.hook.catch_up()
        self.optimizer.zero_grad()
        self.hook.synchronize()

    def _backward(self) -> None:
        self.hook.begin_backward()
        futures = [self.hook.reduce(bucket) for bucket in self.buckets]  # type: ignore[arg-type]
        assert all(future.done() for future in futures), "a bucket was not delivered"
        for bucket in self.buckets:
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                parameter.grad = gradient


class _Backward(torch.autograd.Function):
    """Runs a function inside a backward: hooks ask for what comes at its end."""

    @staticmethod
    def forward(ctx: Any, start: torch.Tensor, function: Callable[[], None]) -> torch.Tensor:
        ctx.function = function
        return start.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.function()
        return gradient, None


def count(name: str, options: dict[str, Any], shapes: Shapes, *, warm_up: int = 4, **context: Any) -> KernelCount:
    """A step of a hook that is at work. PowerSGD takes samples for its figures in two of twenty steps, and not in this one."""
    run = Run.start(name, options, shapes, **context)
    for _ in range(warm_up):
        run.step()
    with KernelCount() as counted:
        run.step()
    return counted


def added(name: str, options: dict[str, Any], shapes: Shapes, **context: Any) -> int:
    """Kernels of a step beyond those of plain averaging without a hook: DDP divides each bucket once, in its copy."""
    plain = count("noop", {"i_know_that_replicas_diverge": True}, shapes)
    return count(name, options, shapes, **context).total - plain.total


# torch's own, for comparison.


def torch_powersgd(rank: int, shapes: Shapes) -> KernelCount:
    """A step of torch's hook with batched shapes. Its callbacks run at once here, so none of their kernels is missed."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as stock

    state = stock.PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=2, batch_tensors_with_same_shape=True
    )
    run = Run.start("noop", {"i_know_that_replicas_diverge": True}, shapes)

    def step() -> None:
        for bucket in run.buckets:
            stock.powerSGD_hook(state, bucket).wait()

    with mock.patch.object(dist, "all_reduce", _completed_at_once(dist.all_reduce)):
        for _ in range(5):
            step()
        with KernelCount() as counted:
            step()
    return counted


def _completed_at_once(real: Callable[..., Any]) -> Callable[..., Any]:
    """An all-reduce whose Future has the value that a real group would set; the fake group sets none."""

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        real(tensor, *args, **kwargs)
        future: torch.futures.Future = torch.futures.Future()
        future.set_result([tensor])
        return mock.Mock(get_future=lambda: future, wait=lambda: None)

    return all_reduce


# The command.

CASES: dict[str, tuple[str, dict[str, Any], str, float]] = {
    # name of the row: hook, options, what is counted by, kernels allowed for each
    "powersgd, rank 4": ("powersgd", {"start_powerSGD_iter": 0, "matrix_approximation_rank": 4}, "matrix", 10),
    "powersgd, rank 16": ("powersgd", {"start_powerSGD_iter": 0, "matrix_approximation_rank": 16}, "matrix", 10),
    "powersgd, rank 32": ("powersgd", {"start_powerSGD_iter": 0, "matrix_approximation_rank": 32}, "matrix", 10),
    "powersgd, alternate": (
        "powersgd",
        {"start_powerSGD_iter": 0, "matrix_approximation_rank": 4, "alternate": True},
        "matrix",
        7,
    ),
    "powersgd, rank 15 in int8": ("powersgd", {"start_powerSGD_iter": 0}, "matrix", 14),
    "zero_overlap": ("zero_overlap", {}, "parameter", 3),
    "zero_overlap, bf16 wire": ("zero_overlap", {"wire_dtype": "bf16"}, "parameter", 5),
    "zero_overlap, int8 wire": ("zero_overlap", {"wire_dtype": "int8"}, "parameter", 20),
    "batched_powersgd": ("batched_powersgd", {"start_powerSGD_iter": 0}, "model", 425),
    "allreduce": ("allreduce", {}, "bucket", 1),
    "bf16_compress": ("bf16_compress", {}, "bucket", 3),
    "int8_compress": ("int8_compress", {}, "parcel", 36),
}


def size_of(shapes: Shapes, what: str) -> int:
    """Matrices that are compressed, parameters, buckets, or parcels of a model."""
    if what == "model":
        return 1
    if what == "parameter":
        return len(shapes)
    if what == "parcel":
        return len(in_parcels([math.prod(shape) for shape in shapes.values()]))
    if what == "matrix":
        options = CommHookConfig.load("powersgd").build_options()
        return sum(options.matrix_of(name, shape)[2] > 0 for name, shape in shapes.items())
    return len(Problem.of(Model(shapes), Topology.even(WORLD, 1)).buckets())


def main() -> None:
    print(f"Kernels added to a step, {WORLD} ranks; collectives apart\n")
    made = {name: make() for name, make in MODELS.items()}
    columns = [
        f"{name} ({size_of(shapes, 'matrix')} matrices, {len(shapes)} parameters, {size_of(shapes, 'bucket')} buckets)"
        for name, shapes in made.items()
    ]
    print("| | " + " | ".join(columns) + " | at most |\n|---|" + "---|" * (len(columns) + 1))
    with fake_ranks():
        for row, (hook, options, what, allowed) in CASES.items():
            figures = [added(hook, options, shapes) for shapes in made.values()]
            print(
                f"| {row} | " + " | ".join(f"{figure:,}" for figure in figures) + f" | {allowed:g} a {what} |",
                flush=True,
            )
        for rank in (4, 32):
            figures = [torch_powersgd(rank, shapes).total for shapes in made.values()]
            row = f"torch's powerSGD_hook, batched shapes, rank {rank}"
            print(f"| {row} | " + " | ".join(f"{figure:,}" for figure in figures) + " | |", flush=True)


if __name__ == "__main__":
    main()
