"""diffusers: a UNet in Accelerate's loop, with accumulation, clipping and an exponential moving average of the weights."""

import sys
from pathlib import Path

import tiny
import torch
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

out = Path(sys.argv[1])
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
model = UNet2DModel(
    sample_size=8,
    in_channels=1,
    out_channels=1,
    layers_per_block=1,
    block_out_channels=(8, 16),
    norm_num_groups=4,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    attention_head_dim=8,
)
average = EMAModel(model.parameters(), decay=0.9)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
schedule = get_cosine_schedule_with_warmup(optimizer, 2, 40)
noise = DDPMScheduler(num_train_timesteps=20)
pictures = DataLoader(TensorDataset(torch.randn(144, 1, 8, 8)), batch_size=4)
model, optimizer, pictures, schedule = accelerator.prepare(model, optimizer, pictures, schedule)
draw = torch.Generator().manual_seed(tiny.RANK)
for (clean,) in pictures:
    added = torch.randn(clean.shape, generator=draw)
    times = torch.randint(0, 20, (len(clean),), generator=draw)
    with accelerator.accumulate(model):
        predicted = model(noise.add_noise(clean, added, times), times, return_dict=False)[0]
        accelerator.backward(nn.functional.mse_loss(predicted, added))
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        average.step(model.parameters())
tiny.save(accelerator.unwrap_model(model), out)
