"""Tiny models and data for the Hugging Face Trainer, and the loop of one's own that it is compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from halfway import ForwardBlocker

pytest.importorskip("transformers")

import transformers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

from halfway.integrations.transformers import BlockingMixin

GROUP = "Hugging Face Trainer"
SIZE, BATCH, CLASSES = 32, 8, 3
transformers.logging.set_verbosity_error()


class Samples(Dataset):
    """Pictures or sentences, as a Trainer likes them."""

    def __init__(self, text: bool = False, size: int = SIZE) -> None:
        generator = torch.Generator().manual_seed(0)
        self.text = text
        self.pictures = torch.randn(size, 3, 16, 16, generator=generator)
        self.words = torch.randint(5, 50, (size, 12), generator=generator)
        self.labels = torch.randint(CLASSES, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, Any]:
        if not self.text:
            return {"pixel_values": self.pictures[i], "labels": self.labels[i]}
        mask = (torch.arange(12) < 5 + i % 7).long()  # padded, as a collator would
        return {"input_ids": self.words[i], "attention_mask": mask, "labels": self.labels[i]}


SMALL: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "num_labels": CLASSES,
}


def vit(dropout: float = 0.0, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return ViTForImageClassification(
        ViTConfig(hidden_size=16, image_size=16, patch_size=8, hidden_dropout_prob=dropout, **SMALL)
    )


def bert(dropout: float = 0.0, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    drop = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return BertForSequenceClassification(
        BertConfig(vocab_size=50, hidden_size=16, max_position_embeddings=16, **drop, **SMALL)
    )


MODELS = {
    "ViT": (vit, "vit.layers.0", ["pixel_values"]),
    "BERT": (bert, "bert.encoder.layer.0", ["input_ids", "attention_mask"]),
}


class Recording(Trainer):
    """A Trainer that remembers the batches it trained on, and the losses it got."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[Tensor] = []

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        self.losses.append(super().training_step(*args, **kwargs))
        return self.losses[-1]


class Blocked(BlockingMixin, Recording):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.batches: list[dict[str, Tensor]] = []
        self.rows: list[Tensor] = []

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        self.batches.append(dict(inputs))
        loss = super().training_step(model, inputs, *args, **kwargs)
        if self.blocker.last is not None:
            self.rows.append(self.blocker.last.indices)
        return loss


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    default = {
        "use_cpu": True,
        "per_device_train_batch_size": BATCH,
        "num_train_epochs": 2,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "max_grad_norm": 0.0,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
    }
    return TrainingArguments(str(folder), **{**default, **settings})


def trainer(
    folder: Path,
    model: nn.Module | None = None,
    *,
    kind: type[Trainer] = Blocked,
    data: Dataset | None = None,
    blocking: dict[str, Any] | None = None,
    more: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """A trainer of a tiny ViT at prune_ratio 0.5, unless told otherwise; not yet trained."""
    if issubclass(kind, BlockingMixin):
        more = {**(more or {}), "blocking": {"at": "vit.layers.0", "prune_ratio": 0.5, **(blocking or {})}}
    if model is None and "model_init" not in (more or {}):
        model = vit()
    return kind(model, arguments(folder, **settings), train_dataset=data or Samples(), **(more or {}))


def trained(*args: Any, **kwargs: Any) -> Any:
    made = trainer(*args, **kwargs)
    made.train()
    return made


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def assert_close(one: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=name)


def by_hand(
    model: nn.Module,
    batches: list[dict[str, Tensor]],
    inputs: list[str],
    at: str,
    accumulate: int = 1,
    **smoothing: Any,
) -> list[Tensor]:
    """The usual loop, with the one line. Returns the rows that were retained."""
    blocker = ForwardBlocker(model, at, 0.5, reuse="replay")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()
    rows = []
    for i, batch in enumerate(batches):
        part = blocker(**{name: batch[name] for name in inputs}, labels=batch["labels"], inputs=inputs)
        rows.append(blocker.last.indices)
        logits = model(**{name: part[name] for name in inputs}).logits
        (F.cross_entropy(logits, part["labels"], **smoothing) / accumulate).backward()
        if (i + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return rows


def assert_as_by_hand(done: Any, name: str = "ViT", **settings: Any) -> None:
    """The trainer retained the samples that a loop of one's own retains, and has the weights of that loop."""
    make, at, inputs = MODELS[name]
    model = make()
    rows = by_hand(model, done.batches, inputs, at, **settings)
    assert [r.tolist() for r in rows] == [r.tolist() for r in done.rows]
    assert_close(done.model, model)
    stats = done.blocker.stats
    assert stats.steps == stats.steps_replayed == len(done.batches) > 0
    assert stats.steps_recomputed == 0
