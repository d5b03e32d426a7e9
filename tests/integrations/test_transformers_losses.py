"""Losses in the Hugging Face Trainer: what they are a mean over, and how they come back to the selector by id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

import halfway
from halfway.selectors import SELECTORS, Balanced, BalancedRemembered
from tests.helpers.matrix import SELECTOR_IN

pytest.importorskip("transformers")

import transformers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

from tests.helpers.hugging_face import (
    GROUP,
    SIZE,
    SMALL,
    Blocked,
    Samples,
    assert_as_by_hand,
    trained,
)

# ------------------------------------------------------------------------------- how many labels the loss counts


def counting(into: list[tuple[int, float]]) -> Any:
    def compute_loss_func(outputs: Any, labels: Tensor, num_items_in_batch: Any) -> Tensor:
        into.append((len(labels), float(num_items_in_batch)))
        return F.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch

    return compute_loss_func


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_loss_is_a_mean_over_the_retained_samples(accumulate: int, tmp_path: Path) -> None:
    seen: list[tuple[int, float]] = []
    more = {"compute_loss_func": counting(seen)}
    done = trained(tmp_path, more=more, gradient_accumulation_steps=accumulate)
    assert seen == [(4, 4.0 * accumulate)] * 8
    assert_as_by_hand(done, accumulate=accumulate)


class Sentences(Dataset):
    """For a language model: some rows have no label at all."""

    def __init__(self, labelled: list[int]) -> None:
        self.labelled = labelled
        self.words = torch.randint(50, (len(labelled), 6), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.labelled)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.words[i], "labels": self.words[i].where(torch.arange(6) < self.labelled[i], -100)}


@pytest.mark.parametrize("labelled", [[6, 5, 4, 3, 6, 2, 3, 4], [0] * 8, [0, 0, 0, 6] * 2])
def test_labels_of_a_language_model_are_counted_as_the_trainer_does(labelled: list[int], tmp_path: Path) -> None:
    """Each batch of an accumulated step keeps the weight it had before the pruning, and is a mean over what is left."""
    seen = []

    class Seeing(Blocked):
        def compute_loss(self, model: Any, inputs: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
            seen.append((inputs["labels"], float(num_items_in_batch)))
            return super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch, **kwargs)

    config = LlamaConfig(vocab_size=50, hidden_size=16, max_position_embeddings=8, num_key_value_heads=2, **SMALL)
    done = trained(
        tmp_path,
        LlamaForCausalLM(config),
        kind=Seeing,
        data=Sentences(labelled),
        blocking={"at": "model.layers.0.mlp", "selector": "random"},
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
    )
    total = sum(max(0, n - 1) for n in labelled)  # position 0 is never predicted
    for (labels, items), batch in zip(seen, done.batches, strict=True):
        of_batch, of_retained = ((x[:, 1:] != -100).sum().item() for x in (batch["labels"], labels))
        assert len(labels) == 2
        assert items == pytest.approx(total * max(1, of_retained) / max(1, of_batch))
    assert all(loss.isfinite() for loss in done.losses) or total == 0


# ---------------------------------------------------------------------------------------- ids, losses, selectors


def make_selector(name: str) -> Any:
    return SELECTORS[name](torch.rand(SIZE)) if name.startswith("rho") else SELECTORS[name]()


EVERY_DAY = ("density", "random", "loss", "last_loss", "balanced_remembered", "early_exit")
ROW = (pytest.mark.slow, pytest.mark.matrix)


@pytest.mark.parametrize(
    "name", [name if name in EVERY_DAY else pytest.param(name, marks=ROW) for name in SELECTORS if name != "proxy"]
)
def test_every_selector_runs(name: str, tmp_path: Path, feature) -> None:
    cut = {"at": None} if SELECTORS[name].needs == "outputs" else {}
    done = trained(
        tmp_path,
        data=halfway.WithIds(Samples()),
        blocking={"selector": make_selector(name), **cut},
        remove_unused_columns=False,
    )
    stats = done.blocker.stats
    assert (stats.pruned_steps, stats.effective_ratio, stats.steps_recomputed) == (8, 0.5, 0)
    assert stats.steps_replayed == (0 if done.blocker.selector.needs == "nothing" else 8)
    feature(f"{SELECTOR_IN}{GROUP}", name, stats)


@pytest.mark.parametrize("selector", ["last_loss", BalancedRemembered(), Balanced(), "rotate"])
def test_losses_of_the_retained_samples_are_fed_back_by_id(selector: Any, tmp_path: Path, feature) -> None:
    class Fed(Blocked):
        def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
            assert set(inputs) == {"pixel_values", "labels"}  # the model does not take ids
            original = self.blocker.observe
            self.blocker.observe = lambda losses: (told.append(losses), original(losses))  # type: ignore[method-assign]
            try:
                return super().compute_loss(model, inputs, **kwargs)
            finally:
                del self.blocker.observe

    told: list[Tensor] = []
    done = trained(
        tmp_path,
        kind=Fed,
        data=halfway.WithIds(Samples()),
        blocking={"selector": selector},
        remove_unused_columns=False,
        label_smoothing_factor=0.0 if selector == "last_loss" else 1e-9,  # with which the Trainer pops the labels
    )
    if selector == "rotate":  # wants ids, and no losses
        assert not told
        return
    assert [len(losses) for losses in told] == [4] * 8
    torch.testing.assert_close(torch.stack(told).mean(1), torch.stack(done.losses))
    memory = done.blocker.selector._losses.values.squeeze(1)
    last = {}
    for batch, rows, losses in zip(done.batches, done.rows, told, strict=True):
        last.update(zip(batch["ids"][rows].tolist(), losses.tolist(), strict=True))
    assert {i: memory[i].item() for i in last} == pytest.approx(last)
    if done.blocker.stats.steps_replayed:
        feature(GROUP, "ids, and losses fed back", done.blocker.stats)


def test_another_name_for_the_ids(tmp_path: Path) -> None:
    class Numbered(Samples):
        def __getitem__(self, i: int) -> dict[str, Any]:
            return {**super().__getitem__(i), "number": i}

    blocking = {"selector": "rotate", "ids": "number"}
    done = trained(tmp_path, data=Numbered(), blocking=blocking, remove_unused_columns=False)
    assert done.blocker.stats.pruned_steps == 8
    with pytest.raises(ValueError, match=r"no ids 'number'.*remove_unused_columns=False"):
        trained(tmp_path, data=Numbered(), blocking={"ids": "number"})


def test_ids_that_the_trainer_takes_out_are_an_error_that_says_so(tmp_path: Path) -> None:
    for data in (Samples(), halfway.WithIds(Samples())):
        with pytest.raises(ValueError, match=r"WithIds\(.*remove_unused_columns=False"):
            trained(tmp_path, data=data, blocking={"selector": "last_loss"})


def test_a_loss_that_is_no_cross_entropy_must_be_told(tmp_path: Path) -> None:
    config = BertConfig(vocab_size=50, hidden_size=16, max_position_embeddings=16, **{**SMALL, "num_labels": 1})
    settings: Any = {
        "data": halfway.WithIds(Samples(text=True)),
        "blocking": {"at": None, "selector": "last_loss"},
        "remove_unused_columns": False,
        "more": {"data_collator": regression},
    }
    with pytest.raises(ValueError, match="override per_sample_losses"):
        trained(tmp_path, BertForSequenceClassification(config), **settings)

    class Regression(Blocked):
        def per_sample_losses(self, outputs: Any, inputs: Any) -> Tensor:
            return (outputs.logits.squeeze(1) - inputs["labels"]) ** 2

    done = trained(tmp_path, BertForSequenceClassification(config), kind=Regression, **settings)
    assert done.blocker.selector._losses.values.isfinite().any()


def regression(samples: list[dict[str, Any]]) -> dict[str, Any]:
    batch = transformers.default_data_collator(samples)
    return {**batch, "labels": batch["labels"].float()}
