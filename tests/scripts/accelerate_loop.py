"""A plain Accelerate loop that knows nothing of communication hooks.

With `--global_batch` the number of ranks makes no difference but rounding: they divide each batch, nothing looks across its
rows, and epsilon keeps Adam from making steps of rounding.
"""

import argparse
import os
import signal
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn


class Net(nn.Module):
    def __init__(self, norm=nn.BatchNorm1d):
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.norm = norm(64)
        self.head = nn.Linear(64, 50)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.head(self.norm(hidden))


def make_accelerator(**options):
    return Accelerator(cpu=True, gradient_accumulation_steps=2, **options)


def main(make_accelerator=make_accelerator):
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--save_at", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--kill_at", type=int, default=0)
    parser.add_argument("--global_batch", type=int, default=0)
    args = parser.parse_args()
    out = Path(args.out)

    accelerator = make_accelerator(dataloader_config=DataLoaderConfiguration(split_batches=args.global_batch > 0))
    torch.manual_seed(0)
    model = Net(nn.LayerNorm if args.global_batch else nn.BatchNorm1d)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005, eps=1e-3 if args.global_batch else 1e-8)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 100)
    tokens = torch.randint(0, 50, (2048,), generator=torch.Generator().manual_seed(1))
    dataset = torch.utils.data.TensorDataset(tokens, (tokens * 7 + 3) % 50)
    data = torch.utils.data.DataLoader(dataset, batch_size=args.global_batch or 8)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)

    done = 0
    if args.resume:
        accelerator.load_state(str(out / "checkpoint"))
        done = args.save_at
        data = accelerator.skip_first_batches(data, 2 * done)
    for inputs, labels in data:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue
        done += 1
        if done == args.save_at and not args.resume:
            accelerator.save_state(str(out / "checkpoint"))
        if done == args.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if done == args.steps:
            break
    out.mkdir(parents=True, exist_ok=True)
    torch.save(accelerator.unwrap_model(model).state_dict(), out / f"final_{accelerator.process_index}.pt")
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
