"""Evidence from a model: what it says about every sample of the data set, in eval mode.

Each function goes once (or twice) through `batches`, an iterable of (inputs, labels, ids) such as a `DataLoader` of
`halfway.WithIds(dataset)`: un-augmented, all samples, each once. Labels are plain classes.

Shape suffixes: N samples of the data set, B of a batch, C classes, D features.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .evidence import Checkpoint, ShortRun
from .gradients import add_gradient, alignments, gradient_norms, parameters_of
from .outputs import errors

Batches = Iterable[tuple[Tensor, Tensor, Tensor]]


class Outputs(NamedTuple):
    logits_NC: Tensor
    features_ND: Tensor


def outputs(model: nn.Module, batches: Batches, num_samples: int, layer: nn.Module | None = None) -> Outputs:
    """Logits, and the input of the last linear layer.

    Args:
        layer: the classifier; None: the last `nn.Linear` in the order of registration.
    """
    logits, features = _Table("logits", num_samples), _Table("features", num_samples)
    with _evaluated(model), _watched(model, layer) as seen, torch.no_grad():
        for inputs, _labels_B, ids in _on_device(model, batches):
            found_BC = model(inputs)
            logits.put(ids, found_BC)
            features.put(ids, _taken(seen, found_BC))
    return Outputs(logits.whole(), features.whole())


def short_run(
    model: nn.Module,
    batches: Batches,
    num_samples: int,
    layer: nn.Module | None = None,
    gradients: bool = False,
    chunk: int | None = None,
) -> ShortRun:
    """What EL2N, GraNd and `grand_last` need of one short training.

    Args:
        layer: as for `outputs`.
        gradients: also the norm of each sample's gradient for all parameters, for GraNd. Costs about a forward and
            backward pass of each sample by itself.
        chunk: samples that are differentiated at once; None: 64, or as many as fit into half a gibibyte.
    """
    error_norms, feature_norms = _Table("errors", num_samples), _Table("features", num_samples)
    norms = _Table("gradients", num_samples)
    with _evaluated(model), _watched(model, layer) as seen:
        for inputs, labels_B, ids in _on_device(model, batches):
            with torch.no_grad():
                found_BC = model(inputs)
                error_norms.put(ids, errors(found_BC, labels_B).norm(dim=1))
                feature_norms.put(ids, _taken(seen, found_BC).norm(dim=1))
            if gradients:
                norms.put(ids, gradient_norms(model, inputs, labels_B, chunk))
                seen.clear()
    return ShortRun(error_norms.whole(), feature_norms.whole(), norms.whole() if gradients else None)


def checkpoint(
    model: nn.Module, batches: Batches, num_samples: int, lr: float, own_share: bool = True, chunk: int | None = None
) -> Checkpoint:
    """What MoSo needs of one checkpoint. Goes twice through `batches`.

    Args:
        lr: the learning rate at that moment.
        own_share: also the norm of each sample's gradient, to take its own share out of the mean gradient. Costs as
            much as GraNd; without it there is one `jvp` per batch, and the score is off by lr |g_i|^2 / N.
        chunk: as for `short_run`.
    """
    aligned, squares = _Table("alignments", num_samples), _Table("gradients", num_samples)
    with _evaluated(model):
        mean = {name: torch.zeros_like(p) for name, p in parameters_of(model).items()}
        for inputs, labels_B, _ids in _on_device(model, batches):
            add_gradient(mean, model, inputs, labels_B)
        for gradient in mean.values():
            gradient /= num_samples
        for inputs, labels_B, ids in _on_device(model, batches):
            aligned.put(ids, alignments(model, inputs, labels_B, mean))
            if own_share:
                squares.put(ids, gradient_norms(model, inputs, labels_B, chunk).square())
    return Checkpoint(lr, aligned.whole(), squares.whole() if own_share else None)


class _Table:
    """Rows of the data set, filled batch by batch, on the CPU. It is made with the first batch, which has the width."""

    def __init__(self, what: str, num_samples: int) -> None:
        self._what = what
        self._seen_N = torch.zeros(num_samples, dtype=torch.bool)
        self._rows: Tensor | None = None

    def put(self, ids: Tensor, rows: Tensor) -> None:
        rows, ids = rows.detach().cpu(), ids.to("cpu", torch.int64)
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(self._seen_N):
            raise ValueError(
                f"the batches have the id {int(ids.max())}, num_samples is {len(self._seen_N)}; ids are positions in "
                "the data set (`halfway.WithIds` yields them)"
            )
        if self._rows is None:
            kind = torch.promote_types(rows.dtype, torch.float32)
            self._rows = torch.zeros(len(self._seen_N), *rows.shape[1:], dtype=kind)
        self._rows.index_copy_(0, ids, rows.to(self._rows.dtype))
        self._seen_N[ids] = True

    def whole(self) -> Tensor:
        missing = int((~self._seen_N).sum())
        if missing or self._rows is None:
            raise ValueError(
                f"the batches had no {self._what} for {missing} of {len(self._seen_N)} samples; go through the whole "
                "data set, without drop_last, and with a loader that can be gone through again"
            )
        finite_N = self._rows.reshape(len(self._seen_N), -1).sum(1).isfinite()
        if not finite_N.all():
            raise ValueError(
                f"the {self._what} of {int((~finite_N).sum())} of {len(finite_N)} samples are not finite: the model "
                "has diverged; train it again with a lower learning rate (and in another folder)"
            )
        return self._rows


@contextlib.contextmanager
def _evaluated(model: nn.Module) -> Iterator[None]:
    """Eval mode for all modules; afterwards each is in the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextlib.contextmanager
def _watched(model: nn.Module, layer: nn.Module | None) -> Iterator[list[tuple[Tensor, int | None]]]:
    """A list that receives the input of the classifier at each call, and the width of its output if it is a guess."""
    seen: list[tuple[Tensor, int | None]] = []
    found = layer or next((m for m in reversed(list(model.modules())) if isinstance(m, nn.Linear)), None)
    if found is None:
        raise ValueError(
            f"this {type(model).__name__} has no linear layer; pass the layer whose input are the features: layer=..."
        )

    def note(_module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        seen.append((args[0].flatten(1), out.shape[-1] if layer is None else None))

    handle = found.register_forward_hook(note)
    try:
        yield seen
    finally:
        handle.remove()


def _taken(seen: list[tuple[Tensor, int | None]], logits_BC: Tensor) -> Tensor:
    """What the last call showed."""
    if not seen or seen[-1][1] not in (None, logits_BC.shape[-1]):
        what = f"gives {seen[-1][1]} values, not {logits_BC.shape[-1]} logits" if seen else "was not called"
        raise ValueError(f"the model's last linear layer {what}; pass its classifier: layer=...")
    features = seen[-1][0]
    seen.clear()
    return features


def _on_device(model: nn.Module, batches: Batches) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    device = next(model.parameters()).device
    for inputs, labels_B, ids in batches:
        yield inputs.to(device, non_blocking=True), labels_B.to(device, torch.int64, non_blocking=True), ids
