"""What cannot work, said when the blocker is made and not in the middle of a training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy


def check_model(model: Any) -> None:
    """Raise if this is no model of Python's."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got a {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            f"this {model.original_name} is compiled by TorchScript, which shows nobody what it runs; make the blocker "
            "with the Python model it was made from, and script that after the training"
        )


def check_root(root: nn.Module) -> None:
    """Raise if the model under its wrappers is none of Python's, or one whose weights do not exist yet."""
    check_model(root)
    for name, module in root.named_modules():
        if any(map(is_lazy, [*module._parameters.values(), *module._buffers.values()])):
            raise ValueError(
                f"the weights of {name or 'the model'!r} do not exist yet, it is a {type(module).__name__}; call the "
                "model once on a batch first (under torch.no_grad(), and before the optimizer is made), then make the "
                "blocker"
            )


def check_at(at: Any) -> None:
    """Raise if this is neither a layer, nor a name, nor None."""
    if at is None or isinstance(at, (str, nn.Module)):
        return
    hint = f"; the name of a layer in an nn.Sequential is a string: at={str(at)!r}" if isinstance(at, int) else ""
    raise TypeError(f"at must be the name of a layer, the layer itself or None, got {at!r}{hint}")


def check_layer(name: str, layer: nn.Module) -> None:
    """Raise if nothing can be seen of this layer's output."""
    if isinstance(layer, torch.jit.ScriptModule):
        raise TypeError(
            f"layer {name!r} is compiled by TorchScript, which does not show its output; cut at a layer around it, or "
            "script after the training"
        )
