"""Around a training of the Hugging Face Trainer: evaluation, logs, epochs, a second training, checkpoints, resuming."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import halfway
from halfway import ForwardBlocker, Schedule
from halfway.selectors import Balanced, BalancedRemembered

pytest.importorskip("transformers")

from transformers import (
    Trainer,
    TrainerCallback,
)

from tests.helpers.hugging_face import (
    GROUP,
    Blocked,
    Recording,
    Samples,
    assert_as_by_hand,
    assert_equal,
    bert,
    trained,
    trainer,
    vit,
)

# ------------------------------------------------------------------------------------------- around the training


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


# ----------------------------------------------------------------------------------------------- stop and resume


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
