"""What a step is, in loops that do more than forward, backward, step: each is compared with plain DDP or with itself."""

import copy

import pytest
import torch
import torch.distributed as dist
from models import FailingBackward, Net, PlantedFailure, batch, distance, loss_of, make_ddp, weights
from torch import nn
from torch.utils.checkpoint import checkpoint

from accel_commhooks import attach

LOCAL = {"start_localSGD_iter": 2, "period": 3, "subgroup": "none"}
HOOKS = {
    "allreduce": {},
    "powersgd": {"start_powerSGD_iter": 2},
    "batched_powersgd": {"start_powerSGD_iter": 2},
    "post_localsgd": LOCAL,
    "zero_overlap": {},
}
every_hook = pytest.mark.parametrize("name", HOOKS)
EXACT = ("allreduce", "zero_overlap")


def _sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)


def _attach(ddp, name, optimizer=None, **options):
    return attach(ddp, name, optimizer=optimizer, **{**HOOKS[name], **options}) if name is not None else None


def _outcome(ddp, handle):
    """(steps counted, final weights once replicas are equal, figures)"""
    if handle is None:
        return None, weights(ddp), {}
    figures = handle.metrics()
    handle.synchronize()
    return handle.steps, weights(ddp), figures


def _compare(pool, function, name, *args, steps, world_size=2):
    """Run a loop with a hook: ranks end equal, every step was counted once, and exact hooks end where plain DDP does."""
    by_rank = pool.run(function, world_size, name, *args)
    for counted, final, _ in by_rank:
        assert counted == steps
        assert distance(final, by_rank[0][1]) == 0
        assert all(torch.isfinite(weight).all() for weight in final.values())
    if name in EXACT:
        plain = pool.run(function, world_size, None, *args)[0][1]
        assert distance(by_rank[0][1], plain) <= 1e-6
    return by_rank


def _contrastive(rank, world_size, name):
    ddp = make_ddp()
    optimizer = _sgd(ddp)
    handle = _attach(ddp, name, optimizer)
    for step in range(8):
        first, second = (nn.functional.normalize(ddp(batch(rank, 2 * step + half)[0])) for half in range(2))
        nn.functional.cross_entropy(first @ second.t(), torch.arange(len(first))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return _outcome(ddp, handle)


@every_hook
def test_two_forwards_and_one_backward_are_one_step(pool, name):
    for _, _, figures in _compare(pool, _contrastive, name, steps=8):
        if name == "allreduce":
            assert figures["comm_compression"] == pytest.approx(1, abs=0.01)


def _uneven_forwards(rank, world_size, name):
    """Bags of different sizes, and a validation without no_grad that only some ranks run."""
    ddp = make_ddp()
    optimizer = _sgd(ddp)
    handle = _attach(ddp, name, optimizer)
    for step in range(8):
        sum(loss_of(ddp, rank, 10 * step + item) for item in range(1 + (rank + step) % 3)).backward()
        optimizer.step()
        optimizer.zero_grad()
        for item in range(rank):
            loss_of(ddp, rank, 100 + item)
    return _outcome(ddp, handle)


@every_hook
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_may_differ_in_their_forwards(pool, name, world_size):
    _compare(pool, _uneven_forwards, name, steps=8, world_size=world_size)


def _overflow_on_one_rank(rank, world_size, set_to_none):
    ddp = make_ddp()
    optimizer = _sgd(ddp)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    handle = attach(ddp, "post_localsgd", optimizer=optimizer, **LOCAL)
    answers, skipped = [], 0
    for step in range(11):
        loss = loss_of(ddp, rank, step)
        if rank == 0 and step in (3, 4, 8):
            loss = loss * torch.inf
        before = weights(ddp)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        skipped += distance(before, weights(ddp)) == 0
        optimizer.zero_grad(set_to_none=set_to_none)
        own = torch.full((5,), float(rank + step))  # the script's own collective must not meet one of ours
        dist.all_reduce(own)
        answers.append(own.tolist() == [2.0 * step + 1] * 5)
        loss_of(ddp, rank, step)
    handle.synchronize()
    return handle.steps, all(answers), skipped, weights(ddp)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_step_that_a_scaler_skips_on_one_rank_is_counted_on_all(pool, set_to_none):
    first, second = pool.run(_overflow_on_one_rank, 2, set_to_none)
    assert first[2] >= 1 and second[2] == 0, "only rank 0 was to skip a step"
    assert first[:2] == second[:2] == (11, True)
    assert distance(first[3], second[3]) == 0


def _closure(rank, world_size, name, options):
    ddp = make_ddp()
    optimizer = _sgd(ddp)
    handle = _attach(ddp, name, optimizer, **options)
    losses = []
    for step in range(10):

        def closure():
            optimizer.zero_grad()
            loss = loss_of(ddp, rank, step)  # noqa: B023 - called at once
            loss.backward()
            return loss

        if step % 2:
            losses.append(optimizer.step(closure))
        else:
            losses.append(optimizer.step(closure=closure))
    assert all(torch.is_tensor(loss) for loss in losses)
    turns = getattr(handle.hook, "_compressed_steps", None) if handle is not None else None
    return *_outcome(ddp, handle)[:2], turns


@every_hook
def test_the_backward_in_a_closure_belongs_to_its_step(pool, name):
    _compare(pool, _closure, name, {}, steps=10)


def test_alternate_takes_turns_under_a_closure(pool):
    by_rank = _compare(pool, _closure, "powersgd", {"alternate": True}, steps=10)
    assert [turns for _, _, turns in by_rank] == [8, 8]


class Adapted(nn.Module):
    """Frozen blocks with low-rank adapters inside checkpoints: reentrant backwards hold all trainable weights."""

    def __init__(self, blocks=3, width=12):
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(width, width).requires_grad_(False) for _ in range(blocks))
        self.down = nn.ModuleList(nn.Linear(width, 2, bias=False) for _ in range(blocks))
        self.up = nn.ModuleList(nn.Linear(2, width, bias=False) for _ in range(blocks))

    def forward(self, hidden):
        hidden = hidden.requires_grad_()
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            hidden = checkpoint(lambda x, b=base, d=down, u=up: torch.tanh(b(x) + u(d(x))), hidden, use_reentrant=True)
        return hidden


def _reentrant(rank, world_size, name):
    ddp = make_ddp(Adapted(), static_graph=False)
    optimizer = _sgd(ddp)
    options = {"subgroup": "node", "ranks_per_node": 2, "period": 100} if name == "post_localsgd" else {}
    handle = _attach(ddp, name, optimizer, **options)
    for step in range(8):
        data = torch.randn(4, 12, generator=torch.Generator().manual_seed(10 * step + rank))
        ddp(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return (
        handle.steps if handle else None,
        weights(ddp),
        handle.hook.replicas.diverged if name == "post_localsgd" else None,
    )


@every_hook
def test_reentrant_checkpointing_with_all_weights_inside(pool, name):
    world_size = 4 if name == "post_localsgd" else 2
    by_rank = pool.run(_reentrant, world_size, name)
    assert {steps for steps, _, _ in by_rank} == {8}
    for node in range(0, world_size, 2):
        assert distance(by_rank[node][1], by_rank[node + 1][1]) == 0
    if name == "post_localsgd":
        assert by_rank[0][2] and distance(by_rank[0][1], by_rank[2][1]) > 0, "nodes train apart, and that is known"
    if name in EXACT:
        assert distance(by_rank[0][1], pool.run(_reentrant, 2, None)[0][1]) <= 1e-6


def _toggled(rank, world_size, name):
    """A GAN: the discriminator is frozen while the generator learns through it."""
    torch.manual_seed(0)
    generator, discriminator = make_ddp(Net(), seed=1), make_ddp(nn.Linear(20, 1), seed=2)
    optimizers = [_sgd(generator), _sgd(discriminator)]
    options = {"subgroup": "node", "ranks_per_node": 2, "period": 3} if name == "post_localsgd" else {}
    handles = [
        _attach(model, name, optimizer, **options)
        for model, optimizer in zip((generator, discriminator), optimizers, strict=True)
    ]
    inside = []
    for step in range(8):
        tokens = batch(rank, step)[0]
        discriminator.requires_grad_(False)
        optimizers[0].zero_grad()
        torch.sigmoid(discriminator(generator(tokens))).mean().backward()
        optimizers[0].step()
        discriminator.requires_grad_(True)
        optimizers[1].zero_grad()
        apart = discriminator(generator(tokens).detach()).mean() - discriminator(torch.ones(4, 20)).mean()
        torch.sigmoid(apart).backward()
        optimizers[1].step()
        inside.append({**weights(generator), **weights(discriminator)})
    for handle in handles:
        if handle is not None:
            handle.synchronize()
    return [h.steps for h in handles if h], {**weights(generator), **weights(discriminator)}, inside


@every_hook
def test_a_discriminator_frozen_for_the_generators_turn(pool, name):
    world_size = 4 if name == "post_localsgd" else 2
    by_rank = pool.run(_toggled, world_size, name)
    for steps, final, _ in by_rank:
        assert steps == [8, 8]
        assert distance(final, by_rank[0][1]) == 0
    for node in range(0, world_size, 2):
        for mine, others in zip(by_rank[node][2], by_rank[node + 1][2], strict=True):
            assert distance(mine, others) == 0, "ranks of one node share every gradient"
    if name in EXACT:
        assert distance(by_rank[0][1], pool.run(_toggled, 2, None)[0][1]) <= 1e-6


def _two_optimizers(rank, world_size, name):
    ddp = make_ddp()
    parameters = list(ddp.parameters())
    optimizers = [
        torch.optim.SGD(parameters[:3], lr=0.1, momentum=0.9),
        torch.optim.AdamW(parameters[3:], lr=0.01),
    ]
    handle = _attach(ddp, name)
    apart = []
    for step in range(9):
        loss_of(ddp, rank, step).backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        if name == "post_localsgd":
            apart.append(handle.hook.replicas.diverged)
    return *_outcome(ddp, handle)[:2], apart


@every_hook
def test_a_step_ends_when_all_optimizers_have_stepped(pool, name):
    by_rank = _compare(pool, _two_optimizers, name, steps=9)
    if name == "post_localsgd":
        # Averaged after steps 0 to 2 (equal anyway), then after every third one.
        assert by_rank[0][2].count(False) >= 4 and by_rank[0][2].count(True) >= 3


def _discards(rank, world_size, discard, set_to_none):
    """Gradients of a huge loss are cleared without a step; with ``discard`` False that never happens."""
    ddp = make_ddp()
    optimizer = _sgd(ddp)
    handle = attach(ddp, "powersgd", optimizer=optimizer, start_powerSGD_iter=0, matrix_approximation_rank=1)
    residuals = []
    for step in range(8):
        loss_of(ddp, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        residuals.append(sum(float(e.square().sum()) for e in handle.state_dict()["error"].values()) ** 0.5)
        if discard:
            (1000 * loss_of(ddp, rank, 50 + step)).backward()
            optimizer.zero_grad(set_to_none=set_to_none)
    loss_of(ddp, rank, 8).backward()
    return handle.steps, residuals


@pytest.mark.parametrize("set_to_none", [True, False])
def test_discarded_gradients_leave_no_trace(pool, set_to_none):
    without = pool.run(_discards, 2, False, set_to_none)
    with_discards = pool.run(_discards, 2, True, set_to_none)
    for (steps, clean), (other_steps, residuals) in zip(without, with_discards, strict=True):
        assert steps == other_steps == 8
        assert min(clean) > 0
        # A residual that had kept some of a gradient a thousand times as large would be hundreds of times as large.
        assert all(0 < found < 5 * expected for found, expected in zip(residuals, clean, strict=True)), residuals


def _late_scaler(rank, world_size, late):
    """Power-of-two scales change nothing but exponents, so a scaler may come at any time, and two may take turns."""
    ddp = make_ddp()
    optimizer = _sgd(ddp)
    handle = attach(ddp, "powersgd", optimizer=optimizer, start_powerSGD_iter=1, matrix_approximation_rank=1)
    scalers = []
    for step in range(10):
        if late and step in (3, 6):
            scalers.append(torch.amp.GradScaler("cpu", init_scale=2.0 ** (8 + step)))
        loss = loss_of(ddp, rank, step)
        if scalers:
            scaler = scalers[step % len(scalers)]
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
    return handle.steps, weights(ddp)


def test_scalers_may_come_late_and_be_several(pool):
    plain, scaled = (pool.run(_late_scaler, 2, late) for late in (False, True))
    for (steps, expected), (scaled_steps, found) in zip(plain, scaled, strict=True):
        assert steps == scaled_steps == 10
        assert distance(expected, found) <= 1e-5


def _broken_backward(rank, world_size, name):
    """An error in a backward (out of memory) is caught, and training goes on."""
    ddp = make_ddp()
    optimizer = _sgd(ddp)
    handle = _attach(ddp, name, optimizer)
    for step in range(8):
        if step in (1, 4, 6):
            with pytest.raises(PlantedFailure):
                FailingBackward.apply(loss_of(ddp, rank, 77)).backward()
            optimizer.zero_grad()
        loss_of(ddp, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return _outcome(ddp, handle)


@every_hook
def test_a_backward_that_fails_is_forgotten(pool, name):
    _compare(pool, _broken_backward, name, steps=8)


def _figures_around_saves(rank, world_size, name, save):
    ddp = make_ddp()
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    handle = _attach(ddp, name, optimizer)
    for step in range(6):
        loss_of(ddp, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if save and step % 2:
            handle.open_consensus()
            handle.prepare_save()
            copy.deepcopy(optimizer.state_dict())
    return handle.metrics()["comm_mb_within_node"]


@pytest.mark.parametrize("name", ["zero_overlap", "allreduce"])
def test_what_a_save_gathers_is_no_part_of_a_step(pool, name):
    assert pool.run(_figures_around_saves, 2, name, True) == pool.run(_figures_around_saves, 2, name, False)
