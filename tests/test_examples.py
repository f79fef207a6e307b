"""The examples as a user runs them: through the real ``accelerate launch``, on two CPU processes, offline."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from launching import ACCELERATE_CONFIG, PROBE, SCRIPTS

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
TWO_PROCESSES = ["--config_file", "configs/accelerate/two_cpu_processes.yaml"]
CONFIGS = sorted(file.stem for file in (ROOT / "configs").glob("*.yaml"))
# A run of some steps must get past the warm-ups of the files as they are shipped. Every evaluation is one more averaging, so with
# a period of 2 local SGD would send as much as plain DDP within three steps.
SHORT = {
    "start_powerSGD_iter": 2,
    "start_localSGD_iter": 2,
    "warmup_steps": 2,
    "period": 3,
    "period_group_size": {3: 2},
}


def start(command: list[str], log: Path, **environment: str) -> subprocess.Popen:
    variables = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(EXAMPLES), **environment}
    # A shell's way: `accelerate` and `python` are those of the environment that runs the tests.
    variables["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with log.open("a") as output:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | variables,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def finish(process: subprocess.Popen, log: Path, timeout: float = 150) -> str:
    """What it printed; the end of that is in the error if it failed or did not end."""
    try:
        code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        end_group(process)
    assert code == 0, f"exit code {code}\n" + "\n".join(log.read_text().splitlines()[-40:])
    return log.read_text()


def end_group(process: subprocess.Popen) -> None:
    """The launcher's ranks are in its session: none of them outlives a test."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def launch(arguments: list[str], folder: Path, **environment: str) -> str:
    log = folder / "log.txt"
    return finish(start(["accelerate", "launch", *TWO_PROCESSES, *arguments], log, **environment), log)


def short_config(name: str, folder: Path) -> Path:
    """A file of configs/ for a short run, in which two local processes stand for two nodes."""
    section = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())["comm_hook"]
    for option, value in SHORT.items():
        if section.get(option):
            section[option] = value
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump({"comm_hook": section | {"ranks_per_node": 1}}))
    return file


def classification(folder: Path, *arguments: str) -> list[str]:
    return [
        *("examples/finetune_classification.py", "--offline", "--output_dir", str(folder / "out")),
        *(
            "--max_steps",
            "12",
            "--logging_steps",
            "4",
            "--eval_steps",
            "6",
            "--save_steps",
            "6",
            "--disable_tqdm",
            "True",
        ),
        *arguments,
    ]


def causal_lm(folder: Path, *arguments: str) -> list[str]:
    return [
        *("examples/finetune_causal_lm.py", "--offline", "--output_dir", str(folder / "out"), "--max_steps", "9"),
        *("--logging_steps", "3", "--eval_steps", "6", "--eval_batches", "2", "--save_steps", "6"),
        *arguments,
    ]


def trainer_log(folder: Path) -> list[dict]:
    return json.loads((folder / "trainer_state.json").read_text())["log_history"]


def accelerate_log(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "out" / "log.jsonl").read_text().splitlines()]


def assert_hook_acted(name: str, rows: list[dict]) -> None:
    """The last figures of the training log: the loss is a number, and the bytes are not plain DDP's."""
    last = [row for row in rows if "loss" in row][-1]
    assert math.isfinite(last["loss"])
    sent, plain = last["comm_mb_between_nodes"] + last["comm_mb_within_node"], last["comm_plain_ddp_mb"]
    assert_bytes(name, sent, plain)
    if "comm_optimizer_state_mb" in last:
        assert last["comm_optimizer_state_mb"] < 1.1 * plain  # Adam's two moments, divided by two ranks


def assert_bytes(name: str, sent: float, plain: float) -> None:
    """Whether what was sent is what the hook of a file sends, compared with plain DDP."""
    hook = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())["comm_hook"]["name"]
    if hook == "noop":
        assert sent == 0
    elif hook == "allreduce":
        assert sent == pytest.approx(plain, rel=0.01)
    elif hook == "zero_overlap":
        assert 0.99 * plain < sent < 1.5 * plain  # a save gathers the optimizer's state as well
    else:
        assert 0 < sent < 0.9 * plain


# The data.


def load_example(name: str):
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


@pytest.fixture(scope="module")
def embedded():
    return load_example("embedded")


def test_passages_are_balanced_and_the_same_every_time(embedded):
    first, again = (embedded.docstring_passages(train_per_class=30, held_out_per_class=10) for _ in range(2))
    assert len(embedded.PACKAGES) >= 10
    for split, count in (("train", 30), ("test", 10)):
        labels = first[split]["label"]
        assert {label: labels.count(label) for label in labels} == dict.fromkeys(range(len(embedded.PACKAGES)), count)
        assert first[split]["text"] == again[split]["text"]


def test_held_out_passages_are_from_other_modules(embedded):
    for package in embedded.PACKAGES:
        modules = embedded._documented_modules(package)
        training, held_out = embedded._split_by_module(modules)
        assert training and held_out
        assert sorted(training + held_out) == sorted(modules)
        assert not set(training) & set(held_out)


def test_tokenizer_is_the_same_every_time(embedded):
    texts = embedded.docstring_passages(20, 1)["train"]["text"]
    first, again = (embedded.train_tokenizer(texts, 600).backend_tokenizer.to_str() for _ in range(2))
    assert first == again


def test_classes_of_files_are_numbered_by_the_training_split(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    example = load_example("finetune_classification")
    for name, labels in (("train", "abcabc"), ("held_out", "cb")):
        (tmp_path / f"{name}.csv").write_text("text,label\n" + "".join(f"words,{label}\n" for label in labels))
    files = {"train_file": str(tmp_path / "train.csv"), "validation_file": str(tmp_path / "held_out.csv")}
    data = example.load_data(example.TaskArguments(**files), offline=True)
    assert data["train"].features["label"].names == ["a", "b", "c"]
    assert data["train"]["label"][:] == [0, 1, 2, 0, 1, 2] and data["test"]["label"][:] == [2, 1]


def test_files_that_would_not_be_used_are_refused():
    example = load_example("finetune_classification")
    with pytest.raises(ValueError, match=r"validation_file goes with train_file, but got 'held_out.csv' alone"):
        example.TaskArguments(validation_file="held_out.csv")
    with pytest.raises(ValueError, match=r"name a dataset or a file, but got 'imdb' and 'train.csv'"):
        example.TaskArguments(dataset_name="imdb", train_file="train.csv")
    with pytest.raises(ValueError, match=r"train_file must end in one of \.csv, .*, but got 'train.txt'"):
        example.TaskArguments(train_file="train.txt")


def test_custom_hook_is_short():
    assert len((EXAMPLES / "custom_hook.py").read_text().splitlines()) < 40


# One run of each way in; the full matrix is slow.


def test_classification(tmp_path):
    launch(classification(tmp_path, "--comm_hook", str(short_config("powersgd", tmp_path))), tmp_path)
    assert_hook_acted("powersgd", trainer_log(tmp_path / "out"))
    assert (tmp_path / "out" / "checkpoint-12" / "comm_hook" / "rank_00001.pt").exists()
    assert (tmp_path / "out" / "eval_results.json").exists()


def test_causal_lm_takes_the_hook_from_the_environment(tmp_path):
    launch(causal_lm(tmp_path), tmp_path, ACCELERATE_COMM_HOOK="bf16_compress")
    rows = accelerate_log(tmp_path)
    assert_hook_acted("bf16_compress", rows)
    assert rows[-1]["eval_perplexity"] > 1
    assert (tmp_path / "out" / "step_9" / "comm_hook" / "rank_00001.pt").exists()


def test_custom_hook_in_a_script_that_knows_nothing(tmp_path):
    config = str(short_config("custom_hook", tmp_path))
    text = launch(["-m", "accel_commhooks", config, "examples/plain_ddp.py", "--steps", "60"], tmp_path)
    assert "digits right" in text


# Every example with every config: each config with one of them among the slow tests, and with all of them in `make test-matrix`.
# lora.py and demo.py choose their hooks themselves, so they run once, below.


def _configs(turn: int) -> list:
    marks = [pytest.mark.slow if index % 3 == turn else pytest.mark.matrix for index in range(len(CONFIGS))]
    return [pytest.param(name, marks=mark) for name, mark in zip(CONFIGS, marks, strict=True)]


@pytest.mark.parametrize("name", _configs(0))
def test_classification_with(name, tmp_path):
    launch(classification(tmp_path, "--comm_hook", str(short_config(name, tmp_path))), tmp_path)
    assert_hook_acted(name, trainer_log(tmp_path / "out"))


@pytest.mark.parametrize("name", _configs(1))
def test_causal_lm_with(name, tmp_path):
    launch(causal_lm(tmp_path, "--comm_hook", str(short_config(name, tmp_path))), tmp_path)
    assert_hook_acted(name, accelerate_log(tmp_path))


@pytest.mark.parametrize("name", _configs(2))
def test_plain_ddp_with(name, tmp_path):
    config = str(short_config(name, tmp_path))
    probe = {"PYTHONPATH": f"{PROBE}{os.pathsep}{EXAMPLES}", "PROBE_FOLDER": str(tmp_path)}
    text = launch(["-m", "accel_commhooks", config, "examples/plain_ddp.py", "--steps", "20"], tmp_path, **probe)
    assert math.isfinite(float(re.search(r"step 20: loss (\S+)", text)[1]))
    (attached,) = json.loads((tmp_path / "probe_0.json").read_text())
    assert attached["steps"] == 20
    assert_bytes(name, attached["sent"], attached["plain"])


@pytest.mark.slow
def test_lora(tmp_path):
    pytest.importorskip("peft")
    arguments = ["--offline", "--output_dir", str(tmp_path / "out"), "--max_steps", "40", "--disable_tqdm", "True"]
    text = launch(["examples/lora.py", *arguments], tmp_path)
    logs = {file.parent.name for file in (tmp_path / "out").glob("*/trainer_state.json")}
    assert logs == {"allreduce", "powersgd", "post_localsgd"}
    share = {name: int(percent) for name, percent in re.findall(r"^(\w+) +[\d.]+ +(\d+)%", text, re.MULTILINE)}
    assert share["allreduce"] == 100
    assert share["powersgd"] > 70, "there should be next to nothing to compress"
    assert share["post_localsgd"] < share["powersgd"]


# Interruptions.


def interrupt(command: list[str], folder: Path, *checkpoint: Path) -> None:
    """SIGTERM to the launcher as soon as the checkpoint's last files are there."""
    log = folder / "log.txt"
    process = start(["accelerate", "launch", *TWO_PROCESSES, *command], log)
    try:
        deadline = time.monotonic() + 120
        while not all(file.exists() for file in checkpoint):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) != 0
    finally:
        end_group(process)


@pytest.mark.slow
def test_classification_goes_on_after_sigterm(tmp_path):
    hook = str(short_config("powersgd", tmp_path))
    command = classification(tmp_path, "--comm_hook", hook, "--max_steps", "60", "--save_steps", "5")
    hook_state = tmp_path / "out" / "checkpoint-10" / "comm_hook"
    interrupt(command, tmp_path, hook_state / "rank_00000.pt", hook_state / "rank_00001.pt")
    assert not (tmp_path / "out" / "trainer_state.json").exists(), "it was interrupted before its end"
    text = launch(command, tmp_path)
    assert "starts afresh" not in text
    steps = [row["step"] for row in trainer_log(tmp_path / "out") if "loss" in row]
    assert steps == sorted(set(steps)) and steps[-1] == 60
    runtime = [row for row in trainer_log(tmp_path / "out") if "train_runtime" in row]
    assert len(runtime) == 1


@pytest.mark.slow
def test_causal_lm_goes_on_after_sigterm(tmp_path):
    hook = str(short_config("post_localsgd", tmp_path))
    command = causal_lm(tmp_path, "--comm_hook", hook, "--max_steps", "30", "--save_steps", "3")
    interrupt(command, tmp_path, tmp_path / "out" / "step_6")
    assert list((tmp_path / "out").glob("step_*/comm_hook/rank_00001.pt"))
    text = launch(command, tmp_path)
    resumed = int(re.search(r"resumed from \S*step_(\d+)", text)[1])
    assert 6 <= resumed < 30
    assert "starts afresh" not in text
    steps = [row["step"] for row in accelerate_log(tmp_path) if "loss" in row]
    assert steps == list(range(3, 31, 3))


# Two machines.


def slow_link():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import slow_link
    finally:
        sys.path.pop(0)
    return slow_link


@pytest.mark.slow
@pytest.mark.parametrize("name", ["powersgd", "post_localsgd"])
def test_two_machines_by_hand(name, tmp_path):
    """examples/cluster/two_machines.sh in two network namespaces: a rendezvous over the wire, one result on both."""
    laboratory = slow_link()
    reason = laboratory.why_not()
    if reason:
        pytest.skip(reason)
    hook = short_config(name, tmp_path)
    section = yaml.safe_load(hook.read_text())["comm_hook"]
    del section["ranks_per_node"]  # here the nodes are found
    hook.write_text(yaml.safe_dump({"comm_hook": section}))
    command = ["bash", "examples/cluster/two_machines.sh", "{machine_rank}", "{master_addr}"]
    command += [*classification(tmp_path)[1:], "--output_dir", str(tmp_path / "{machine_rank}" / "out")]
    command += ["--save_on_each_node", "True", "--max_steps", "20"]
    environment = {
        "HOOK": str(hook),
        "ACCELERATE_CONFIG": "configs/accelerate/two_cpu_machines.yaml",
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    with laboratory.SlowLink(nodes=2, rate="1gbit") as lab:
        assert lab.run(command, environment=environment, timeout=200, output=subprocess.DEVNULL) == 0
        sent = lab.sent()
    logs = [trainer_log(tmp_path / str(machine) / "out" / "checkpoint-20") for machine in range(2)]
    finals = [[row for row in log if "eval_accuracy" in row][-1] for log in logs]
    assert finals[0]["eval_accuracy"] == finals[1]["eval_accuracy"]
    assert finals[0]["eval_loss"] == pytest.approx(finals[1]["eval_loss"], rel=1e-5)
    figures = [row for row in logs[0] if "comm_mb_between_nodes" in row][-1]
    assert figures["comm_mb_within_node"] == 0
    assert 0 < figures["comm_mb_between_nodes"] < 0.9 * figures["comm_plain_ddp_mb"]
    assert min(sent) > 0


# Recipes for clusters.

SHELL_RECIPES = [EXAMPLES / "cluster" / "slurm.sbatch", EXAMPLES / "cluster" / "two_machines.sh"]


@pytest.mark.parametrize("script", SHELL_RECIPES, ids=lambda file: file.name)
def test_shell_recipe_parses(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", str(script)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def paths_in(text: str) -> set[str]:
    return set(re.findall(r"(?:examples|configs)/[\w/.]+\.(?:py|yaml|sh|sbatch)", text))


@pytest.mark.parametrize("recipe", sorted((EXAMPLES / "cluster").iterdir()), ids=lambda file: file.name)
def test_recipe_names_files_that_exist(recipe):
    missing = [path for path in paths_in(recipe.read_text()) if not (ROOT / path).exists()]
    assert not missing


def test_sbatch_starts_one_launcher_a_node_and_comes_back(tmp_path):
    """SLURM's commands played by small scripts: what they are called with, and what a SIGTERM does."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    calls = tmp_path / "calls"
    fakes = {
        "scontrol": f'echo "scontrol $*" >> {calls}; [ "$1" = requeue ] || printf "node7\\nnode8\\n"',
        "srun": 'shift; for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done; sleep 30 & wait $!',
        "accelerate": f'echo "accelerate $*" >> {calls}',
    }
    for name, body in fakes.items():
        (bin_folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (bin_folder / name).chmod(0o755)
    slurm = {
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_JOB_ID": "12345",
        "SLURM_NNODES": "2",
        "SLURM_CPUS_PER_TASK": "64",
    }
    process = subprocess.Popen(
        ["bash", str(EXAMPLES / "cluster" / "slurm.sbatch")],
        env=os.environ | slurm | {"PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"},
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 20
        while not calls.exists() or calls.read_text().count("accelerate launch") < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        end_group(process)
    launches = [line for line in calls.read_text().splitlines() if line.startswith("accelerate launch")]
    for rank, line in enumerate(launches):
        words = shlex.split(line)
        value = {word: words[index + 1] for index, word in enumerate(words[:-1]) if word.startswith("--")}
        assert value["--machine_rank"] == str(rank)
        assert value["--num_processes"] == "16" and value["--num_machines"] == "2"
        assert value["--main_process_ip"] == "node7" and value["--main_process_port"] == "32345"
    assert "scontrol requeue 12345" in calls.read_text()


def test_kubernetes_recipe_fits_the_schema():
    """The parts of the PyTorchJob schema that the operator insists on, and a command that Accelerate can parse."""
    job = yaml.safe_load((EXAMPLES / "cluster" / "kubernetes.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", job["metadata"]["name"])
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert set(replicas) == {"Master", "Worker"} and replicas["Master"]["replicas"] == 1
    for replica in replicas.values():
        assert replica["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
        pod = replica["template"]["spec"]
        (container,) = pod["containers"]
        assert container["name"] == "pytorch"
        assert all(isinstance(variable["value"], str) for variable in container["env"])
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        subprocess.run(["bash", "-n", "-c", container["args"][0]], check=True)


# What is printed in the READMEs.


def test_readme_names_files_that_exist():
    text = (EXAMPLES / "README.md").read_text()
    missing = [path for path in paths_in(text) if not (ROOT / path).exists()]
    assert not missing
    assert {file.name for file in EXAMPLES.glob("*.py")} - {"embedded.py"} <= set(re.findall(r"\w+\.py", text))


SHORTER = {"plain_ddp.py": "--steps 20", "lora.py": "--max_steps 20"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_printed_commands_run(tmp_path):
    """Each command of examples/README.md that needs no cluster, as printed but for its length and its output folder."""
    commands = load_example("curves").printed_commands()
    assert len(commands) >= 5
    for index, command in enumerate(commands):
        script = re.search(r"examples/(\w+\.py)", command)[1]
        command = re.sub(r"out/", f"{tmp_path}/{index}/", command) + " " + SHORTER.get(script, "--max_steps 10")
        command += f" --output_dir {tmp_path}/{index}" if script == "demo.py" else ""
        log = tmp_path / f"{index}.txt"
        finish(start(["bash", "-c", command], log), log)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_front_pages_commands_run(tmp_path):
    """Each command of README.md, on two CPU processes where it names two nodes, with a script for "train.py".

    Not those that install, nor the two of make, which are what runs this.
    """
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    lines = [line.partition("#")[0].strip() for line in "\n".join(blocks).splitlines()]
    commands = [line for line in lines if line and not line.startswith(("make ", "pip "))]
    assert len(commands) == 6
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    combined = yaml.safe_load((ROOT / "configs/accelerate/two_nodes_with_hook.yaml").read_text()) | ACCELERATE_CONFIG
    (tmp_path / "combined.yaml").write_text(yaml.safe_dump(combined))
    instead = {
        "configs/accelerate/two_nodes.yaml": "configs/accelerate/two_cpu_processes.yaml",
        "configs/accelerate/two_nodes_with_hook.yaml": "combined.yaml",
        "train.py --any args": f"{SCRIPTS / 'accelerate_loop.py'} --out {tmp_path}",
    }
    for index, command in enumerate(commands):
        for printed, used in instead.items():
            command = command.replace(printed, used)
        if "bench --hooks" in command:
            command += " --params 1M --batch 1 --seq 8 --steps 2 --rounds 1"
        log = tmp_path / f"{index}.txt"
        finish(start(["bash", "-c", f"cd {tmp_path} && {command}"], log), log)
    assert (tmp_path / "final_1.pt").exists()
    assert list(tmp_path.glob("**/bench_bars.png"))
