"""A Trainer with its default arguments under post-local SGD that notes, after every step, what its network card has sent."""

import argparse
import json
import os
from pathlib import Path

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from accel_commhooks.bench.probes import card_bytes
from accel_commhooks.trainer import CommHookCallback


class Model(nn.Module):
    def __init__(self, buffers):
        super().__init__()
        norm = nn.BatchNorm1d(256) if buffers else nn.LayerNorm(256)
        self.layers = nn.Sequential(nn.Linear(64, 256), norm, nn.ReLU(), nn.Linear(256, 4))

    def forward(self, x, labels):
        return {"loss": nn.functional.cross_entropy(self.layers(x), labels)}


class Card(TrainerCallback):
    """Reads the card when all have stopped sending: a barrier of files, which no card sees."""

    def __init__(self, out, hook):
        self.out, self.hook, self.sent, self.counted = out, hook, [], []

    def meet(self, name):
        rank, world_size = os.environ["RANK"], int(os.environ["WORLD_SIZE"])
        (self.out / f"{name}_{rank}").touch()
        while len(list(self.out.glob(f"{name}_*"))) < world_size:
            pass

    def on_step_end(self, args, state, control, **kwargs):
        self.meet(f"done{state.global_step}")
        self.sent.append(sum(card_bytes()))
        self.counted.append(self.hook.handle.comm.traffic.scope("between"))
        self.meet(f"read{state.global_step}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--buffers", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    hook = CommHookCallback("post_localsgd", start_localSGD_iter=4, period=8)
    card = Card(args.out, hook)
    training = TrainingArguments(str(args.out), use_cpu=True, max_steps=21, report_to="none", disable_tqdm=True)
    data = [{"x": torch.randn(64), "labels": i % 4} for i in range(512)]
    Trainer(Model(args.buffers), training, train_dataset=data, callbacks=[hook, card]).train()
    figures = {"sent": card.sent, "counted": card.counted}
    (args.out / f"figures_{os.environ['RANK']}.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
