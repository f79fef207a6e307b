"""PowerSGD's options. Those that torch's hook has too keep their names and meaning."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...comm.wire import wire_dtype_option
from ...config.errors import shown
from ...config.options import HookOptions, option
from .lowrank import rank_for

RANK = 4
RANK_IN_DIGITS = 15
"""Of as many bytes: at equal bytes a higher rank in digits learns better (docs/accuracy.md)."""


@dataclass(kw_only=True)
class LowRankOptions(HookOptions):
    matrix_approximation_rank: int | None = option(
        RANK,
        "Rank of the approximation: bytes grow with it.",
        at_least=1,
        remedy="use name: allreduce for no compression",
    )
    start_powerSGD_iter: int = option(
        100, "Optimizer steps with plain averaging before compression starts.", at_least=0, delays_start=True
    )
    min_compression_rate: float = option(2.0, "Matrices that would shrink by less travel uncompressed.", above=0)
    use_error_feedback: bool = option(True, "Add what compression missed to the next gradient.")
    warm_start: bool = option(True, "Start from the factors of the previous step instead of random ones.")
    orthogonalization_epsilon: float = option(0.0, "Added to norms; zero is safe here.", at_least=0)
    random_seed: int = option(0, "Seed of the first factors, the same on every rank.")
    compression_stats_logging_frequency: int = option(10_000, "Steps between two log lines.", at_least=1)
    batch_tensors_with_same_shape: bool = option(
        False, "Multiply matrices of one shape that lie at even distances in one call on CPUs too; elsewhere always."
    )
    alternate: bool = option(False, "Send one factor per step, P and Q in turn: half the bytes and collectives.")
    wire_dtype: str | None = wire_dtype_option("Type in which P and Q travel: fp16, bf16 or int8.")
    scope: str = option("all", "all: compress between all ranks; node: only between nodes.", choices=("all", "node"))

    @property
    def rank(self) -> int:
        """``matrix_approximation_rank``, given or chosen."""
        assert self.matrix_approximation_rank is not None, "check() has chosen one"
        return self.matrix_approximation_rank

    def check(self) -> None:
        if self.matrix_approximation_rank is None:
            self.matrix_approximation_rank = RANK

    def cycle(self) -> int:
        return 2 if self.alternate else 1


def _are_patterns(value: list) -> str | None:
    if all(isinstance(pattern, str) for pattern in value):
        return None
    return f"patterns must be a list of texts, but got {shown(value)}"


def _are_ranks(value: dict) -> str | None:
    for pattern, rank in value.items():
        if not isinstance(pattern, str) or not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
            return (
                f"ranks must map name patterns to whole numbers of at least 0, but got {shown(pattern)}: {shown(rank)}"
            )
    return None


@dataclass(kw_only=True)
class PowerSGDOptions(LowRankOptions):
    matrix_approximation_rank: int | None = option(
        None,
        f"Rank of the approximation: bytes grow with it. {RANK_IN_DIGITS} with int8 when not given, else {RANK}.",
        at_least=1,
        remedy="use name: allreduce for no compression",
    )
    wire_dtype: str | None = wire_dtype_option(
        "Type in which P and Q travel: fp16, bf16 or int8; auto is int8 where no rank is given, and else null.", "auto"
    )
    include: list = option([], "Name patterns of the parameters to compress; empty means all.", check=_are_patterns)
    exclude: list = option([], "Name patterns of the parameters to send uncompressed.", check=_are_patterns)
    ranks: dict = option({}, "Rank per name pattern, first match wins; 0 sends uncompressed.", check=_are_ranks)

    def check(self) -> None:
        if self.wire_dtype == "auto":
            names_a_rank = self.matrix_approximation_rank is not None or any(self.ranks.values())
            self.wire_dtype = None if names_a_rank else "int8"
        if self.matrix_approximation_rank is None and self.wire_dtype == "int8":
            self.matrix_approximation_rank = RANK_IN_DIGITS
        super().check()

    def rank_of(self, name: str) -> int:
        """The rank asked for a parameter; 0 for none."""
        if any(fnmatch.fnmatch(name, pattern) for pattern in self.exclude):
            return 0
        for pattern, rank in self.ranks.items():
            if fnmatch.fnmatch(name, pattern):
                return rank
        if self.include and not any(fnmatch.fnmatch(name, pattern) for pattern in self.include):
            return 0
        return self.rank

    def matrix_of(self, name: str, shape: Sequence[int]) -> tuple[int, int, int]:
        """(rows, columns, rank) of a parameter as a matrix; rank 0 if it is sent uncompressed."""
        rows = shape[0] if shape else 1
        columns = math.prod(shape) // max(rows, 1)
        asked = self.rank_of(name)
        rate = self.min_compression_rate / (4 if self.wire_dtype == "int8" else 1)  # a digit is a quarter of a number
        return rows, columns, rank_for(rows, columns, asked, rate) if asked else 0
