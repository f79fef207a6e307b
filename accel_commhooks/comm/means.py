"""Means over a group in a wire type: added up on their way, or in digits (quantised.py), which takes two collectives."""

from __future__ import annotations

import torch

from .chains import Steps
from .collectives import Communicator
from .pending import PendingCollective
from .quantised import decode, encode, in_whole_blocks
from .survivors import Group
from .wire import is_quantised, narrows


def steps_of_mean(
    comm: Communicator,
    tensor: torch.Tensor,
    group: Group,
    wire_dtype: torch.dtype | None,
    lost: torch.Tensor | None = None,
) -> Steps:
    """The mean over the group, in place, as a chain or a part of one.

    ``lost`` becomes what rounding took of this rank's digits: ``mean(values) = result + mean(lost)`` over the ranks. It is
    zero with types that are added up on their way, where nobody can tell. A rank alone takes as many steps as others, so that
    chains stay in step on all ranks.
    """
    if is_quantised(wire_dtype) and narrows(tensor, wire_dtype):
        yield from _mean_in_digits(comm, tensor, group, lost)
        return
    if lost is not None:
        lost.zero_()
    pending = comm.all_reduce(tensor, group=group, wire_dtype=wire_dtype)
    yield
    pending.wait()


def _mean_in_digits(comm: Communicator, tensor: torch.Tensor, group: Group, lost: torch.Tensor | None) -> Steps:
    """Each rank sends every other its part in digits, and the mean of its own part, in digits again, to everybody.

    That is about a quarter of what a ring sends in float32. Sums are made in float32, and all ranks get the same bits.
    What the second rounding takes belongs to no rank's values: the rank that rounded has it in its ``lost``, times the
    number of ranks.
    """
    if group.size == 1 or not tensor.numel():
        if lost is not None:
            lost.zero_()
        yield
        yield
        return
    values = in_whole_blocks(tensor, group.size)
    sent = encode(values)
    if lost is not None:
        missing = decode(sent, torch.empty_like(values)).neg_().add_(values)
    parts = comm.all_to_all(sent, group=group)
    yield
    mean = _mean_of_parts(parts, values)
    message = encode(mean)
    if lost is not None:
        missing[group.index].add_(mean - decode(message, torch.empty_like(mean)), alpha=group.size)
        lost.copy_(missing.view(-1)[: lost.numel()].view_as(lost))
    means = comm.all_gather(message.new_empty(group.size * len(message)), message, group=group)
    yield
    decode(means.wait().view(group.size, -1), values)
    if values.data_ptr() != tensor.data_ptr():
        tensor.copy_(values.view(-1)[: tensor.numel()].view_as(tensor))


def scattered_mean(
    comm: Communicator, out: torch.Tensor, chunks: torch.Tensor, wire_dtype: torch.dtype | None
) -> PendingCollective:
    """``out`` becomes this rank's row of the mean of everyone's ``chunks`` [size, n]; in digits, n is whole blocks."""
    group = comm.everyone
    if group.size == 1 or not is_quantised(wire_dtype) or not narrows(chunks, wire_dtype):
        return comm.reduce_scatter(out, chunks, wire_dtype=wire_dtype)
    values = in_whole_blocks(chunks, group.size)
    assert values.numel() == chunks.numel(), "chunks must be whole blocks"
    parts = comm.all_to_all(encode(values), group=group)
    return PendingCollective(
        out, (), group, comm.traffic, finish=lambda: out.copy_(_mean_of_parts(parts, values).view_as(out))
    )


def _mean_of_parts(parts: PendingCollective, like: torch.Tensor) -> torch.Tensor:
    # Divided first, so that a sum cannot overflow where the mean would not.
    return decode(parts.wait(), torch.empty_like(like)).div_(len(like)).sum(0)
