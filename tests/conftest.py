import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from ranks import RankPool


@pytest.fixture(scope="session")
def pool():
    """Four Gloo ranks, started once for the whole run."""
    ranks = RankPool()
    yield ranks
    ranks.stop()


@pytest.fixture(scope="module")
def own_pool():
    """Ranks that only one module uses: for what may not find, or leave, anything in a process."""
    ranks = RankPool()
    yield ranks
    ranks.stop()
