"""The formulas: by hand where that is easy, and against what hooks really count in small worlds."""

from pathlib import Path

import pytest
import torch

from accel_commhooks import CommHookConfig, available_hooks
from accel_commhooks.bench.contenders import STEPS_TO_START, hook_contender, parse_hook, start_at_once
from accel_commhooks.bench.models import BenchTransformer
from accel_commhooks.bench.predict import predict
from accel_commhooks.comm import cost as costs
from accel_commhooks.comm.topology import Topology

PLUGIN = Path(__file__).parent / "plugin"
HOOKS = [
    "allreduce",
    "allreduce{wire_dtype: bf16}",
    "noop",
    "fp16_compress",
    "powersgd",
    "powersgd{alternate: true}",
    "powersgd{wire_dtype: bf16, matrix_approximation_rank: 2}",
    "powersgd{exclude: ['tokens.*'], ranks: {'*qkv*': 1}}",
    "powersgd{scope: node}",
    "batched_powersgd",
    "batched_powersgd{scope: node, alternate: true}",
    "post_localsgd{period: 4}",
    "post_localsgd{period: 3, wire_dtype: bf16, overlap_steps: 1}",
    "post_localsgd{period: 2, subgroup: none, outer: {lr: 0.7}}",
    "allreduce{wire_dtype: int8}",
    "int8_compress",
    "powersgd{wire_dtype: int8}",
    "powersgd{wire_dtype: int8, scope: node}",
    "batched_powersgd{wire_dtype: int8, alternate: true}",
    "post_localsgd{period: 2, subgroup: none, wire_dtype: int8}",
    "zero_overlap",
    "zero_overlap{wire_dtype: bf16}",
    "zero_overlap{wire_dtype: int8}",
]


def _problem(world, ranks_per_node=1, shapes=((1000, 100), (100,))):
    parameters = tuple((f"p{number}", shape) for number, shape in enumerate(shapes))
    return costs.Problem(parameters, Topology.even(world, ranks_per_node))


def _known(text):
    return parse_hook(text).name if text.partition("{")[0] in available_hooks() else None


def test_plain_averaging_by_hand():
    cost = predict(CommHookConfig("allreduce"), _problem(4))
    assert cost.between == pytest.approx(2 * 3 / 4 * 100_100 * 4)
    assert cost.within == 0
    assert cost.collectives == 1


def test_a_ring_crosses_each_border_once():
    cost = predict(CommHookConfig("allreduce"), _problem(8, 4))
    assert cost.within == pytest.approx(3 * cost.between)


def test_one_rank_sends_nothing():
    assert predict(CommHookConfig("allreduce"), _problem(1)) == costs.Prediction()


def test_powersgd_by_hand():
    cost = predict(CommHookConfig("powersgd", {"matrix_approximation_rank": 3}), _problem(2))
    assert cost.between == pytest.approx(4 * (3 * 1100 + 100 + 1))


def test_nodes_of_different_sizes():
    """One rank of each node talks to the other nodes, and tells its own what it heard."""
    uneven = costs.Problem((("p", (1000, 100)),), Topology((0, 0, 1)))
    cost = predict(CommHookConfig("powersgd", {"scope": "node", "matrix_approximation_rank": 4}), uneven)
    sent = 4 * (4 * 1100 + 1)
    assert cost.between == pytest.approx(sent)
    inside = 4 * 100_000  # the node of two averages whole gradients first
    assert cost.within == pytest.approx((sent + 2 * inside) / 2)


def test_an_empty_parameter_costs_nothing():
    with_empty, without = _problem(2, shapes=[(1000, 100), (0, 5)]), _problem(2, shapes=[(1000, 100)])
    assert predict(CommHookConfig("powersgd"), with_empty) == predict(CommHookConfig("powersgd"), without)


def test_a_subgroup_of_one_beside_larger_ones():
    alone = {"subgroup": [[0], [1, 2]], "period": 4}
    cost = predict(CommHookConfig("post_localsgd", alone), _problem(3))
    assert cost.collectives == pytest.approx(1 + 1 / 4), "gradients at every step, replicas at every fourth"


def test_buckets_are_ddps():
    megabyte = (1024, 256)
    problem = _problem(2, shapes=[megabyte] * 60)
    assert [len(bucket) for bucket in problem.buckets()] == [1, 25, 25, 9]


def test_a_hook_without_a_formula_has_no_prediction():
    assert predict(CommHookConfig("torch:allreduce_hook"), _problem(2)) is None


def test_a_hook_of_somebody_else_brings_its_formula_its_cycle_and_its_start(monkeypatch):
    monkeypatch.syspath_prepend(PLUGIN)
    config = CommHookConfig("tiny_commhook:TinySignHook", {"every": 3, "first_steps_plain": 50})
    assert predict(config, _problem(2)).between == pytest.approx(4 * 100_100 / 3)
    contender = hook_contender(config)
    assert contender.cycle == 3
    assert contender.config.options == {"every": 3, "first_steps_plain": STEPS_TO_START}


def test_hooks_start_at_once_and_only_earlier():
    late = start_at_once(CommHookConfig("powersgd", {"start_powerSGD_iter": 1000}))
    early = start_at_once(CommHookConfig("powersgd", {"start_powerSGD_iter": 0}))
    torchs = CommHookConfig("torch:powerSGD_hook", {"state_options": {"start_powerSGD_iter": 9, "warm_start": False}})
    assert late.options["start_powerSGD_iter"] == STEPS_TO_START
    assert early.options["start_powerSGD_iter"] == 0
    assert start_at_once(torchs).options["state_options"] == {"start_powerSGD_iter": 2, "warm_start": False}


def test_cycles_are_read_from_the_options():
    assert CommHookConfig("allreduce").build_options().cycle() == 1
    assert CommHookConfig("powersgd", {"alternate": True}).build_options().cycle() == 2
    assert CommHookConfig("post_localsgd", {"period": 6}).build_options().cycle() == 6
    assert CommHookConfig("post_localsgd", {"period_group_size": {3: 2, 9: 4}}).build_options().cycle() == 9
    assert CommHookConfig("post_localsgd", {"period": 6}).build_options().lead() == 1
    assert CommHookConfig("post_localsgd", {"period": 6, "overlap_steps": 2}).build_options().lead() == 6


def _count(rank, world_size, text, ranks_per_node, vocabulary=1000):
    config = parse_hook(text)
    contender = hook_contender(CommHookConfig(config.name, {**config.options, "ranks_per_node": ranks_per_node}))
    torch.manual_seed(0)
    model = BenchTransformer(64, 2, vocabulary=vocabulary)
    problem = costs.Problem.of(model, Topology.even(world_size, ranks_per_node))
    trial = contender.build(model)
    batch = {"input_ids": torch.randint(0, 1000, (2, 8))}
    for _ in range(STEPS_TO_START + contender.cycle):
        trial.step(batch)
    traffic = trial.handle.comm.traffic
    before = traffic.scope("within"), traffic.scope("between"), sum(traffic.calls.values())
    for _ in range(2 * contender.cycle):
        trial.step(batch)
    after = traffic.scope("within"), traffic.scope("between"), sum(traffic.calls.values())
    trial.drain()
    trial.handle.detach()
    measured = [(now - then) / (2 * contender.cycle) for now, then in zip(after, before, strict=True)]
    return measured, predict(contender.config, problem)


@pytest.mark.parametrize(("world_size", "ranks_per_node"), [(2, 1), (2, 2), (4, 1), (4, 2)])
@pytest.mark.parametrize("text", HOOKS)
def test_formula_predicts_what_is_counted(pool, text, world_size, ranks_per_node):
    if _known(text) is None:
        pytest.skip(f"{text.partition('{')[0]} is not installed")
    answers = pool.run(_count, world_size, text, ranks_per_node)
    nodes = world_size // ranks_per_node
    within, between = (sum(measured[i] for measured, _ in answers) / nodes for i in (0, 1))
    predicted = answers[0][1]
    assert predicted is not None
    assert within == pytest.approx(predicted.within, rel=0.05)
    assert between == pytest.approx(predicted.between, rel=0.05)
    assert answers[0][0][2] == pytest.approx(predicted.collectives, rel=0.05)


def test_formula_of_averaging_in_levels(pool):
    """Every 2 steps inside a node, every 4 among all."""
    text = "post_localsgd{period_group_size: {2: 2, 4: 4}}"
    answers = pool.run(_count, 4, text, 2)
    predicted = answers[0][1]
    assert predicted.between > 0
    for index, expected in enumerate((predicted.within, predicted.between)):
        assert sum(measured[index] for measured, _ in answers) / 2 == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("text", ["post_localsgd{period: 2}", "zero_overlap", "zero_overlap{step: interleaved}"])
def test_collectives_of_a_model_that_travels_in_pieces(pool, text):
    """60 000 x 64 is 15 MB: more than one piece, less than a bucket of DDP's."""
    if _known(text) is None:
        pytest.skip(f"{text.partition('{')[0]} is not installed")
    (measured, predicted), _ = pool.run(_count, 2, text, 1, 60_000)
    assert measured[1] == pytest.approx(predicted.between, rel=0.05)
    assert measured[2] == pytest.approx(predicted.collectives)


def test_every_hook_of_this_package_has_a_formula():
    from accel_commhooks import get_hook

    ours = [name for name in available_hooks() if get_hook(name).__module__.startswith("accel_commhooks.")]
    for name in ours:
        assert predict(CommHookConfig(name, get_hook(name).bench_options), _problem(2)) is not None, name
