"""Gradients of single samples for all parameters of a model, through `torch.func`.

The model runs as it is; put it into eval mode first: in training mode BatchNorm mixes the samples of a batch, and no
sample has a gradient of its own.

Shape suffixes: B samples.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

Parameters = dict[str, Tensor]
# Numbers in the gradients of the samples that are differentiated at once: half a gibibyte in float32. More than 64
# samples are slower on a CPU: their gradients leave the cache before they are squared.
_AT_ONCE = 2**27
_SAMPLES_AT_ONCE = 64


def parameters_of(model: nn.Module) -> Parameters:
    """The parameters that are trained, detached."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def gradient_norms(model: nn.Module, inputs: Tensor, labels_B: Tensor, chunk: int | None = None) -> Tensor:
    """(B,) the norm of the gradient of each sample's cross-entropy for all parameters.

    Args:
        chunk: samples whose gradients are held at once; None: 64, or as many as take half a gibibyte.
    """
    parameters = parameters_of(model)

    def norm_of(one: Tensor, label: Tensor) -> Tensor:
        gradients = grad(_loss)(parameters, model, one.unsqueeze(0), label.unsqueeze(0))
        return sum_of_squares(gradients).sqrt()

    fit = max(1, _AT_ONCE // max(1, sum(p.numel() for p in parameters.values())))
    return vmap(norm_of, chunk_size=chunk or min(_SAMPLES_AT_ONCE, fit))(inputs, labels_B).detach()


def add_gradient(total: Parameters, model: nn.Module, inputs: Tensor, labels_B: Tensor) -> None:
    """Add the gradient of the batch's summed cross-entropy to `total`, in place."""
    found = grad(_loss)(parameters_of(model), model, inputs, labels_B)
    for name, gradient in found.items():
        total[name] += gradient


def alignments(model: nn.Module, inputs: Tensor, labels_B: Tensor, direction: Parameters) -> Tensor:
    """(B,) the dot product of each sample's gradient with `direction`: the derivative of its loss along it, which takes
    one forward-mode pass for the whole batch."""
    parameters = parameters_of(model)

    def losses(values: Parameters) -> Tensor:
        return F.cross_entropy(_logits(model, values, inputs), labels_B, reduction="none")

    along = jvp(losses, (parameters,), ({name: direction[name] for name in parameters},))
    return along[1].detach()


def sum_of_squares(parameters: Parameters) -> Tensor:
    return torch.stack([p.square().sum() for p in parameters.values()]).sum()


def _loss(parameters: Parameters, model: nn.Module, inputs: Tensor, labels_B: Tensor) -> Tensor:
    return F.cross_entropy(_logits(model, parameters, inputs), labels_B, reduction="sum")


def _logits(model: nn.Module, parameters: Parameters, inputs: Tensor) -> Tensor:
    outputs: Any = functional_call(model, parameters, (inputs,))
    if not isinstance(outputs, Tensor):
        raise TypeError(
            f"the model returns a {type(outputs).__name__}; coresets are for classifiers that return logits (B, C): "
            "wrap it in a module that does"
        )
    return outputs
