"""The Hugging Face Trainer, the real one: what it trains with the mixin is what a loop of one's own would train."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import halfway
from halfway import ForwardBlocker, Schedule
from halfway.selectors import SELECTORS, Balanced, BalancedRemembered, Rho
from tests.helpers import processes
from tests.helpers.matrix import SELECTOR_IN

pytest.importorskip("transformers")

import transformers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

from halfway.integrations.transformers import BlockingMixin
from tests import ROOT

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


# -------------------------------------------------------------- what is trained


@pytest.mark.parametrize("name", MODELS)
def test_it_trains_as_the_usual_loop_would(name: str, tmp_path: Path, feature) -> None:
    make, at, _ = MODELS[name]
    done = trained(tmp_path, make(), data=Samples(text=name == "BERT"), blocking={"at": at})
    assert_as_by_hand(done, name)
    feature(GROUP, f"{name}, cut at `{at}`", done.blocker.stats)


def test_without_pruning_it_is_the_plain_trainer_bit_for_bit(tmp_path: Path) -> None:
    plain = trained(tmp_path, vit(dropout=0.2), kind=Recording)
    blocked = trained(tmp_path, vit(dropout=0.2), blocking={"prune_ratio": 0.0})
    assert_equal(plain.model, blocked.model)
    assert torch.equal(torch.stack(plain.losses), torch.stack(blocked.losses))


def test_accumulated_gradients_are_those_of_the_usual_loop(tmp_path: Path, feature) -> None:
    done = trained(tmp_path, gradient_accumulation_steps=2)
    assert_as_by_hand(done, accumulate=2)
    feature(GROUP, "gradient accumulation", done.blocker.stats)


def test_it_replays_in_bfloat16(tmp_path: Path, feature) -> None:
    done = trained(tmp_path, bf16=True)
    stats = done.blocker.stats
    assert (stats.steps_replayed, stats.steps_recomputed) == (8, 0)
    model = vit()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rows = by_hand(model, done.batches, ["pixel_values"], "vit.layers.0")
    assert [r.tolist() for r in rows] == [r.tolist() for r in done.rows]
    for (name, a), b in zip(done.model.state_dict().items(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=2e-3, msg=name)
    feature(GROUP, "bf16=True", stats)


def test_label_smoothing(tmp_path: Path, feature) -> None:
    done = trained(tmp_path, label_smoothing_factor=0.1)
    assert_as_by_hand(done, label_smoothing=0.1)
    feature(GROUP, "label_smoothing_factor", done.blocker.stats)


def test_a_loss_of_ones_own(tmp_path: Path, feature) -> None:
    class Own(Blocked):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = F.cross_entropy(outputs.logits, labels)
            return (loss, outputs) if return_outputs else loss

    done = trained(tmp_path, kind=Own)
    assert_as_by_hand(done)
    feature(GROUP, "compute_loss overridden", done.blocker.stats)


def test_gradient_checkpointing(tmp_path: Path, feature) -> None:
    done = trained(tmp_path, gradient_checkpointing=True)
    assert_as_by_hand(done)
    feature(GROUP, "gradient_checkpointing=True, no dropout", done.blocker.stats)


@pytest.mark.filterwarnings("ignore:halfway computes the shallow layers twice")
def test_a_compiled_model_is_recomputed(tmp_path: Path, feature) -> None:
    done = trained(tmp_path, torch_compile=True, torch_compile_backend="eager", num_train_epochs=1)
    stats = done.blocker.stats
    assert (stats.steps_replayed, stats.steps_recomputed) == (0, 4)
    assert "compiled" in next(iter(stats.recompute_reasons))
    feature(GROUP, "torch_compile=True", stats)


# ------------------------------------------------- how many labels the loss counts


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


# ----------------------------------------------------------- ids, losses, selectors


def make_selector(name: str) -> Any:
    return Rho(torch.rand(SIZE)) if name == "rho" else SELECTORS[name]()


@pytest.mark.parametrize("name", SELECTORS)
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


# -------------------------------------------------------------- around the training


def test_it_evaluates_in_between_as_ever(tmp_path: Path) -> None:
    settings: Any = {
        "data": halfway.WithIds(Samples()),
        "blocking": {"selector": Balanced()},
        "remove_unused_columns": False,
        "more": {"eval_dataset": Samples()},
    }
    asked = []

    class Counting(Blocked):
        def per_sample_losses(self, outputs: Any, inputs: Any) -> Tensor:
            asked.append(len(inputs["labels"]))
            return super().per_sample_losses(outputs, inputs)

    without = trained(tmp_path, **settings)
    done = trained(tmp_path, kind=Counting, **settings, eval_strategy="steps", eval_steps=1)
    assert asked == [4] * 8  # the retained samples, and none of the evaluation
    assert_equal(done.model, without.model)
    assert done.blocker.stats == without.blocker.stats
    memories = [t.blocker.selector._losses.values for t in (done, without)]
    torch.testing.assert_close(*memories, rtol=0, atol=0, equal_nan=True)
    found = [entry["eval_loss"] for entry in done.state.log_history if "eval_loss" in entry]
    assert len(found) == 8
    plain = trainer(tmp_path, done.model, kind=Trainer, more={"eval_dataset": Samples()})
    assert found[-1] == plain.evaluate()["eval_loss"]


def test_what_was_done_is_logged(tmp_path: Path) -> None:
    done = trained(tmp_path, logging_steps=4)
    *training, summary = done.state.log_history
    assert [entry["halfway/steps_replayed"] for entry in training] == [4, 8]
    for entry in training:
        assert entry["halfway/effective_ratio"] == 0.5
        assert entry["halfway/steps_recomputed"] == 0
        assert 0.5 < entry["halfway/relative_flops"] < 1
    assert not any(name.startswith("halfway") for name in summary)


def test_epochs_are_counted_for_the_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    set_epoch = ForwardBlocker.set_epoch
    monkeypatch.setattr(ForwardBlocker, "set_epoch", lambda self, epoch: (told.append(epoch), set_epoch(self, epoch)))
    settings: Any = {"blocking": {"schedule": Schedule(start=1, stop=2)}, "num_train_epochs": 3}
    done = trained(tmp_path, **settings, save_strategy="steps", save_steps=3)
    assert told == [0, 1, 2]
    assert done.blocker.stats.pruned_steps == 4
    told.clear()
    resumed = trainer(tmp_path / "other", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert told == [1, 2]
    assert resumed.blocker.stats == done.blocker.stats


def test_model_init_makes_a_new_blocker(tmp_path: Path) -> None:
    selector = halfway.Density()
    unlearned = str(selector.state_dict())
    done = trainer(tmp_path, more={"model_init": lambda: vit()}, blocking={"selector": selector})
    first = done.blocker
    for _ in range(2):
        before = done.blocker
        done.train()
        assert done.blocker is not before
        assert done.blocker.stats.steps_replayed == 8
    assert first.stats.steps == 0
    assert str(done.blocker.selector.state_dict()) != unlearned == str(selector.state_dict())
    done.batches, done.rows = done.batches[8:], done.rows[8:]  # the second training began anew
    assert_as_by_hand(done)


def test_a_second_training_goes_on(tmp_path: Path) -> None:
    done = trained(tmp_path)
    blocker = done.blocker
    done.train()
    assert done.blocker is blocker
    assert blocker.stats.steps_replayed == 16


# ---------------------------------------------------------------- stop and resume


class Stop(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 5


@pytest.mark.parametrize("selector", [halfway.Density(), BalancedRemembered()])
def test_stopped_and_resumed_is_bit_identical(selector: Any, tmp_path: Path, feature) -> None:
    # BERT, because transformers 5.22 does not load the encoder of a ViT when it resumes, with or without the mixin: it
    # saves the weights under the names of older versions, and reads them as they are.
    settings: Any = {
        "data": halfway.WithIds(Samples(text=True, size=128)),
        "blocking": {"at": "bert.encoder.layer.0", "selector": selector, "schedule": Schedule(start=1)},
        "remove_unused_columns": False,
        "per_device_train_batch_size": 32,
        "num_train_epochs": 3,
        "optim": "adamw_torch",
        "learning_rate": 0.01,
        "lr_scheduler_type": "linear",
        "save_strategy": "steps",
        "save_steps": 5,
    }
    unbroken = trained(tmp_path / "unbroken", bert(dropout=0.2), **settings)
    trained(tmp_path / "broken", bert(dropout=0.2), **settings, more={"callbacks": [Stop()]})
    resumed = trainer(tmp_path / "broken", bert(dropout=0.2, seed=1), **settings)
    resumed.train(resume_from_checkpoint=True)
    assert_equal(resumed.model, unbroken.model)
    assert resumed.blocker.stats == unbroken.blocker.stats
    assert torch.equal(torch.stack(resumed.losses), torch.stack(unbroken.losses[5:]))
    # From the middle of the last epoch, by its path.
    again = trainer(tmp_path / "again", bert(dropout=0.2, seed=2), **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "unbroken" / "checkpoint-10"))
    assert_equal(again.model, unbroken.model)
    if unbroken.blocker.stats.steps_replayed:
        feature(GROUP, "stopped and resumed from a checkpoint", resumed.blocker.stats)


def test_a_checkpoint_is_whole_before_older_ones_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deleted = []
    rmtree = shutil.rmtree

    def watched(path: Any, *args: Any, **kwargs: Any) -> None:
        newest = max(tmp_path.glob("checkpoint-*"), key=lambda p: int(p.name.rpartition("-")[2]))
        deleted.append((newest.name, (newest / "halfway.pt").is_file()))
        rmtree(path, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", watched)
    trained(tmp_path, save_strategy="steps", save_steps=4, save_total_limit=1)
    assert deleted == [("checkpoint-8", True)]
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("how", ["without the mixin", "save_only_model"])
def test_a_checkpoint_without_the_state_says_what_to_do(how: str, tmp_path: Path) -> None:
    if how == "save_only_model":
        trained(tmp_path, save_strategy="epoch", save_only_model=True)
    else:
        trained(tmp_path, kind=Recording, save_strategy="epoch")
    assert not list(tmp_path.rglob("halfway.pt"))
    with pytest.raises(FileNotFoundError, match=r"checkpoint-8 has no halfway.pt.*from_pretrained"):
        trainer(tmp_path, num_train_epochs=3).train(resume_from_checkpoint=True)


# ----------------------------------------------------------------------- refused


def test_data_parallel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, feature) -> None:
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    with pytest.raises(TypeError, match=r"nn\.DataParallel splits every batch.*torchrun") as error:
        trainer(tmp_path)
    feature(GROUP, "several GPUs in one process (nn.DataParallel)", error.value)


def test_tensor_parallelism_is_refused(tmp_path: Path) -> None:
    def parallel() -> nn.Module:  # by model_init, which comes behind what the Trainer itself would refuse without ranks
        model = vit()
        model._tp_size = 2
        return model

    with pytest.raises(TypeError, match="2 processes share each batch"):
        trainer(tmp_path, more={"model_init": parallel})


def test_wrong_settings_are_found_before_the_training(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no module 'vit\.layer\.0'.*closest"):
        trainer(tmp_path, blocking={"at": "vit.layer.0"})
    with pytest.raises(TypeError, match="blocking"):
        Blocked(vit(), arguments(tmp_path))


def test_inputs_may_be_said(tmp_path: Path) -> None:
    done = trained(tmp_path, blocking={"inputs": ["pixel_values"]})
    assert_as_by_hand(done)
    with pytest.raises(ValueError, match=r"inputs=\['pixels'\] are not in the batch"):
        trained(tmp_path, blocking={"inputs": ["pixels"]})


# -------------------------------------------------------------- several processes


def rank_of_a_job(rank: int, folder: str) -> Any:
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    os.environ.update({name: str(value) for name, value in where.items()})
    done = trained(Path(folder), gradient_accumulation_steps=1, ddp_backend="gloo", per_device_train_batch_size=4)
    assert isinstance(done.model_wrapped, nn.parallel.DistributedDataParallel)
    stats = done.blocker.stats
    retained = [{n: v[rows] for n, v in b.items()} for b, rows in zip(done.batches, done.rows, strict=True)]
    return retained, done.model.state_dict(), (stats.steps_replayed, stats.recompute_reasons)


def test_two_processes_train_what_one_would_with_all_their_retained_samples(tmp_path: Path, feature) -> None:
    results = processes.run(2, rank_of_a_job, str(tmp_path))
    model = vit()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parts in zip(*(retained for retained, _, _ in results), strict=True):
        assert [len(part["labels"]) for part in parts] == [2, 2]
        both = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        F.cross_entropy(model(pixel_values=both["pixel_values"]).logits, both["labels"]).backward()
        optimizer.step()
        optimizer.zero_grad()
    for _, weights, (replayed, reasons) in results:
        assert (replayed, reasons) == (8, {})
        for name, value in model.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6, msg=name)
    feature(GROUP, "DDP, 2 processes", results[0][2])


EXAMPLE = ROOT / "examples" / "hf_trainer.py"


def assert_told(printed: str) -> None:
    for words in ("effective_ratio=0.40", "steps_replayed=4", "steps_recomputed=0"):
        assert words in printed


def test_the_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--steps", "4"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert_told(capsys.readouterr().out)


@pytest.mark.slow  # DDP is tested above, and importing transformers takes two processes long
def test_the_example_runs_under_torchrun(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [*launch, str(EXAMPLE), "--steps", "4"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=environment, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert_told(done.stdout)
