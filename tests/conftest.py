import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from ranks import RankPool, Setting


def pytest_addoption(parser):
    parser.addoption("--backend", default="gloo", help="of the ranks: gloo, late (tests/late_group.py), nccl, ...")
    parser.addoption("--device", default="cpu", help="of the ranks' models and data: cpu, cuda, ...; one for each rank")
    parser.addoption("--backward-thread", action="store_true", help="run backward on another thread, as for devices")


def pytest_configure(config):
    setting = _setting(config)
    if (problem := setting.problem()) is not None:
        raise pytest.UsageError(f"--device {setting.device} --backend {setting.backend} cannot run here: {problem}")
    config.addinivalue_line("markers", "only_backend(name, reason): about one backend only; skipped on others")


def _setting(config) -> Setting:
    return Setting(*(config.getoption(name) for name in ("--backend", "--device", "--backward-thread")))


def pytest_collection_modifyitems(config, items):
    for item in items:
        for mark in item.iter_markers("only_backend"):
            name, reason = mark.args
            if config.getoption("--backend") != name:
                item.add_marker(pytest.mark.skip(reason=f"on {name} only: {reason}"))


@pytest.fixture(scope="session")
def pool(request):
    """Four ranks, started once for the whole run."""
    ranks = RankPool(setting=_setting(request.config))
    yield ranks
    ranks.stop()


@pytest.fixture(scope="module")
def own_pool(request):
    """Ranks that only one module uses: for what may not find, or leave, anything in a process."""
    ranks = RankPool(setting=_setting(request.config))
    yield ranks
    ranks.stop()
