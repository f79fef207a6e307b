"""sentence-transformers: MultipleNegativesRankingLoss runs several forwards for one backward."""

import sys
from pathlib import Path

import tiny
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import CachedMultipleNegativesRankingLoss, MultipleNegativesRankingLoss
from sentence_transformers.models import Pooling, Transformer
from transformers import BertModel

out = Path(sys.argv[1])
cached = "cached" in sys.argv[2:]
folder = out / f"model_{tiny.RANK}"
torch.manual_seed(0)
BertModel(tiny.bert(), add_pooling_layer=False).save_pretrained(folder)
tiny.tokenizer().save_pretrained(folder)
transformer = Transformer(str(folder), max_seq_length=16)
model = SentenceTransformer(modules=[transformer, Pooling(32)], device="cpu")
loss = CachedMultipleNegativesRankingLoss(model, mini_batch_size=2) if cached else MultipleNegativesRankingLoss(model)
trainer = SentenceTransformerTrainer(
    model=model,
    args=SentenceTransformerTrainingArguments(**tiny.arguments(out)),
    train_dataset=Dataset.from_dict({"anchor": tiny.sentences(256, 1), "positive": tiny.sentences(256, 2)}),
    loss=loss,
)
trainer.train()
tiny.save(model, out)
