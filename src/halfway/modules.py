"""Finding the innermost model under its wrappers, and a layer in it."""

from __future__ import annotations

import difflib
from typing import Any

from torch import nn


def unwrap(model: nn.Module) -> tuple[nn.Module, bool]:
    """The innermost model, and whether torch.compile wraps it."""
    compiled = False
    while True:
        if isinstance(model, nn.DataParallel):
            raise TypeError(
                "nn.DataParallel splits every batch over threads, so no sample can be dropped for all of them; use "
                "DistributedDataParallel (torchrun), one process per device"
            )
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif "_orig_mod" in model._modules:
            model, compiled = model._modules["_orig_mod"], True  # type: ignore[assignment]
        else:
            return model, compiled or is_compiled(model)


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile wraps this very module, or its call."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def group_of(model: nn.Module) -> Any:
    """The process group of a DDP wrapper at any depth; None without one."""
    while not isinstance(model, nn.parallel.DistributedDataParallel):
        if "_orig_mod" not in model._modules:
            return None
        model = model._modules["_orig_mod"]  # type: ignore[assignment]
    return model.process_group


def find_layer(root: nn.Module, at: str | nn.Module) -> tuple[str, nn.Module]:
    """The name of a submodule and the submodule itself, given either one."""
    names = {name: module for name, module in root.named_modules() if name}
    if isinstance(at, nn.Module):
        for name, module in names.items():
            if module is at:
                return name, module
        raise ValueError(f"at= is a {type(at).__name__} that is not a submodule of this {type(root).__name__}")
    if at not in names:
        raise ValueError(
            f"no module {at!r} in this {type(root).__name__}; {suggest(root, at)} (`halfway layers` lists them)"
        )
    return at, names[at]


def suggest(root: nn.Module, wanted: str) -> str:
    """The submodules whose names are closest to `wanted`."""
    names = [name for name, _ in root.named_modules() if name]
    close = difflib.get_close_matches(wanted, names, n=5)
    return f"the closest are {close}" if close else f"it has {[n for n, _ in root.named_children()]}"
