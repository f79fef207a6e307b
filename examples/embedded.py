"""Data, tokenizer and models for a machine that cannot reach the hub, made from what every Python brings along.

The standard library is a text corpus with labels: a passage of documentation belongs to the package it was found in. A
module is either in the training split or in the held-out one, never in both, so a model that only remembers passages scores
at chance. Models are small ones from a config, without a download.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import huggingface_hub
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

STANDARD_LIBRARY = Path(sysconfig.get_paths()["stdlib"])
# Packages with several documented modules in every Python from 3.10 on, on every platform.
PACKAGES = ["asyncio", "email", "http", "importlib", "json", "logging", "multiprocessing", "unittest"]
PACKAGES += ["urllib", "wsgiref", "xml", "xmlrpc"]
PASSAGE_WORDS = 40
SPECIAL_TOKENS = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "[EOS]"}


def hub_is_reachable() -> bool:
    """Whether models and data can be downloaded; never with HF_HUB_OFFLINE=1."""
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return False
    try:
        huggingface_hub.utils.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=3)
    except Exception:  # whose error it is depends on the HTTP library, which depends on the hub client's version
        return False
    return True


def docstring_passages(train_per_class: int = 400, held_out_per_class: int = 60) -> DatasetDict:
    """Passages of documentation, labelled with their package; the same number from each."""
    generator = random.Random(0)
    features = Features({"text": Value("string"), "label": ClassLabel(names=PACKAGES)})
    splits: dict[str, dict[str, list]] = {name: {"text": [], "label": []} for name in ("train", "test")}
    for label, package in enumerate(PACKAGES):
        training, held_out = _split_by_module(_documented_modules(package))
        for split, modules, count in (
            ("train", training, train_per_class),
            ("test", held_out, held_out_per_class),
        ):
            words = [word for module in modules for word in module.split()]
            for _ in range(count):
                start = generator.randrange(max(1, len(words) - PASSAGE_WORDS))
                splits[split]["text"].append(" ".join(words[start : start + PASSAGE_WORDS]))
                splits[split]["label"].append(label)
    return DatasetDict({name: Dataset.from_dict(split, features=features) for name, split in splits.items()})


def source_text(packages: Sequence[str] = PACKAGES[::2]) -> DatasetDict:
    """The source of some packages, one row a module; that of half of them is about a million characters."""
    splits: dict[str, list[str]] = {"train": [], "test": []}
    for package in packages:
        training, held_out = _split_by_module([file.read_text("utf-8") for file in _modules(package)])
        splits["train"] += training
        splits["test"] += held_out
    return DatasetDict({name: Dataset.from_dict({"text": texts}) for name, texts in splits.items()})


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of these texts; the same texts give the same tokenizer on every rank."""
    tokenizer = Tokenizer(models.BPE(unk_token=SPECIAL_TOKENS["unk_token"]))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **SPECIAL_TOKENS)


def _modules(package: str) -> list[Path]:
    files = (STANDARD_LIBRARY / package).rglob("*.py")
    return sorted(file for file in files if not {"test", "tests"} & set(file.relative_to(STANDARD_LIBRARY).parts))


def _documented_modules(package: str) -> list[str]:
    """The documentation of each module of a package, as ``help()`` would print it: signatures and docstrings."""
    pages = ["\n".join(_entries(ast.parse(file.read_text("utf-8")))) for file in _modules(package)]
    return [page for page in pages if page]


def _entries(tree: ast.Module) -> list[str]:
    entries = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                entries.append(f"{_signature(node)} {docstring}")
    return entries


def _signature(node: ast.AST) -> str:
    if isinstance(node, ast.ClassDef):
        return f"class {node.name}"
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return f"{node.name} ({ast.unparse(node.args)})"
    return ""


def _split_by_module(modules: list[str]) -> tuple[list[str], list[str]]:
    """Every third module in order of size is held out, from the second on: the largest is for training."""
    ordered = sorted(modules, key=len, reverse=True)
    held_out = ordered[1::3]
    return [module for index, module in enumerate(ordered) if index % 3 != 1], held_out
