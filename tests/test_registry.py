"""Names: our own, aliases, third parties through entry points, torch's and the user's functions."""

import subprocess
import sys
from pathlib import Path

import pytest
from models import distance, make_ddp, train, weights

from accel_commhooks import ConfigError, attach, available_hooks, get_hook, register_hook
from accel_commhooks.config.registry import unregister_hook
from accel_commhooks.hooks.base import CommHook

PLUGIN = Path(__file__).parent / "plugin"


def test_the_hooks_of_this_package():
    assert set(available_hooks()) >= {
        "allreduce",
        "batched_powersgd",
        "bf16_compress",
        "fp16_compress",
        "noop",
        "post_localsgd",
        "powersgd",
        "zero_overlap",
    }


def test_every_option_of_every_hook_is_documented():
    for name in available_hooks():
        for option, kind, _, documentation in get_hook(name).Options.describe():
            assert documentation.endswith((".", ".)")) or len(documentation) > 10, (name, option)
            assert kind


def test_duplicates_are_refused():
    with pytest.raises(ConfigError, match="a hook named 'powersgd' is registered already"):
        register_hook("powersgd")(CommHook)
    with pytest.raises(ConfigError, match="a hook named 'bf16' is registered already"):
        register_hook("something_new", aliases=["bf16"])(CommHook)


def test_a_hook_comes_and_goes():
    @register_hook("passing", aliases=("by",))
    class Passing(CommHook):
        """Here for a moment."""

    assert get_hook("by") is Passing and "passing" in available_hooks()
    unregister_hook("passing")
    assert "passing" not in available_hooks()


def test_an_installed_plugin_is_found(tmp_path):
    """Laid out as pip would install it: a package and its metadata on the path."""
    metadata = tmp_path / "tiny_commhook-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-commhook\nVersion: 0.1\n")
    pyproject = (PLUGIN / "pyproject.toml").read_text()
    assert '[project.entry-points."accel_commhooks.hooks"]\nsign = "tiny_commhook"' in pyproject
    (metadata / "entry_points.txt").write_text("[accel_commhooks.hooks]\nsign = tiny_commhook\n")
    (tmp_path / "tiny_commhook").symlink_to(PLUGIN / "tiny_commhook")
    code = "import accel_commhooks as a; print(a.available_hooks()); print(a.get_hook('tiny_sign').__module__)"
    found = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=60
    )
    assert "'tiny_sign'" in found.stdout and "tiny_commhook" in found.stdout, found.stderr


def my_hook(state, bucket):
    """A user's own function, as DDP takes it."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    return allreduce_hook(state, bucket)


def _foreign(rank, world_size, name, options):
    ddp = make_ddp(bucket_cap_mb=100)
    attach(ddp, name, **options)
    train(ddp, rank, 6)
    return weights(ddp)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("torch:allreduce_hook", {}),
        ("torch:bf16_compress_hook", {}),
        ("torch:powerSGD_hook", {"state_options": {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2}}),
        ("test_registry:my_hook", {}),
    ],
)
def test_functions_that_were_not_written_for_us(own_pool, name, options):
    first, second = own_pool.run(_foreign, 2, name, options, expendable="powerSGD" in name)
    assert distance(first, second) == 0
