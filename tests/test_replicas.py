"""Replicas that train apart, in loops that change what there is to average: parameters, buffers, weights, optimizer state."""

import pytest
import torch
from models import Net, batch, distance, loss_of, make_ddp, weights
from torch import nn

from accel_commhooks import attach

APART = {"start_localSGD_iter": 1, "period": 3, "subgroup": "none"}
OUTER = {**APART, "outer": {"name": "nesterov", "lr": 0.7, "momentum": 0.9}}
WAYS = {"plain": APART, "outer": OUTER, "overlap": {**APART, "overlap_steps": 1}, "both": {**OUTER, "overlap_steps": 2}}
every_way = pytest.mark.parametrize("way", WAYS)


def _sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _step(ddp, optimizer, rank, step):
    loss_of(ddp, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()


def _all_equal(by_rank):
    return all(distance(final, by_rank[0]) == 0 for final in by_rank)


def _detach_within_a_period(rank, world_size, way):
    ddp = make_ddp()
    optimizer = _sgd(ddp)
    handle = attach(ddp, "post_localsgd", optimizer=optimizer, **WAYS[way])
    for step in range(6):
        _step(ddp, optimizer, rank, step)
    apart = handle.hook.replicas.diverged
    handle.detach()
    equal = weights(ddp)
    for step in range(6, 9):
        _step(ddp, optimizer, rank, step)
    return apart, equal, weights(ddp)


@every_way
def test_detach_within_a_period_leaves_replicas_equal(pool, way):
    by_rank = pool.run(_detach_within_a_period, 2, way)
    assert by_rank[0][0], "replicas were apart"
    assert _all_equal([equal for _, equal, _ in by_rank])
    assert _all_equal([final for _, _, final in by_rank])


def _frozen_and_thawed(rank, world_size, way):
    """A parameter is frozen while replicas differ, another one thaws later."""
    ddp = make_ddp(find_unused_parameters=True)
    ddp.module.norm.requires_grad_(False)
    optimizer = _sgd(ddp)
    handle = attach(ddp, "post_localsgd", optimizer=optimizer, **WAYS[way])
    for step in range(12):
        if step == 5:
            ddp.module.first.requires_grad_(False)
        if step == 7:
            ddp.module.norm.requires_grad_(True)
        _step(ddp, optimizer, rank, step)
    handle.synchronize()
    return weights(ddp)


@every_way
def test_frozen_while_apart_and_thawed_later(pool, way):
    by_rank = pool.run(_frozen_and_thawed, 2, way)
    assert _all_equal(by_rank)
    assert distance({"n": by_rank[0]["norm.weight"]}, {"n": torch.ones(16)}) > 0, "it was trained once it was thawed"


class Counting(Net):
    """Keeps a running mean that is a new tensor after every forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(20))

    def forward(self, tokens):
        out = super().forward(tokens)
        self.mean = 0.5 * self.mean + 0.5 * out.detach().mean(0)
        return out


def _reassigned_buffer(rank, world_size):
    ddp = make_ddp(Counting())
    optimizer = _sgd(ddp)
    handle = attach(ddp, "post_localsgd", optimizer=optimizer, **APART)
    for step in range(8):
        _step(ddp, optimizer, rank, step)
    handle.synchronize()
    return {"mean": ddp.module.mean}


def test_a_buffer_that_is_assigned_anew_is_averaged(pool):
    by_rank = pool.run(_reassigned_buffer, 2)
    assert by_rank[0]["mean"].abs().sum() > 0
    assert _all_equal(by_rank)


def _load_in_mid_run(rank, world_size, way, at):
    """The best weights are loaded in the middle of a run (``load_best_model_at_end``, a rewind after a bad loss)."""
    ddp = make_ddp()
    best = {name: value.clone() for name, value in ddp.module.state_dict().items()}
    optimizer = _sgd(ddp)
    handle = attach(ddp, "post_localsgd", optimizer=optimizer, **WAYS[way])
    for step in range(at):
        _step(ddp, optimizer, rank, step)
    ddp.module.load_state_dict(best)
    loaded = weights(ddp)
    handle.synchronize()
    at_once = distance(loaded, weights(ddp))
    for step in range(at, at + 6):
        _step(ddp, optimizer, rank, step)
    handle.synchronize()
    return at_once, loaded, weights(ddp)


@pytest.mark.parametrize("at", [4, 5, 6])
@every_way
def test_weights_loaded_in_mid_run_are_the_new_beginning(pool, way, at):
    by_rank = pool.run(_load_in_mid_run, 2, way, at)
    assert [at_once for at_once, _, _ in by_rank] == [0, 0], "nothing that was under way is added to them"
    assert _all_equal([final for _, _, final in by_rank])
    assert all(torch.isfinite(value).all() for value in by_rank[0][2].values())


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.left, self.right = nn.Linear(8, 20), nn.Linear(8, 20)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, tokens, branch):
        return (self.left if branch == 0 else self.right)(self.embed(tokens)) * self.logit_scale


def _branch_loss(ddp, rank, step, branch):
    tokens, labels = batch(rank, step)
    return nn.functional.cross_entropy(ddp(tokens, branch), labels)


def _unused_on_one_rank(rank, world_size):
    """Both ranks of a node, find_unused_parameters=False: each uses another branch once DDP sleeps."""
    ddp = make_ddp(Branches())
    optimizer = _sgd(ddp)
    options = {"start_localSGD_iter": 1, "period": 100, "subgroup": "node", "ranks_per_node": 2}
    handle = attach(ddp, "post_localsgd", optimizer=optimizer, **options)
    inside = []
    for step in range(6):
        loss = _branch_loss(ddp, rank, step, (rank + step) % 2)
        if step == 0:
            loss = loss + _branch_loss(ddp, rank, step, (rank + 1) % 2)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        inside.append(weights(ddp))
    return handle.steps, inside


def test_a_parameter_that_one_rank_of_a_node_does_not_use(pool):
    by_rank = pool.run(_unused_on_one_rank, 4)
    assert {steps for steps, _ in by_rank} == {6}
    for node in (0, 2):
        for mine, others in zip(by_rank[node][1], by_rank[node + 1][1], strict=True):
            assert distance(mine, others) == 0


def _moments(rank, world_size, optimizer_class):
    """Ranks use different parts of the model before moments are averaged; logit_scale has no dimension."""
    ddp = make_ddp(Branches(), find_unused_parameters=True)
    optimizer = optimizer_class(ddp.parameters(), lr=0.01)
    handle = attach(
        ddp,
        "post_localsgd",
        optimizer=optimizer,
        start_localSGD_iter=0,
        period=3,
        subgroup="none",
        optimizer_state="average",
    )
    for step in range(7):
        if step == 3 and rank == 1:
            # This rank's own counters: a counter is no moment, and must stay what it is.
            for state in optimizer.state.values():
                if "step" in state:
                    state["step"] += 5
        _branch_loss(ddp, rank, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    names = {p: n for n, p in ddp.module.named_parameters()}
    moments = {
        f"{names[p]}.{key}": value
        for p, state in optimizer.state.items()
        for key, value in state.items()
        if torch.is_tensor(value) and key != "step"
    }
    return moments, {names[p]: float(s.get("step", 0)) for p, s in optimizer.state.items()}, weights(ddp), handle.steps


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.Adagrad], ids=lambda c: c.__name__)
def test_moments_are_averaged_where_ranks_used_different_parts(pool, optimizer_class):
    (first, counters, final, steps), (second, other_counters, other, _) = pool.run(_moments, 2, optimizer_class)
    assert steps == 7
    assert distance(final, other) == 0
    common = first.keys() & second.keys()
    assert "embed.weight.exp_avg" in common or "embed.weight.sum" in common
    assert distance({n: first[n] for n in common}, {n: second[n] for n in common}) == 0
    assert counters["logit_scale"] == 7 and other_counters["logit_scale"] == 12
