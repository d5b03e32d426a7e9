"""A copy of a model that is trained in its place: batches, losses, one step.

Shapes: B samples of a batch.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from ..batches.batch import leaves
from ..selectors.tools.losses import LossFunction, cross_entropy, has_label

# The model's input, and the targets.
Batch = tuple[Any, Any]
MakeOptimizer = Callable[[Iterator[nn.Parameter]], Optimizer]

_DEFAULT_RATE = 1e-3
_WARM_UP = 0.1


@dataclass(frozen=True)
class Setup:
    """What is trained, and how. Nothing in here is ever changed: a `Learner` works on copies. (A loss function that is
    no module is called as it is; what it computes from the model's own weights stays as these are.)

    model: without wrappers.
    optimizer: of its parameters, or a function that makes one; None: AdamW.
    loss_fn: (outputs, targets) -> a scalar or one loss per sample.
    device: of the parameters.
    autocast: None: no mixed precision.
    clip_norm: None: gradients are not clipped.
    """

    model: nn.Module
    optimizer: Optimizer | MakeOptimizer | None
    loss_fn: LossFunction
    device: torch.device
    autocast: torch.dtype | None = None
    clip_norm: float | None = None

    def learner(self) -> Learner:
        """A new copy, ready to be trained from the weights that the model has now."""
        model, optimizer, loss_fn = self._copies()
        if not model.training:  # parts that are frozen in a model that trains stay as they are
            model.train()
        return Learner(self, model, optimizer, loss_fn)

    def _copies(self) -> tuple[nn.Module, Optimizer, LossFunction]:
        """Copied together, so that the one holds the parameters of the other."""
        given, loss_fn, memo = self.optimizer, self.loss_fn, {}  # type: ignore[var-annotated]
        with _copying(self.model, "pass a newly built model, before anything was computed with it"):
            model = copy.deepcopy(self.model, memo)
        with _copying(loss_fn, "pass a loss_fn that is a function"):
            loss_fn = copy.deepcopy(loss_fn, memo) if isinstance(loss_fn, nn.Module) else loss_fn
        with _copying(given, "pass a function of the parameters that makes the optimizer"):
            optimizer = _copied(given, memo) if isinstance(given, Optimizer) else None
        if optimizer is None:
            make = functools.partial(torch.optim.AdamW, lr=_DEFAULT_RATE) if given is None else given
            optimizer = make(model.parameters())  # type: ignore[operator]
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"the optimizer function must return a torch.optim.Optimizer, got {_described(optimizer)}")
        check_optimizer(optimizer)
        return model, optimizer, loss_fn


class Learner:
    """A model and an optimizer of its own, and a loss function, if that has parameters or buffers."""

    def __init__(self, setup: Setup, model: nn.Module, optimizer: Optimizer, loss_fn: LossFunction) -> None:
        self.model, self.optimizer, self.loss_fn = model, optimizer, loss_fn
        self._setup = setup
        self._peaks = [peak_rate(group) or 0.0 for group in optimizer.param_groups]
        half = setup.autocast == torch.float16
        self._scaler = torch.amp.GradScaler(setup.device.type, enabled=half)

    def step(self, batch: Batch, factor: float, block: Callable[..., Any] | None = None) -> Tensor:
        """One training step; returns the plain losses (B,), detached, on the device; NaN of samples without a label.

        Args:
            factor: of the optimizer's learning rate.
            block: a blocker of this model, see `halfway.ForwardBlocker`.
        """
        for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
            _set_rate(group, factor * peak)
        x, y = batch
        with self.mixed_precision():
            if block is not None:
                x, y = block(x, y)
            outputs = called(self.model, x)
            try:
                loss, plain_B = losses(outputs, y, self.loss_fn)
            except IndexError as error:
                raise ValueError(
                    f"a target is no class of the model ({error}): give it one output for each, or mend the labels"
                ) from error
        self._scaler.scale(loss).backward()
        if self._setup.clip_norm is not None:
            self._scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self._setup.clip_norm)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return plain_B

    def mixed_precision(self) -> contextlib.AbstractContextManager[Any]:
        """That of the training."""
        if self._setup.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self._setup.device.type, self._setup.autocast)


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise unless a trial can step it, and set its learning rate."""
    kind = type(optimizer).__name__
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{kind} computes the loss several times per step (step(closure)), which a trial cannot do, and a blocker "
            "replays once; try it with another optimizer, such as torch.optim.AdamW"
        )
    if any(peak_rate(group) is None for group in optimizer.param_groups):
        raise ValueError(f"this {kind} has no learning rate, which a trial raises and lowers; give it one (lr=...)")


@contextlib.contextmanager
def _copying(what: Any, fix: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise ValueError(
            f"the trial needs a copy of this {type(what).__name__}, which cannot be copied "
            f"({str(error).splitlines()[0]}); {fix}"
        ) from error


def _copied(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """With what a subclass has set on itself, which PyTorch's own copy leaves out. Not with the step of the old one,
    which a scheduler has put there."""
    new = copy.deepcopy(optimizer, memo)
    for name, value in vars(optimizer).items():
        if name not in vars(new) and name != "step":
            setattr(new, name, copy.deepcopy(value, memo))
    return new


# ------------------------------------------------------------------ learning rate


def factor_at(done: float) -> float:
    """The learning rate as a factor of its peak: a linear rise, then half a cosine down to 0 at done = 1."""
    if done < _WARM_UP:
        return max(done, _WARM_UP / 10) / _WARM_UP
    return (1 + math.cos(math.pi * min(1.0, (done - _WARM_UP) / (1 - _WARM_UP)))) / 2


def peak_rate(group: Mapping[str, Any]) -> float | None:
    """Of a group of parameters: a scheduler may begin far below it, and notes where it goes. None if there is none."""
    known = [float(group[key]) for key in ("lr", "initial_lr", "max_lr") if group.get(key) is not None]
    return max(known) if group.get("lr") is not None else None


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


# ------------------------------------------------------------------------ losses


def losses(outputs: Any, y: Any, loss_fn: LossFunction) -> tuple[Tensor, Tensor]:
    """The loss to train with, a scalar; and the plain losses (B,), detached.

    Plain losses are the cross-entropy without smoothing where targets are classes (NaN of a sample without a label),
    elsewhere what `loss_fn` returns.
    """
    if loss_fn is F.cross_entropy:
        if not is_classes(y):
            raise ValueError(
                f"the targets are no classes but {_described(y)}; pass loss_fn=, a function of (outputs, targets) that "
                "returns one loss per sample (reduction='none')"
            )
        losses_B, labelled_B = cross_entropy(outputs, y), has_label(outputs, y)
        return losses_B.sum() / labelled_B.sum().clamp(min=1), _labelled(losses_B, labelled_B)
    given = loss_fn(outputs, y)
    if not isinstance(given, Tensor) or given.ndim > 1:
        raise ValueError(f"loss_fn must return a scalar or one loss per sample, shape (B,), got {_described(given)}")
    plain_B = plain(outputs, y) if is_classes(y) else None
    if plain_B is None:
        if given.ndim == 0:
            raise ValueError(
                f"loss_fn returns one number for the whole batch, and the targets are no classes but {_described(y)}: "
                "let it return one loss per sample (reduction='none')"
            )
        plain_B = _diverging(given.detach())
    return given.mean(), plain_B


def is_classes(y: Any) -> bool:
    """Whether targets are classes: whole numbers, one per sample or pixel."""
    return isinstance(y, Tensor) and y.ndim > 0 and not y.is_floating_point() and not y.is_complex()


def plain(outputs: Any, y: Tensor) -> Tensor | None:
    """The cross-entropy; None if the outputs are no logits of classes (a single logit for two classes, say)."""
    try:
        with torch.no_grad():
            return _labelled(cross_entropy(outputs, y), has_label(outputs, y))
    except (TypeError, ValueError):
        return None


def _labelled(losses_B: Tensor, labelled_B: Tensor) -> Tensor:
    """Detached; NaN where a sample has no label, and so a loss of 0 that says nothing."""
    return _diverging(losses_B.detach()).masked_fill(~labelled_B, math.nan)


def _diverging(losses_B: Tensor) -> Tensor:
    """With infinity for what is no number, so that NaN is free to mean something else."""
    return losses_B.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)


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
