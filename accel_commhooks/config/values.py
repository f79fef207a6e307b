"""What holds for the value of every option, however deep inside it: numbers are finite, whole numbers fit in 64 bits."""

from __future__ import annotations

import math
from typing import Any

from .errors import shown

DEEPEST = 100
MOST = 50_000


def fits_in_64_bits(number: int) -> bool:
    return -(2**63) <= number < 2**63


def problem_inside(name: str, value: Any) -> str | None:
    """The broken rule as text, or None. Lists that contain themselves come to an end too."""
    pending = [(name, value, 0)]
    looked_at = 0
    while pending:
        path, value, depth = pending.pop()
        looked_at += 1
        if depth > DEEPEST or looked_at > MOST:
            return f"{name} must hold at most {MOST} values, nested at most {DEEPEST} deep, but got {shown(value)} inside it"
        if isinstance(value, bool):
            continue
        if isinstance(value, int) and not fits_in_64_bits(value):
            return f"{path} must fit in 64 bits, but got {shown(value)}"
        if isinstance(value, float) and not math.isfinite(value):
            return f"{path} must be a finite number, but got {value}"
        if isinstance(value, dict):
            pending += [(f"a key of {path}", key, depth + 1) for key in value]
            pending += [(f"{path}.{_short(key)}", inner, depth + 1) for key, inner in value.items()]
        elif isinstance(value, (list, tuple)):
            pending += [(f"{path}[{index}]", inner, depth + 1) for index, inner in enumerate(value)]
    return None


def _short(key: Any) -> str:
    return key if isinstance(key, str) and len(key) < 60 else shown(key)
