"""Plain averaging in digits, with error feedback."""

import pytest
import torch
from models import Net, loss_of, make_ddp, train

from accel_commhooks import attach


def _zero_gradients(rank, world_size):
    ddp = make_ddp(Net(16), find_unused_parameters=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    handle = attach(ddp, "int8_compress", optimizer=optimizer, ranks_per_node=1)
    train(ddp, rank, 3, optimizer=optimizer)
    before = {name: error.clone() for name, error in handle.state_dict()["error"].items()}
    delivered = []
    for _ in range(3):
        optimizer.zero_grad()
        (0.0 * loss_of(ddp, rank, 9)).backward()
        delivered.append(max(float(p.grad.abs().max()) for p in ddp.parameters()))
        optimizer.step()
    after = handle.state_dict()["error"]
    return (
        delivered,
        all(torch.equal(before[name], after[name]) for name in before),
        float(before["first.weight"].norm()),
    )


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_gradient_of_zero_gets_nothing_of_a_residual(pool, world_size):
    """DDP takes a parameter for used whose gradient is zero; whether the residual is applied or kept, it is not both."""
    for delivered, kept, residual in pool.run(_zero_gradients, world_size):
        assert residual > 0, "nothing was rounded"
        assert delivered == [0.0, 0.0, 0.0]
        assert kept
