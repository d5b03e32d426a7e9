"""BatchNorm's running statistics, estimated anew for an evaluation.

In training they are moving averages over the samples that were trained on. A method that prefers hard samples, or
smaller batches, moves them, and then a score says something about them instead of the weights. Estimated on random
training images, they mean the same for every method.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@contextlib.contextmanager
def estimated(model: nn.Module, batches: Iterable[Tensor]) -> Iterator[None]:
    """The model has the statistics of these batches meanwhile: the mean over them, each counted equally. What it had
    before comes back, so that an evaluation leaves no trace in the training."""
    layers = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    if not layers:
        yield
        return
    before = [_state(layer) for layer in layers]
    was_training = model.training
    try:
        model.eval()  # everything else as in an evaluation: dropout is off
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # a plain average
            layer.train()
        with torch.no_grad():
            for x in batches:
                model(x)
        model.eval()
        yield
    finally:
        for layer, (buffers, momentum) in zip(layers, before, strict=True):
            for name, value in buffers.items():
                layer.get_buffer(name).copy_(value)
            layer.momentum = momentum
        model.train(was_training)


def _state(layer: _BatchNorm) -> tuple[dict[str, Tensor], Any]:
    return {name: value.clone() for name, value in layer.named_buffers()}, layer.momentum
