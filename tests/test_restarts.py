"""Which checkpoint a restarted script goes on from: every file of a newer one is cut off or taken away in turn."""

import json
import shutil

import pytest
import torch
from models import make_ddp
from safetensors.torch import save_file

from accel_commhooks import attach
from accel_commhooks.attachment import checkpoint
from accel_commhooks.trainer import last_whole_checkpoint


def _hook_files(rank, world_size, folder):
    checkpoint.save(attach(make_ddp(), "powersgd", start_powerSGD_iter=0), folder)


@pytest.fixture(scope="module")
def whole(pool, tmp_path_factory):
    """A checkpoint of two ranks, with the files that Trainer writes."""
    folder = tmp_path_factory.mktemp("whole") / "checkpoint"
    folder.mkdir()
    save_file({"weight": torch.ones(100), "bias": torch.ones(3)}, folder / "model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt", "training_args.bin", "rng_state_0.pth", "rng_state_1.pth"):
        torch.save({"numbers": torch.ones(50)}, folder / name)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 4, "log_history": []}))
    (folder / "config.json").write_text("{}")
    pool.run(_hook_files, 2, str(folder))
    return folder


@pytest.fixture
def output(whole, tmp_path):
    for step in (2, 10):
        shutil.copytree(whole, tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-best").mkdir()
    return tmp_path


def test_the_newest_by_number(output, tmp_path_factory):
    assert last_whole_checkpoint(output) == str(output / "checkpoint-10")
    assert last_whole_checkpoint(tmp_path_factory.mktemp("empty")) is None
    assert last_whole_checkpoint(output / "nowhere") is None


CUT = ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state_1.pth", "trainer_state.json", "config.json"]
CUT += ["comm_hook/rank_00000.pt", "comm_hook/rank_00001.pt"]


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("part", [0, 0.5, 0.99])
def test_a_file_that_was_cut_off(output, name, part):
    file = output / "checkpoint-10" / name
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * part)])
    assert last_whole_checkpoint(output) == str(output / "checkpoint-2")


@pytest.mark.parametrize("name", [name for name in CUT if name not in ("model.safetensors", "config.json")])
def test_a_file_that_was_never_written(output, name):
    (output / "checkpoint-10" / name).unlink()
    assert last_whole_checkpoint(output) == str(output / "checkpoint-2")


def test_killed_between_trainers_files_and_the_hooks(output):
    shutil.rmtree(output / "checkpoint-10" / "comm_hook")
    assert last_whole_checkpoint(output) == str(output / "checkpoint-2")
    assert last_whole_checkpoint(output, hook=False) == str(output / "checkpoint-10"), "without a hook that is whole"
    shutil.rmtree(output / "checkpoint-2" / "comm_hook")
    assert last_whole_checkpoint(output) is None


def test_what_a_killed_save_of_the_hook_leaves_behind_is_not_looked_at(output):
    (output / "checkpoint-10" / "comm_hook" / "rank_00000.1234.tmp").write_bytes(b"half")
    assert last_whole_checkpoint(output) == str(output / "checkpoint-10")


def test_weights_alone(output):
    for name in ("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"):
        (output / "checkpoint-10" / name).unlink()
    assert last_whole_checkpoint(output) == str(output / "checkpoint-10"), "save_only_model"
