"""One option says in which type data travels, and what must not be narrowed is not: norms, flags, weights."""

import pytest
import torch
from models import Net, distance, loss_of, make_ddp, train, weights

from accel_commhooks import CommHookConfig, attach, available_hooks, get_hook
from accel_commhooks.comm.wire import itemsize_on_wire, narrow


def test_narrowing_never_widens():
    wide = torch.ones(3, dtype=torch.float32)
    assert narrow(wide, torch.bfloat16).dtype == torch.bfloat16
    assert narrow(wide, None) is wide
    half, whole = wide.half(), torch.ones(3, dtype=torch.int64)
    assert narrow(half, torch.bfloat16) is half
    assert narrow(whole, torch.bfloat16) is whole
    assert [itemsize_on_wire(size, name) for size, name in ((4, None), (4, "bf16"), (8, "fp16"), (1, "bf16"))] == [
        4,
        2,
        2,
        1,
    ]


@pytest.mark.parametrize(
    "name", [n for n in available_hooks() if "wire_dtype" in get_hook(n).Options.__dataclass_fields__]
)
def test_the_other_name_means_the_same(name):
    by_name, by_alias = (CommHookConfig(name, {key: "bf16"}).build_options() for key in ("wire_dtype", "wrapper"))
    assert by_name == by_alias
    copied_from_an_old_file = CommHookConfig(name, {"wire_dtype": "bf16", "wrapper": None}).build_options()
    assert copied_from_an_old_file == by_name


def _averaged(rank, world_size):
    ddp = make_ddp(Net())
    attach(ddp, "post_localsgd", start_localSGD_iter=0, period=2, subgroup="none", wrapper="bf16")
    train(ddp, rank, 3)  # averaged after steps 0 and 2
    return weights(ddp)


def test_averaging_does_not_round_weights(pool):
    first, second = pool.run(_averaged, 2)
    assert distance(first, second) == 0
    flat = torch.cat([weight.view(-1) for weight in first.values()])
    representable = (flat == flat.bfloat16().float()).float().mean()
    # Of numbers with 24 random bits one in 2^16 has its last 16 bits zero; biases that are 0 or 1 are few.
    assert representable < 0.1


def _norms(rank, world_size):
    scale = 1e4
    plain, divided = make_ddp(), make_ddp()
    attach(divided, "zero_overlap", optimizer=torch.optim.SGD(divided.parameters(), lr=0.1), wrapper="fp16")
    for ddp in (plain, divided):
        (loss_of(ddp, rank, 0) * scale).backward()
    return [float(torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e9)) for ddp in (plain, divided)]


def test_norms_are_not_narrowed(pool):
    for plain, divided in pool.run(_norms, 2):
        assert plain > 256, "its square is beyond fp16"
        # Each gradient is rounded to 11 bits, so the norm is off by at most one part in 2^11.
        assert divided == pytest.approx(plain, rel=2**-11)
