"""The clients, how they are started, and what is expected of a run with a hook."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch
from launching import Result, accelerate_launch, hook_config
from models import distance

SCRIPTS = Path(__file__).parent / "scripts"
HOOKS = {
    "allreduce": {},
    "powersgd": {"start_powerSGD_iter": 2},
    "post_localsgd": {"start_localSGD_iter": 2, "period": 3, "subgroup": "none"},
    "zero_overlap": {},
}
EXACT = ("allreduce", "zero_overlap")
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Client:
    package: str
    command: tuple[str, ...]
    steps: tuple[int, ...] | None = None
    """Steps that each attachment must count; None where that depends on the hook, or the script says so itself."""
    options: tuple[tuple[str, dict | str], ...] = ()
    """Other options for a hook, or why the script cannot be asked to pass with it."""
    timeout: float = 280

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


LATER: dict = {"start_localSGD_iter": 100}
"""For scripts that compare every step with one process's: local steps would not, and should not, pass."""

CLIENTS = {
    "TRL `SFTTrainer`, gradient checkpointing": Client("trl", ("trl_sft.py",), (8,)),
    "TRL `DPOTrainer`": Client("trl", ("trl_dpo.py",), (8,)),
    "sentence-transformers, MultipleNegativesRankingLoss": Client("sentence_transformers", ("st_mnrl.py",), (8,)),
    "sentence-transformers, CachedMultipleNegativesRankingLoss": Client(
        "sentence_transformers", ("st_mnrl.py", "cached"), (8,)
    ),
    "Lightning, automatic optimization": Client("lightning", ("lightning_loop.py",), (9,)),
    "Lightning, manual optimization": Client("lightning", ("lightning_loop.py", "manual"), (9,)),
    "diffusers `UNet2DModel` with `EMAModel`": Client("diffusers", ("diffusers_unet.py",), (9,)),
    "Accelerate's `test_script.py`": Client(
        "accelerate", ("-m", "accelerate.test_utils.scripts.test_script"), options=(("post_localsgd", LATER),)
    ),
    "Accelerate's `test_sync.py`": Client(
        "accelerate",
        ("-m", "accelerate.test_utils.scripts.test_sync"),
        options=(("post_localsgd", LATER), ("zero_overlap", "not run: it compares `p.grad`")),
    ),
    "Trainer, `auto_find_batch_size` after running out of memory": Client(
        "transformers", ("trainer_batch_size.py",), (8,)
    ),
    "Trainer, early stopping and the best model": Client("transformers", ("trainer_best.py",)),
    "Trainer, a sweep on one model": Client("transformers", ("trainer_sweep.py",), (6, 6, 6)),
}


def start(client: Client, hook: str | None, folder: Path) -> Result:
    """Run a client to its end, with a hook from the launcher or without one."""
    folder.mkdir(parents=True, exist_ok=True)
    first, *rest = client.command
    options = dict(client.options).get(hook, HOOKS.get(hook))
    script = [first, *rest] if first == "-m" else [SCRIPTS / first, folder, *rest]
    if hook is not None:
        script = ["-m", "accel_commhooks", hook_config(folder, hook, **options), *script]
    return accelerate_launch(script, folder, timeout=client.timeout, ACCELERATE_USE_CPU="true")


def why_not(client: Client, hook: str) -> str | None:
    """Why a script is not run with a hook, or None."""
    options = dict(client.options).get(hook)
    return options if isinstance(options, str) else None


def judge(client: Client, hook: str, plain: Result, hooked: Result) -> str:
    """What a run with a hook came to; an AssertionError says what is wrong with it."""
    plain.check()
    hooked.check()
    seen = hooked.probe()
    assert len(seen) == 2 and seen[0] and all(row["hook"] == hook for rows in seen for row in rows), seen
    assert [row["steps"] for row in seen[0]] == [row["steps"] for row in seen[1]]
    if client.command[0] == "-m":
        assert any(row["sent"] for row in seen[0])
        return "passes"
    if client.steps is not None:
        counted = tuple(row["steps"] for row in seen[0] if row["steps"])
        assert counted == client.steps, counted
    finals, expected = hooked.finals(), plain.finals()
    assert distance(finals[0], finals[1]) == 0, "ranks end with different weights"
    assert all(bool(torch.isfinite(value).all()) for value in finals[0].values())
    if "(best)" in finals[0]:
        assert abs(float(finals[0]["(best)"] - finals[0]["(again)"])) <= 1e-5, "the best model is not the one loaded"
    apart = distance(finals[0], expected[0])
    if hook in EXACT:
        assert apart <= TOLERANCE, f"{apart:.1e} away from plain DDP"
        return "equals DDP"
    assert apart > 0, "the hook did nothing"
    return "trains"
