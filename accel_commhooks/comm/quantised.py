"""Numbers as 8-bit digits with a scale for each block of them: a quarter of float32's bytes.

A message holds the digits of some blocks, and behind them the blocks' scales in bfloat16. A digit is a whole number from -127
to 127, and means digit x scale; the largest of a block is 127, so an error is at most 1/253 of its block's largest number.
Blocks are short, so that a large number costs the digits of its neighbours only.

An infinity or a NaN makes its whole block non-finite; so does a float64 above 4e40, as bfloat16 cannot hold its scale.
"""

from __future__ import annotations

import math

import torch

BLOCK = 128
"""Numbers with one scale."""
_LARGEST_DIGIT = 127
_SCALE = torch.bfloat16
DIGIT_ERROR = 0.5 / _LARGEST_DIGIT * (1 + 2**-8)
"""The largest error of a number, relative to the largest one of its block; a scale is rounded to 8 bits."""
# What a block of zeros takes for its largest number; its scale is above what some devices take for zero.
_SMALLEST = 2.0**-112


def blocks_of(numbers: int) -> int:
    """Blocks that hold so many numbers; the last one may be padded."""
    return math.ceil(numbers / BLOCK)


def in_blocks(numbers: int) -> int:
    """So many numbers and their padding."""
    return blocks_of(numbers) * BLOCK


def blocks_for(numbers: int, ranks: int) -> int:
    """Blocks in each of so many equal parts that hold the numbers together; the last ones may be padding."""
    return math.ceil(blocks_of(numbers) / ranks)


def in_whole_blocks(tensor: torch.Tensor, ranks: int) -> torch.Tensor:
    """[ranks, blocks, BLOCK] in at least float32: a view of the tensor where nothing has to be padded."""
    blocks, dtype = blocks_for(tensor.numel(), ranks), torch.promote_types(tensor.dtype, torch.float32)
    shape = (ranks, blocks, BLOCK)
    if tensor.dtype == dtype and tensor.is_contiguous() and tensor.numel() == ranks * blocks * BLOCK:
        return tensor.view(shape)
    values = torch.zeros(ranks * blocks * BLOCK, dtype=dtype, device=tensor.device)
    values[: tensor.numel()].copy_(tensor.reshape(-1))
    return values.view(shape)


def message_bytes(blocks: int) -> int:
    return blocks * (BLOCK + _SCALE.itemsize)


def encode(values: torch.Tensor) -> torch.Tensor:
    """Messages [..., bytes] for values [..., blocks, BLOCK] of at least float32."""
    blocks = values.shape[-2]
    message = torch.empty(*values.shape[:-2], message_bytes(blocks), dtype=torch.int8, device=values.device)
    digits, scales = _parts(message, blocks)
    largest = _largest(values)
    torch.div(largest.clamp_min_(_SMALLEST), _LARGEST_DIGIT, out=scales)
    digits.copy_(torch.div(values, scales.unsqueeze(-1)).round_())
    return message


def decode(message: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The values of messages [..., bytes], in ``out`` [..., blocks, BLOCK] of at least float32."""
    digits, scales = _parts(message, out.shape[-2])
    return out.copy_(digits).mul_(scales.unsqueeze(-1))


def _largest(values: torch.Tensor) -> torch.Tensor:
    """The largest absolute value of each block."""
    if values.device.type == "cpu":  # where it takes a thirtieth of a norm's time
        return torch.maximum(values.amax(dim=-1), values.amin(dim=-1).neg_())
    return torch.linalg.vector_norm(values, math.inf, dim=-1)


def _parts(message: torch.Tensor, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a message: digits [..., blocks, BLOCK], scales [..., blocks]."""
    digits, scales = message.split([blocks * BLOCK, blocks * _SCALE.itemsize], dim=-1)
    return digits.unflatten(-1, (blocks, BLOCK)), scales.view(_SCALE)
