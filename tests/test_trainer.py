"""Real Trainers in real ranks: callbacks, consensus, averaging, ZeRO with Trainer's default arguments."""

import copy
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import distance

ENVIRONMENT = {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": "2"}


def _dataset(size, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(5, 50, (size, 8), generator=generator)
    return [{"input_ids": row, "labels": int(row.sum()) % 3} for row in tokens]


def _trainer(folder, callbacks=(), **arguments):
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    for state in (AcceleratorState, PartialState, GradientState):
        state._shared_state.clear()
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        num_labels=3,
        # An evaluation draws random numbers, which would change the dropout of the steps after it.
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    arguments = {
        "max_steps": 10,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        **arguments,
    }
    training = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none", disable_tqdm=True, **arguments)
    return Trainer(
        model=BertForSequenceClassification(config),
        args=training,
        train_dataset=_dataset(256, 1),
        eval_dataset=_dataset(16, 2),
        callbacks=list(callbacks),
    )


def _weights(trainer):
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters()}


def _losses(trainer):
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def _norms(trainer):
    return [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]


# ZeRO, where torch's own hook fails: two groups, clipping, a schedule, the first steps, find_unused_parameters.


def _zero(rank, world_size, folder, arguments):
    from accel_commhooks.trainer import CommHookCallback

    plain = _trainer(f"{folder}/plain", **arguments)
    plain.train()
    start = _weights(_trainer(f"{folder}/none", **arguments))
    ours = _trainer(f"{folder}/ours", [CommHookCallback("zero_overlap")], **arguments)
    first_step = {}

    class Watch(__import__("transformers").TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 1:
                first_step["moved"] = distance({n: p.detach() for n, p in kwargs["model"].named_parameters()}, start)

    ours.add_callback(Watch())
    ours.train()
    return {
        "weights": distance(_weights(plain), _weights(ours)),
        "norms": max(abs(a - b) for a, b in zip(_norms(plain), _norms(ours), strict=True)),
        "norm": max(_norms(plain)),
        "losses": max(abs(a - b) for a, b in zip(_losses(plain), _losses(ours), strict=True)),
        "first": first_step["moved"],
        "groups": len(ours.optimizer.param_groups),
        "figures": ours.state.log_history[3],
        "find_unused": ours.accelerator.ddp_handler.find_unused_parameters,
    }


@pytest.mark.parametrize("arguments", [{}, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.05}], ids=str)
def test_zero_overlap_in_a_trainer_with_default_arguments(pool, tmp_path, arguments):
    for result in pool.run(_zero, 2, str(tmp_path), arguments, environment=ENVIRONMENT):
        assert result["find_unused"] and result["groups"] == 2
        assert result["first"] > 1e-5, "the first step must move the weights"
        assert result["figures"]["comm_optimizer_state_mb"] > 0
        # Adam turns the last digit of near-zero gradients (attention's key biases) into steps; rate 1e-3, ten steps.
        assert result["weights"] <= 2e-3 and result["losses"] <= 1e-4
        assert result["norms"] <= 1e-4 * max(1.0, result["norm"])


def _zero_backward(rank, world_size, folder):
    from accel_commhooks import CompatibilityError
    from accel_commhooks.trainer import CommHookCallback

    trainer = _trainer(folder, [CommHookCallback("zero_overlap", step="backward")])
    try:
        trainer.train()
    except CompatibilityError as error:
        return error.text
    return "ran"


def test_trainers_clipping_with_a_step_in_backward_is_refused(pool, tmp_path):
    text = pool.run(_zero_backward, 2, str(tmp_path), environment=ENVIRONMENT)[0]
    assert "max_grad_norm=1.0" in text and "step: optimizer" in text


# Consensus: whoever evaluates or saves sees the mean of the replicas.


def _evaluated(rank, world_size, folder, evaluate, restore, kind):
    from transformers import TrainerCallback

    from accel_commhooks.trainer import CommHookCallback, ModelAveragingCallback

    class LateAsker(TrainerCallback):
        """Decides on an evaluation after every other callback was asked."""

        def on_step_end(self, args, state, control, **kwargs):
            if evaluate and state.global_step == 6:
                control.should_evaluate = control.should_save = True

    class Look(TrainerCallback):
        def __init__(self):
            self.seen = {}

        def on_evaluate(self, args, state, control, metrics=None, **kwargs):
            own = {n: p.detach().clone() for n, p in kwargs["model"].named_parameters()}
            self.seen["loss"] = metrics["eval_loss"]
            self.seen["weights"] = own

    if kind == "hook":
        ours = [
            CommHookCallback(
                "post_localsgd",
                start_localSGD_iter=1,
                period=4,
                subgroup="none",
                restore_local=restore,
                ranks_per_node=1,
            )
        ]
    else:
        ours = [
            CommHookCallback("noop", i_know_that_replicas_diverge=True),
            ModelAveragingCallback(period=4, warmup_steps=1, restore_local=restore),
        ]
    look = Look()
    trainer = _trainer(folder, [*ours, look], max_steps=11)
    trainer.add_callback(LateAsker())
    trainer.train()
    saved = Path(folder) / "checkpoint-6"
    dist.barrier()
    return look.seen, _weights(trainer), trainer.state.log_history[1:], saved.exists()


@pytest.mark.parametrize("kind", ["hook", "callback"])
def test_an_evaluation_and_a_save_in_the_middle_of_a_period(pool, tmp_path, kind):
    from safetensors.torch import load_file

    looked = pool.run(_evaluated, 2, str(tmp_path / "a"), True, True, kind, environment=ENVIRONMENT)
    unseen = pool.run(_evaluated, 2, str(tmp_path / "b"), False, True, kind, environment=ENVIRONMENT)
    assert looked[0][0]["loss"] == looked[1][0]["loss"]
    assert distance(looked[0][0]["weights"], looked[1][0]["weights"]) == 0
    saved = load_file(tmp_path / "a" / "checkpoint-6" / "model.safetensors")
    assert distance({n: saved[n] for n in looked[0][0]["weights"]}, looked[0][0]["weights"]) == 0
    for rank in range(2):
        # The run ends as if nobody had looked, and in a consensus.
        assert distance(looked[rank][1], unseen[rank][1]) == 0
    assert distance(looked[0][1], looked[1][1]) == 0
    if kind == "hook":
        figures = [row for row in looked[0][2] if "loss" in row]
        quiet = [row["comm_mb_between_nodes"] for row in figures[1:4]]
        assert 0.0 in quiet and any(row["comm_mb_between_nodes"] > 0 for row in figures)
        assert any("comm_replica_distance" in row for row in figures)


def _best_model(rank, world_size, folder):
    from transformers import EarlyStoppingCallback

    from accel_commhooks.trainer import CommHookCallback

    trainer = _trainer(
        folder,
        [
            CommHookCallback("post_localsgd", start_localSGD_iter=0, period=5, subgroup="none"),
            EarlyStoppingCallback(early_stopping_patience=2),
        ],
        max_steps=14,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="steps",
        save_steps=3,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
    )
    trainer.train()
    return trainer.state.best_model_checkpoint, trainer.state.global_step, _weights(trainer)


def test_best_model_and_early_stopping_agree(pool, tmp_path):
    first, second = pool.run(_best_model, 2, str(tmp_path), environment=ENVIRONMENT)
    assert first[:2] == second[:2] and first[0] is not None
    assert distance(first[2], second[2]) == 0


# Averaging alone.


def _averaging(rank, world_size, folder, use_torch):
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    from accel_commhooks.trainer import CommHookCallback, ModelAveragingCallback

    noop = CommHookCallback("noop", i_know_that_replicas_diverge=True)
    options = {"period": 3, "warmup_steps": 2}
    if use_torch:
        callback = ModelAveragingCallback(averager=PeriodicModelAverager(**options))
    else:
        callback = ModelAveragingCallback(**options)
    trainer = _trainer(folder, [noop, callback], max_steps=8)
    before_end = {}

    class Last(__import__("transformers").TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            before_end[state.global_step] = copy.deepcopy({n: p.detach() for n, p in model.named_parameters()})

    trainer.add_callback(Last())
    trainer.train()
    return before_end, _weights(trainer)


def test_averaging_callback_runs_after_optimizer_steps(pool, tmp_path):
    ours = pool.run(_averaging, 2, str(tmp_path / "a"), False, environment=ENVIRONMENT)
    for step in range(1, 8):
        equal = distance(ours[0][0][step], ours[1][0][step]) == 0
        assert equal == (step - 1 in (2, 5)), step
    assert distance(ours[0][1], ours[1][1]) == 0
    theirs = pool.run(_averaging, 2, str(tmp_path / "b"), True, environment=ENVIRONMENT)
    for step in range(1, 8):
        assert distance(ours[0][0][step], theirs[0][0][step]) <= 1e-5


def _reported(rank, world_size, folder):
    from transformers import TrainerCallback

    from accel_commhooks.trainer import CommHookCallback, ModelAveragingCallback

    seen = []

    class Reporter(TrainerCallback):
        """Where report_to's callbacks stand: before the user's."""

        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(dict(logs))

    hook = CommHookCallback("powersgd", start_powerSGD_iter=1)
    trainer = _trainer(folder, [Reporter(), hook, ModelAveragingCallback(period=2)], max_steps=3)
    trainer.train()
    return [row for row in seen if "loss" in row]


def test_figures_are_there_when_reporters_log(pool, tmp_path):
    rows = pool.run(_reported, 2, str(tmp_path), environment=ENVIRONMENT)[0]
    assert len(rows) == 3
    for row in rows:
        assert row["comm_plain_ddp_mb"] > 0 and math.isfinite(row["comm_wait_s"])
        assert row["comm_replica_distance"] >= 0
    assert rows[2]["comm_compression"] > 1.3 * rows[0]["comm_compression"]
