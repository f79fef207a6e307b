"""Names: our own, aliases, third parties through entry points, torch's and the user's functions."""

import os
import subprocess
import sys
import textwrap
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
        "int8_compress",
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


def test_the_same_class_of_the_same_module_may_come_again():
    def define():
        class Again(CommHook):
            """Defined anew, as by a module that is imported a second time."""

        return Again

    register_hook("again", aliases=("anew",))(define())
    newest = register_hook("again", aliases=("anew",))(define())
    assert get_hook("anew") is newest
    with pytest.raises(ConfigError, match="a hook named 'again' is registered already"):
        register_hook("other", aliases=("again",))(define())
    unregister_hook("again")


def test_a_hook_comes_and_goes():
    @register_hook("passing", aliases=("by",))
    class Passing(CommHook):
        """Here for a moment."""

    assert get_hook("by") is Passing and "passing" in available_hooks()
    unregister_hook("passing")
    assert "passing" not in available_hooks()


def test_an_installed_plugin_is_found(tmp_path):
    pyproject = (PLUGIN / "pyproject.toml").read_text()
    assert '[project.entry-points."accel_commhooks.hooks"]\nsign = "tiny_commhook"' in pyproject
    install_the_plugin(tmp_path)
    code = "import accel_commhooks as a; print(a.available_hooks()); print(a.get_hook('tiny_sign').__module__)"
    found = run_python(tmp_path, code)
    assert "'tiny_sign'" in found.stdout and "tiny_commhook" in found.stdout, found.stderr


def test_a_plugin_that_fails_disables_nothing_else(tmp_path):
    install_plugin(tmp_path, "a_raises", "raise RuntimeError('no licence')")
    install_plugin(tmp_path, "b_exits", "import sys; sys.exit('wrong machine')")
    install_plugin(tmp_path, "c_registers_first", HALF_A_PLUGIN)
    install_plugin(tmp_path, "d_takes_a_name", HALF_A_PLUGIN.replace("half", "powersgd").replace("1 / 0", ""))
    install_plugin(tmp_path, "e_is_missing", None)
    install_the_plugin(tmp_path)
    code = """
        import accel_commhooks as a
        for _ in range(2):
            assert a.get_hook("powersgd").__module__ == "accel_commhooks.hooks.powersgd.hook"
            assert {"tiny_sign", "zero_overlap"} <= set(a.available_hooks()) and "half" not in a.available_hooks()
        for _ in range(2):
            try:
                a.get_hook("half")
            except a.ConfigError as error:
                print(error.text)
    """
    done = run_python(tmp_path, code)
    failures = {
        "'a_raises' of a-raises (a_raises)": "RuntimeError: no licence",
        "'b_exits' of b-exits (b_exits)": "SystemExit: wrong machine",
        "'c_registers_first' of c-registers-first (c_registers_first)": "ZeroDivisionError: division by zero",
        "'d_takes_a_name' of d-takes-a-name (d_takes_a_name)": "ConfigError: a hook named 'powersgd' is registered already",
        "'e_is_missing' of e-is-missing (e_is_missing)": "ModuleNotFoundError: No module named 'e_is_missing'",
    }
    assert done.stdout.count("there is no hook named 'half'") == 2, done.stderr
    for plugin, reason in failures.items():
        assert done.stdout.count(f"the plugin {plugin} failed: {reason}") == 2, done.stdout
        assert done.stderr.count(f"the plugin {plugin} could not be loaded, its hooks are missing: {reason}") == 1


def test_a_hook_of_the_package_that_cannot_be_imported_is_reported_until_it_can(tmp_path):
    """It fails before it has registered itself, then afterwards, then not any more."""
    code = """
        import importlib.machinery, sys
        import accel_commhooks as a

        BROKEN = "accel_commhooks.hooks.powersgd.hook"

        class Saboteur:
            def find_spec(self, name, path=None, target=None):
                if name != BROKEN:
                    return None
                spec = importlib.machinery.PathFinder.find_spec(name, path)
                if when == "before":
                    raise OSError("disk on fire")
                loader_exec = spec.loader.exec_module
                def exec_module(module):
                    loader_exec(module)
                    raise OSError("disk on fire")
                if when == "after":
                    spec.loader.exec_module = exec_module
                return spec

        sys.meta_path.insert(0, Saboteur())
        for when in ("before", "before", "after", "after", "never"):
            for ask in (lambda: a.get_hook("powersgd").name, lambda: "powersgd" in a.available_hooks()):
                try:
                    print(when, ask())
                except Exception as error:
                    print(when, type(error).__name__, error)
    """
    done = run_python(tmp_path, code)
    assert done.stdout.splitlines() == [
        *["before OSError disk on fire"] * 4,
        *["after OSError disk on fire"] * 4,
        "never powersgd",
        "never True",
    ], done.stderr


HALF_A_PLUGIN = """
from accel_commhooks import CommHook, register_hook
@register_hook("half")
class Half(CommHook):
    "Registered by a module that then fails."
1 / 0
"""


def install_plugin(folder: Path, name: str, code: str | None) -> None:
    """A module and its metadata as pip lays them out; None leaves the module out."""
    metadata = folder / f"{name}-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text(f"[accel_commhooks.hooks]\n{name} = {name}\n")
    if code is not None:
        (folder / f"{name}.py").write_text(code)


def install_the_plugin(folder: Path) -> None:
    """The complete one of these tests."""
    install_plugin(folder, "tiny_commhook", None)
    (folder / "tiny_commhook").symlink_to(PLUGIN / "tiny_commhook")


def run_python(folder: Path, code: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, env={"PYTHONPATH": path}, capture_output=True, text=True, timeout=60)


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
