"""A copy of a model that is trained in its place: batches, losses, one step.

Shapes: B samples of a batch.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from ..batches.batch import leaves
from ..selectors.tools.losses import cross_entropy

# The model's input, and the targets.
Batch = tuple[Any, Any]
MakeOptimizer = Callable[[Iterator[nn.Parameter]], Optimizer]

_DEFAULT_RATE = 1e-3
_WARM_UP = 0.1


@dataclass(frozen=True)
class Setup:
    """What is trained, and how. Nothing in here is ever changed: a `Learner` works on copies.

    model: without wrappers.
    optimizer: of its parameters, or a function that makes one; None: AdamW.
    loss_fn: (outputs, targets) -> a scalar or one loss per sample.
    device: of the parameters.
    autocast: None: no mixed precision.
    clip_norm: None: gradients are not clipped.
    """

    model: nn.Module
    optimizer: Optimizer | MakeOptimizer | None
    loss_fn: Callable[[Any, Any], Tensor]
    device: torch.device
    autocast: torch.dtype | None = None
    clip_norm: float | None = None

    def learner(self) -> Learner:
        """A new copy, ready to be trained from the weights that the model has now."""
        model, optimizer = self._copies()
        if not model.training:  # parts that are frozen in a model that trains stay as they are
            model.train()
        return Learner(self, model, optimizer)

    def _copies(self) -> tuple[nn.Module, Optimizer]:
        given = self.optimizer
        try:
            if isinstance(given, Optimizer):
                # Copied together, so that the one holds the parameters of the other.
                return copy.deepcopy((self.model, given))
            model = copy.deepcopy(self.model)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            raise ValueError(
                f"the trial needs a copy of this {type(self.model).__name__}, which cannot be copied "
                f"({str(error).splitlines()[0]}); pass a newly built model, before anything was computed with it"
            ) from error
        if given is None:
            return model, torch.optim.AdamW(model.parameters(), lr=_DEFAULT_RATE)
        made = given(model.parameters())
        if not isinstance(made, Optimizer):
            raise TypeError(f"the optimizer function must return a torch.optim.Optimizer, got {_described(made)}")
        return model, made


class Learner:
    """A model and an optimizer of its own."""

    def __init__(self, setup: Setup, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self._setup = setup
        self._peaks = [peak_rate(group) for group in optimizer.param_groups]
        half = setup.autocast == torch.float16
        self._scaler = torch.amp.GradScaler(setup.device.type, enabled=half)

    def step(self, batch: Batch, factor: float, block: Callable[..., Any] | None = None) -> Tensor:
        """One training step; returns the plain losses (B,), detached, on the device.

        Args:
            factor: of the optimizer's learning rate.
            block: a blocker of this model, see `halfway.ForwardBlocker`.
        """
        for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
            _set_rate(group, factor * peak)
        x, y = batch
        with self._mixed_precision():
            if block is not None:
                x, y = block(x, y)
            outputs = called(self.model, x)
            loss, plain_B = losses(outputs, y, self._setup.loss_fn)
        self._scaler.scale(loss).backward()
        if self._setup.clip_norm is not None:
            self._scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self._setup.clip_norm)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return plain_B

    def _mixed_precision(self) -> contextlib.AbstractContextManager[Any]:
        if self._setup.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self._setup.device.type, self._setup.autocast)


# ------------------------------------------------------------------ learning rate


def factor_at(done: float) -> float:
    """The learning rate as a factor of its peak: a linear rise, then half a cosine down to 0 at done = 1."""
    if done < _WARM_UP:
        return max(done, _WARM_UP / 10) / _WARM_UP
    return (1 + math.cos(math.pi * min(1.0, (done - _WARM_UP) / (1 - _WARM_UP)))) / 2


def peak_rate(group: Mapping[str, Any]) -> float:
    """Of a group of parameters: a scheduler may begin far below it, and notes where it goes."""
    return max(float(group[key]) for key in ("lr", "initial_lr", "max_lr") if group.get(key) is not None)


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


# ------------------------------------------------------------------------ losses


def losses(outputs: Any, y: Any, loss_fn: Callable[[Any, Any], Tensor]) -> tuple[Tensor, Tensor]:
    """The loss to train with, a scalar; and the plain losses (B,), detached.

    Plain losses are the cross-entropy without smoothing where targets are classes, elsewhere what `loss_fn` returns.
    """
    if loss_fn is F.cross_entropy:
        if not is_classes(y):
            raise ValueError(
                f"the targets are no classes but {_described(y)}; pass loss_fn=, a function of (outputs, targets) that "
                "returns one loss per sample (reduction='none')"
            )
        losses_B = cross_entropy(outputs, y)
        return losses_B.mean(), losses_B.detach()
    given = loss_fn(outputs, y)
    if not isinstance(given, Tensor) or given.ndim > 1:
        raise ValueError(f"loss_fn must return a scalar or one loss per sample, shape (B,), got {_described(given)}")
    plain_B = _plain(outputs, y) if is_classes(y) else None
    if plain_B is None:
        if given.ndim == 0:
            raise ValueError(
                f"loss_fn returns one number for the whole batch, and the targets are no classes but {_described(y)}: "
                "let it return one loss per sample (reduction='none')"
            )
        plain_B = given.detach()
    return given.mean(), plain_B


def is_classes(y: Any) -> bool:
    """Whether targets are classes: whole numbers, one per sample or pixel."""
    return isinstance(y, Tensor) and y.ndim > 0 and not y.is_floating_point() and not y.is_complex()


def _plain(outputs: Any, y: Tensor) -> Tensor | None:
    """The cross-entropy; None if the outputs are no logits of classes (a single logit for two classes, say)."""
    try:
        with torch.no_grad():
            return cross_entropy(outputs, y)
    except (TypeError, ValueError):
        return None


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


# ----------------------------------------------------------------------- batches


def called(model: nn.Module, x: Any) -> Any:
    """The model on its input: a mapping holds named arguments, a tuple or list positional ones."""
    if isinstance(x, Mapping):
        return model(**x)
    return model(*x) if isinstance(x, (tuple, list)) else model(x)


def pair(batch: Any, device: torch.device) -> Batch:
    """(input, targets) of what a loader yields, on the device. Anything behind them, such as ids, is left out."""
    if isinstance(batch, (tuple, list)) and len(batch) >= 2:
        return moved(batch[0], device), moved(batch[1], device)
    raise TypeError(
        f"the loader yields {_described(batch)}, where pairs (input, targets) are needed; pass a loader with a "
        "collate_fn that makes them, the input as a tensor or as a dict of the model's named arguments"
    )


def moved(tree: Any, device: torch.device) -> Any:
    """Any nesting of tensors, on the device."""
    if isinstance(tree, Tensor):
        return tree.to(device, non_blocking=True)
    if isinstance(tree, Mapping):
        return {key: moved(value, device) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        return tuple(moved(value, device) for value in tree)
    return tree


def bytes_of(batch: Batch) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(batch) if isinstance(leaf, Tensor))
