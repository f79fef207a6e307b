"""Other people's loops as slow tests. `pip install -e ".[clients]"` installs those that are not here.

Here with the two hooks that lean most on the lifecycle; `make clients` runs all of them.
"""

from __future__ import annotations

import pytest

from .clients import CLIENTS, judge, start, why_not

HOOKS = ("post_localsgd", "zero_overlap")


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", CLIENTS)
def test_client(name, tmp_path):
    client = CLIENTS[name]
    if not client.installed:
        pytest.skip(f"{client.package} is not installed; the extra [clients] brings it")
    plain = start(client, None, tmp_path / "plain")
    for hook in HOOKS:
        if why_not(client, hook) is None:
            judge(client, hook, plain, start(client, hook, tmp_path / hook))
