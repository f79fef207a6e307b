"""The plain hooks against DDP itself."""

import pytest
import torch
from models import Net, distance, make_ddp, train, two_groups, weights

from accel_commhooks import attach


def _train_twenty(rank, world_size, name, options):
    results = {}
    for label in ("ddp", "hook"):
        ddp = make_ddp()
        optimizer = torch.optim.AdamW(two_groups(ddp.module), lr=0.01)
        handle = attach(ddp, name, optimizer=optimizer, **options) if label == "hook" else None
        train(ddp, rank, 20, optimizer=optimizer, accumulation=3, clip=0.5, schedule=True)
        results[label] = weights(ddp)
        if handle is not None:
            results["figures"] = handle.metrics()
            results["steps"] = handle.steps
    return results


@pytest.mark.parametrize("world_size", [2, 3])
def test_allreduce_trains_as_plain_ddp(pool, world_size):
    by_rank = pool.run(_train_twenty, world_size, "allreduce", {})
    for result in by_rank:
        assert result["steps"] == 20
        assert result["figures"]["comm_compression"] == pytest.approx(1.0, rel=0.01)
        # The same divisions and sums as DDP's in the same order: nothing but rounding may differ.
        assert distance(result["ddp"], result["hook"]) <= 1e-6
        assert distance(result["hook"], by_rank[0]["hook"]) == 0


@pytest.mark.parametrize("name", ["bf16_compress", "fp16_compress"])
def test_half_precision_hooks_send_half(pool, name):
    by_rank = pool.run(_train_twenty, 2, name, {})
    start = weights(make_start())
    for result in by_rank:
        assert result["figures"]["comm_compression"] == pytest.approx(2.0, rel=0.02)
        assert distance(result["hook"], by_rank[0]["hook"]) == 0
        # AdamW moves a weight by at most its rate a step, so rounding of gradients is small beside the way trained.
        assert 0 < distance(result["ddp"], result["hook"]) < 0.2 * distance(result["ddp"], start)


def test_wire_dtype_and_its_other_name(pool):
    by_name, *by_option = (
        pool.run(_train_twenty, 2, name, options)
        for name, options in (
            ("bf16_compress", {}),
            ("allreduce", {"wire_dtype": "bf16"}),
            ("allreduce", {"wrapper": "bf16"}),
            ("allreduce", {"wrapper": None, "wire_dtype": "bf16"}),
        )
    )
    for narrowed in by_option:
        assert distance(by_name[0]["hook"], narrowed[0]["hook"]) == 0


def make_start():
    torch.manual_seed(0)
    return Net()


def _diverge(rank, world_size):
    ddp = make_ddp()
    attach(ddp, "noop", i_know_that_replicas_diverge=True)
    train(ddp, rank, 3)
    return weights(ddp)


def test_noop_sends_nothing_and_replicas_diverge(pool):
    first, second = pool.run(_diverge, 2)
    assert distance(first, second) > 0
