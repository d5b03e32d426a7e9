"""The Hugging Face `Trainer`: samples are dropped in `training_step`; loss, loop and checkpoints stay the Trainer's."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..blocker.blocker import ForwardBlocker
from ..modules import unwrap
from ..selectors.tools.losses import cross_entropy
from . import _checkpoint as state
from ._fields import Fields
from ._logs import logged
from .accelerate import refuse_unsupported

_Trainer: Any = object  # whichever Trainer comes behind the mixin


class BlockingMixin(_Trainer):
    """Blocks samples in every training step. Put it before the Trainer:

        class MyTrainer(BlockingMixin, Trainer): ...
        trainer = MyTrainer(model, args, train_dataset=data, blocking=dict(at="vit.layers.0", prune_ratio=0.4))

    Args:
        blocking: the arguments of `ForwardBlocker` (at, prune_ratio, selector, schedule, ...), and where in the batch
            things are: `ids` (default: "ids"), and `inputs`, the fields that matter up to the cut (default: those the
            model's `forward` has parameters for, without the labels).

    Attributes:
        blocker: the `ForwardBlocker`. `train()` makes a new one if it creates or compiles the model.
    """

    blocker: ForwardBlocker
    _blocked: Any = None
    _ready: Any = None  # a batch that was prepared and cut

    def __init__(self, *args: Any, blocking: Mapping[str, Any], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refuse_unsupported(self.accelerator, self.model)
        if self.args.n_gpu > 1:
            unwrap(nn.DataParallel(self.model))  # as train() would wrap it: raises
        self._settings = dict(blocking)
        self._fields = Fields(self._settings.pop("ids", None), self._settings.pop("inputs", None))
        self._follow(self.model)

    def _follow(self, model: nn.Module) -> None:
        """Make a blocker for this model. `train()` may create the model (`model_init`) or wrap it in torch.compile."""
        if unwrap(model) == self._blocked:
            return
        if self._blocked is not None:
            self.blocker.remove()
        # A copy of the selector, because what it learns belongs to one model.
        settings = {k: copy.deepcopy(v) if k == "selector" else v for k, v in self._settings.items()}
        self.blocker = ForwardBlocker(model, **settings)
        self._blocked = unwrap(model)
        self._parameters = inspect.signature(self._blocked[0].forward).parameters
        self._epoch: int | None = None

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        self._follow(model)
        if (epoch := int(self.state.epoch or 0)) != self._epoch:
            self.blocker.set_epoch(epoch)
            self._epoch = epoch
        # As the Trainer will do it: the blocker must get the same tensors as the model's call.
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        inputs = self._prepare_inputs(inputs)
        self._ready = retained = self._retain(inputs)
        if num_items_in_batch is not None and self.blocker.last is not None:
            num_items_in_batch = num_items_in_batch * self._items(retained) / self._items(inputs)
        return super().training_step(model, retained, num_items_in_batch)

    def _prepare_inputs(self, inputs: Any) -> Any:
        if inputs is not self._ready:
            return super()._prepare_inputs(inputs)
        self._ready = None  # preparing it twice would copy it if the device is "cpu:0", as under torchrun
        return inputs

    def _retain(self, inputs: Any) -> Any:
        """The batch without the pruned samples, and without the ids, which the model does not take."""
        ids, to_model, selector = self._fields.ids or "ids", self._fields.inputs, self.blocker.selector
        if ids not in inputs and (self._fields.ids is not None or selector.wants_ids == "required"):
            raise ValueError(
                f"the batch has no ids {ids!r} for the selector {selector.name!r}: train_dataset=halfway.WithIds(...) "
                "adds them, and TrainingArguments(remove_unused_columns=False) keeps the Trainer from removing them"
            )
        if to_model is None:
            to_model = [name for name in inputs if name in self._parameters and name not in self.label_names]
        retained = Fields(self._fields.ids, to_model).retain(self.blocker, inputs)
        retained.pop(ids, None)
        return retained

    def _items(self, batch: Any) -> Tensor:
        """How many labels the loss is a mean of, counted as the Trainer does; at least 1, to divide by."""
        first = int(getattr(self, "_loss_shifts_labels", False))  # in language models position 0 is never predicted
        labels = batch["shift_labels"] if "shift_labels" in batch else batch["labels"][..., first:]
        return labels.ne(-100).sum().clamp(min=1)

    def per_sample_losses(self, outputs: Any, inputs: Mapping[str, Any]) -> Tensor:
        """(S,) losses of the retained samples. Override it if they are not a cross-entropy of logits and labels."""
        try:
            return cross_entropy(outputs, inputs["labels"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"override per_sample_losses(outputs, inputs): the cross-entropy cannot be computed ({error})"
            ) from error

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        if not model.training or self.blocker.selector.wants_losses == "no":
            return super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)
        given = dict(inputs)  # the Trainer may remove the labels
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        with torch.no_grad():
            self.blocker.observe(self.per_sample_losses(outputs, given))
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            logs.update(logged(self.blocker))
        super().log(logs, *args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        # This hook is not called for save_only_model, and runs before older checkpoints are deleted.
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            state.save(self.blocker, output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._follow(self.model_wrapped)
            state.load(self.blocker, checkpoint)
            self._epoch = None
