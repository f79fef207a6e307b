"""What bench trains: a built-in transformer of any size, a Transformers architecture, or the user's own model.

Weights and tokens are random: they do not change what a step costs, and nothing has to be downloaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..config.errors import ConfigError
from ..upstream import seams

VOCABULARY = 8192
POSITIONS = 512
Batch = dict[str, torch.Tensor]


@dataclass
class Workload:
    """A model and its data. ``make_model()`` gives every contender the same weights."""

    name: str
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[int, int], Batch]
    """Of (sequences, tokens in each); the model is called with it as keyword arguments and returns a loss."""


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        qkv = self.qkv(self.attention_norm(hidden)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.down(functional.gelu(self.up(self.mlp_norm(hidden))))


class BenchTransformer(nn.Module):
    """A decoder like GPT-2's: tied embeddings, pre-norm blocks, the loss of the next token."""

    def __init__(self, width: int, layers: int, vocabulary: int = VOCABULARY):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(POSITIONS, width)
        self.blocks = nn.ModuleList(Block(width, max(1, width // 64)) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(input_ids) + self.positions.weight[: input_ids.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1), input_ids[:, 1:].flatten())


def parse_count(text: str) -> int:
    """``14M`` is 14 000 000."""
    units = {"K": 1e3, "M": 1e6, "B": 1e9}
    try:
        number = float(text[:-1]) * units[text[-1].upper()] if text[-1].upper() in units else float(text)
    except (ValueError, IndexError):
        number = 0
    if number < 1:
        raise ConfigError(f"a number of parameters is written 14M, 1.5B or 350000, but got {text!r}")
    return int(number)


def shape_for(parameters: int) -> tuple[int, int]:
    """Width and layers of the built-in model nearest to a number of parameters, about 64 wide for each layer."""

    def count(width: int, layers: int) -> int:
        return (VOCABULARY + POSITIONS) * width + layers * (12 * width**2 + 13 * width) + 2 * width

    candidates = [(width, layers) for width in range(64, 8192, 64) for layers in range(2, 97)]
    close = [c for c in candidates if abs(count(*c) - parameters) <= 0.05 * parameters]
    if close:
        return min(close, key=lambda c: abs(c[0] / c[1] - 64))
    return min(candidates, key=lambda c: abs(count(*c) - parameters))


def load(model: str | None, parameters: str = "14M") -> Workload:
    """The built-in model, ``module:function``, or a Transformers name (``bert``, ``gpt2``, ``bert-base-uncased``)."""
    if model is None:
        width, layers = shape_for(parse_count(parameters))
        return Workload(
            f"transformer, {layers} layers of width {width}",
            lambda: BenchTransformer(width, layers),
            lambda batch, length: {"input_ids": torch.randint(0, VOCABULARY, (batch, length))},
        )
    return _from_function(model) if ":" in model else _from_transformers(model)


def _from_function(path: str) -> Workload:
    module_name, _, attribute = path.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the model '{path}' cannot be loaded: {error}; name 'package.module:function', importable from here"
        ) from None
    answer = function()
    if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], nn.Module)):
        raise ConfigError(
            f"{path} must return (model, make_batch), where model(**make_batch(batch, seq)) is a loss or has one, but "
            f"it returned a {type(answer).__name__}"
        )
    return Workload(path, lambda: function()[0], answer[1])


def _from_transformers(name: str) -> Workload:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM
    except ImportError:
        raise ConfigError(
            f"the model '{name}' is a Transformers name, but transformers is not installed; install it, or use --params"
        ) from None
    config = _transformers_config(AutoConfig, name)
    family: Any = AutoModelForMaskedLM if seams.masked_language_model_exists(config) else AutoModelForCausalLM

    def make_batch(batch: int, length: int) -> Batch:
        tokens = torch.randint(0, config.vocab_size, (batch, length))
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}

    return Workload(name, lambda: family.from_config(config), make_batch)


def _transformers_config(auto: Any, name: str) -> Any:
    """The named checkpoint's config if it is available locally, otherwise the defaults of its architecture."""
    try:
        return auto.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError):
        pass
    for guess in (name, name.split("/")[-1].split("-")[0]):
        try:
            return auto.for_model(guess)
        except ValueError:
            continue
    raise ConfigError(
        f"there is no Transformers model '{name}' on this machine and no architecture of that name; use a name such as "
        "bert or gpt2, a local folder, module:function, or --params"
    )
