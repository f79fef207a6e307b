"""Lightning: automatic optimization hands ``optimizer.step`` a closure; manual optimization steps by itself."""

import sys
from pathlib import Path

import lightning
import tiny
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Module(lightning.LightningModule):
    def __init__(self, manual):
        super().__init__()
        self.automatic_optimization = not manual
        self.net = nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 6))

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


out = Path(sys.argv[1])
manual = "manual" in sys.argv[2:]
torch.manual_seed(0)
inputs = torch.randn(256, 24)
data = TensorDataset(inputs, (inputs @ torch.randn(24, 6)).argmax(1))
module = Module(manual)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_steps=9,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    gradient_clip_val=None if manual else 1.0,
    default_root_dir=str(out),
)
trainer.fit(module, DataLoader(data, batch_size=8))
tiny.save(module, out)
