"""`advise`: try a training for a few minutes, and say what pruning would save and cost there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from ..batches import batch as batches
from ..costs.layers import Layers, layers
from ..functional import retained_count
from ..loading.pruned_batches import PrunedBatchSampler
from ..modules import find_layer, unwrap
from ..samplers.base import EpochSampler
from ..settings import number, share
from . import classes, paste, words
from . import evidence as known
from .evidence import Evidence
from .learner import Batch, Learner, MakeOptimizer, Setup, called, check_optimizer, is_classes, losses, plain
from .recommend import Costs, Recommendation, Regime, recommend
from .timing import CUT, RANDOM, relative_times
from .trial import Clock, Stream, Trial, fewer_images, fewer_passes
from .untouched import gradients_kept, untouched

# Up to this F/T a cut is usual.
USUAL_SHARE = 0.1
_TIMING_SHARE = 0.1

# Called with what is going on, and the share of it that is done.
Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Advice:
    """What a few minutes of a training say about pruning it. `print` it.

    fewer_passes, fewer_images: the two short trainings, see `Trial`.
    regime: what they say about the end of the planned one: `regime.low`, `regime.high`, `regime.word`.
    costs: of a step, in wall time: `costs.random_time`, `costs.cut_time`, `costs.waiting`.
    cuts: every sensible cut with its cost in FLOPs, see `halfway.layers`.
    at: the cut that was timed; None: the model has none.
    epochs: of the planned training.
    steps: of the planned training; None if the loader has no length and did not end.
    recommendation: `recommendation.kind` is "no evidence", "fewer epochs", "random" or "method".
    lines: to paste.
    notes: what else is worth knowing.
    about: where the evidence comes from.
    """

    fewer_passes: Trial
    fewer_images: Trial
    regime: Regime
    costs: Costs
    cuts: Layers
    at: str | None
    epochs: float
    steps: int | None
    recommendation: Recommendation
    lines: str
    notes: tuple[str, ...] = ()
    about: str = ""

    @property
    def seconds(self) -> float | None:
        """Of the planned training on full data, on this machine."""
        return None if self.steps is None else self.steps * self.fewer_passes.seconds_per_step

    @property
    def saved(self) -> float | None:
        """Seconds that the recommendation saves over the planned training."""
        time = self.recommendation.time
        return None if time is None or self.seconds is None else (1 - time) * self.seconds

    def __str__(self) -> str:
        return words.text(self)


def advise(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    epochs: float,
    loss_fn: Callable[[Any, Any], Tensor] = F.cross_entropy,
    optimizer: Optimizer | MakeOptimizer | None = None,
    at: str | nn.Module | None = None,
    prune_ratio: float = 0.5,
    seconds: float = 120.0,
    autocast: torch.dtype | None = None,
    clip_norm: float | None = None,
    progress: Progress | None = None,
    evidence: Evidence | None = None,
) -> Advice:
    """Would pruning pay in this training? `print(halfway.advise(model, loader, epochs=90, optimizer=optimizer))`

    Copies of the model are trained for a few minutes, in two ways that bound where the planned training will end. Then
    steps are timed, and what was measured is looked up in the evidence that comes with halfway, all of it at a reduced
    scale.

    The model, the optimizer and a loss that is a module are left as they were. So are the global random generators, the
    generators of torch, NumPy and Python that are attributes of the loader, of its samplers and of its data set, and
    whatever these save in a `state_dict`. Anything else that a data set or a sampler counts by itself cannot be put
    back, and a data set that can be read only once is used up: build a new loader after that.

    Args:
        model: as it is before the planned training, on the device of that training.
        loader: of the training data; anything that can be iterated again and again over pairs (input, targets).
        epochs: of the planned training.
        loss_fn: what the training minimises: (outputs, targets) -> a scalar, or one loss per sample. Where targets are
            no classes it must be one per sample. A module is copied, like the model; a function is called as it is, so
            that modules inside it keep the gradients and counts of the trial.
        optimizer: as it is before the planned training, or a function of the parameters that makes one; None: AdamW
            with a learning rate of 0.001. Its learning rate is taken as the peak.
        at: the cut to time; None: the deepest one with F/T up to 0.1.
        prune_ratio: the share of each batch to prune.
        seconds: for the two trainings together; timing takes about a tenth more.
        autocast: of the forward pass, such as torch.bfloat16; None: no mixed precision.
        clip_norm: of the gradients; None: they are not clipped.
        progress: called with what is going on and the share of it that is done.
        evidence: None: what comes with halfway.
    """
    _check(model, loader, epochs, prune_ratio, seconds)
    _check_step(loss_fn, autocast, clip_norm)
    root, compiled = unwrap(model)
    setup = Setup(root, optimizer, loss_fn, _device(root), autocast, clip_norm)
    _check_optimizer(root, optimizer)
    name = None if at is None else find_layer(root, at)[0]
    say: Progress = progress or (lambda what, done: None)
    clock = Clock(setup.device)
    with untouched(loader, setup.device), gradients_kept(root):
        stream = Stream(loader, setup.device, clock)
        first, learner = next(stream), setup.learner()
        outputs = _check_batch(learner, first, prune_ratio)
        if not _are_classes(outputs, first[1]):
            stream.classes.ignore()
        with learner.mixed_precision():
            cuts = layers(learner.model, *_two_samples(first[0]))
        cut = name or _usual(cuts)
        few = fewer_passes(setup, stream, epochs, seconds / 2, clock, _said(say, "fewer passes"))
        many, cached = fewer_images(setup, stream, epochs, seconds / 2, clock, _said(say, "fewer images"))
        times, problem = relative_times(
            setup, cached, prune_ratio, cut, _TIMING_SHARE * seconds, clock, _said(say, "timing steps")
        )
    regime = Regime(min(few.small, many.small), max(few.small, many.small))
    costs = Costs(prune_ratio, times[RANDOM], times.get(CUT), few.waiting, stream.has_ids)
    basis = known.read() if evidence is None else evidence
    found = recommend(regime, costs, basis, classes=stream.classes.any)
    notes = [f"The cut {cut} cannot be used: {problem}."] if problem else []
    notes += ["Steps were timed without torch.compile."] if compiled else []
    notes += ["No optimizer was given: AdamW with a learning rate of 0.001."] if optimizer is None else []
    notes += classes.note_on(stream.classes, basis)
    notes += words.on_losses(_smoothing(loss_fn), is_classes(first[1]) and not stream.classes.ignored)
    return Advice(
        few,
        many,
        regime,
        costs,
        cuts,
        cut,
        epochs,
        None if stream.per_epoch is None else round(epochs * stream.per_epoch),
        found,
        paste.lines(found, costs, cut, epochs),
        (*notes, *words.on_auto(found, costs, stream.classes.any), *words.warnings(found, basis)),
        basis.about,
    )


def _smoothing(loss_fn: Any) -> float:
    """Of a module, such as nn.CrossEntropyLoss, or of functools.partial."""
    given = getattr(loss_fn, "label_smoothing", None) or getattr(loss_fn, "keywords", {}).get("label_smoothing")
    return given if isinstance(given, (int, float)) else 0.0


def _said(progress: Progress, what: str) -> Callable[[float], None]:
    return lambda done: progress(what, done)


def _usual(cuts: Layers) -> str | None:
    """The deepest usual cut, or the shallowest there is."""
    usual = [cut.name for cut in cuts if cut.shallow_share <= USUAL_SHARE]
    return usual[-1] if usual else cuts[0].name if cuts else None


def _two_samples(x: Any) -> tuple[Any, ...]:
    def cut(tree: Any) -> Any:
        if isinstance(tree, Tensor):
            return tree[:2]
        if isinstance(tree, Mapping):
            return {key: cut(value) for key, value in tree.items()}
        return tuple(map(cut, tree)) if isinstance(tree, tuple) else tree

    return cut(x) if isinstance(x, tuple) else (cut(x),)


# ------------------------------------------------------------------------ checks


def _check(model: Any, loader: Any, epochs: Any, prune_ratio: Any, seconds: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got a {type(model).__name__}: advise(model, loader, ...)")
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        # By its own clock each would take another number of steps, and wait for the others in vain.
        raise ValueError("advise tries a training in one process; call it in a script of its own, without torchrun")
    if not 1 <= number("epochs", epochs) < math.inf:
        raise ValueError(f"epochs is the length of the planned training, at least 1, got {epochs!r}")
    if not share("prune_ratio", prune_ratio):
        raise ValueError("a prune_ratio of 0 prunes nothing; take one such as 0.5")
    if not 0 < number("seconds", seconds) < math.inf:
        raise ValueError(f"seconds is the time for the two trainings, more than 0, got {seconds!r}")
    if isinstance(loader, Iterator):
        raise TypeError(
            f"the loader is a {type(loader).__name__}, which can be read only once; pass the DataLoader itself"
        )
    if isinstance(loader, Mapping) or not isinstance(loader, Iterable):
        raise TypeError(f"the loader must yield pairs (input, targets), as a DataLoader does; got a {type(loader)}")
    for part in (getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)):
        if isinstance(part, (PrunedBatchSampler, EpochSampler)):
            raise ValueError(
                f"the loader prunes already ({type(part).__name__}), and advice is about training on all data: pass a "
                "loader without it"
            )


def _check_step(loss_fn: Any, autocast: Any, clip_norm: Any) -> None:
    if not callable(loss_fn):
        raise TypeError(f"loss_fn is a function of (outputs, targets), got {loss_fn!r}; leave it out for cross-entropy")
    if autocast is not None and not isinstance(autocast, torch.dtype):
        raise TypeError(f"autocast must be a torch.dtype such as torch.bfloat16, got {autocast!r}")
    if clip_norm is not None and not number("clip_norm", clip_norm) > 0:
        raise ValueError(f"clip_norm must be more than 0, got {clip_norm!r}; None: gradients are not clipped")
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        raise RuntimeError("advise trains copies of the model; call it outside of torch.no_grad() and inference_mode()")


def _device(root: nn.Module) -> torch.device:
    parameters = [p for p in root.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError(
            f"this {type(root).__name__} has no parameters that need a gradient, so there is nothing to train; pass "
            "the model of the training, with requires_grad"
        )
    if parameters[0].device.type == "meta":
        raise ValueError("the model is on the meta device, where nothing can be trained; move it to the training's")
    return parameters[0].device


def _check_optimizer(root: nn.Module, optimizer: Any) -> None:
    if optimizer is None:
        return
    if not isinstance(optimizer, Optimizer):
        if not callable(optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer or a function that makes one, got {optimizer}")
        return
    own = {id(p) for p in root.parameters()}
    if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        raise ValueError("the optimizer has none of the model's parameters; make it from model.parameters()")
    check_optimizer(optimizer)


def _check_batch(learner: Learner, batch: Batch, prune_ratio: float) -> Any:
    """Raise unless there is something to prune, inputs that are numbers, and a loss to look at. Returns the outputs."""
    size = batches.length(batch[0])
    if retained_count(size, prune_ratio) == size:
        raise ValueError(
            f"a prune_ratio of {prune_ratio} prunes none of the {size} samples of a batch; take a larger ratio, or "
            "larger batches"
        )
    for leaf in batches.leaves(batch[0]):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and not leaf.isfinite().all():
            raise ValueError("the inputs of the first batch hold NaN or inf; mend the data set or its transforms")
    with torch.no_grad(), learner.mixed_precision():
        outputs = called(learner.model, batch[0])
        _check_classes(outputs, batch[1])
        losses(outputs, batch[1], learner.loss_fn)
    return outputs


def _are_classes(outputs: Any, y: Any) -> bool:
    """Whether whole numbers are classes, by the outputs for them; numbers to regress on may be whole too."""
    if not is_classes(y) or plain(outputs, y) is not None:
        return True
    return bool(((y == 0) | (y == 1)).all())  # of two, with a single logit


def _check_classes(outputs: Any, y: Any) -> None:
    """Raise where a class has no output; a single output may stand for two classes."""
    if not isinstance(outputs, Tensor) or outputs.ndim != 2 or not is_classes(y) or y.ndim != 1:
        return
    count, largest = outputs.shape[1], int(y.max())
    if 1 < count <= largest:
        raise ValueError(f"the model has {count} outputs, but a target is class {largest}; give it one for each class")
