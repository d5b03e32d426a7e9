"""What a forward pass leaves behind in a model outside of gradients, and how two models differ in it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Compared by name and value below, compared elsewhere, or of no interest.
_NOT_ATTRIBUTES = {"_modules", "_parameters", "_buffers", "_non_persistent_buffers_set", "note", "generator"}


def differences(found: nn.Module, expected: nn.Module, tolerance: float) -> Iterator[str]:
    """In words, in what `found` differs: tensors by more than the tolerance (relative to the largest value, if that is
    above 1), attributes of any kind, hooks by their number, submodules."""
    modules, wanted = dict(found.named_modules()), dict(expected.named_modules())
    if modules.keys() != wanted.keys():
        yield f"it has other modules: {sorted(modules.keys() ^ wanted.keys())}"
    for name in modules.keys() & wanted.keys():
        for difference in _in_module(modules[name], wanted[name], tolerance):
            yield f"{name}{difference}"


def _in_module(found: nn.Module, expected: nn.Module, tolerance: float) -> Iterator[str]:
    if type(found) is not type(expected):
        yield f" is a {type(found).__name__}, not a {type(expected).__name__}"
    for hooks in _HOOKS:
        mine, theirs = (len(getattr(m, hooks)) for m in (found, expected))
        if mine != theirs:
            yield f" has {mine} of {hooks}, not {theirs}"
    for kind in ("_parameters", "_buffers"):
        yield from _in_value(dict(getattr(found, kind)), dict(getattr(expected, kind)), tolerance, f".{kind}")
    yield from _in_value(_attributes(found), _attributes(expected), tolerance, "")


def _attributes(module: nn.Module) -> dict[str, Any]:
    bookkeeping = vars(nn.Module()).keys() - {"training"}
    return {k: v for k, v in vars(module).items() if k not in _NOT_ATTRIBUTES and k not in bookkeeping}


def _in_value(found: Any, expected: Any, tolerance: float, where: str) -> Iterator[str]:
    if type(found) is not type(expected):
        yield f"{where} is a {type(found).__name__}, not a {type(expected).__name__}"
    elif isinstance(found, (Tensor, np.ndarray)):
        yield from _in_tensor(torch.as_tensor(found), torch.as_tensor(expected), tolerance, where)
    elif isinstance(found, dict):
        if found.keys() != expected.keys():
            yield f"{where} has the keys {list(found)}, not {list(expected)}"
        for key in found.keys() & expected.keys():
            yield from _in_value(found[key], expected[key], tolerance, f"{where}.{key}")
    elif isinstance(found, (list, tuple, deque)):
        if len(found) != len(expected):
            yield f"{where} has {len(found)} entries, not {len(expected)}"
        for i, (a, b) in enumerate(zip(found, expected, strict=False)):
            yield from _in_value(a, b, tolerance, f"{where}[{i}]")
    elif isinstance(found, (int, str, float, bool, set, Counter, type(None), torch.dtype)):
        if found != expected:
            yield f"{where} is {found}, not {expected}"
    elif not isinstance(found, nn.Module) and not callable(found):
        slots = getattr(type(found), "__slots__", None)
        both = ({s: getattr(o, s) for s in slots} if slots else vars(o) for o in (found, expected))
        yield from _in_value(*both, tolerance, where)


def _in_tensor(found: Tensor, expected: Tensor, tolerance: float, where: str) -> Iterator[str]:
    found, expected = found.detach(), expected.detach()
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        kinds = [f"{tuple(t.shape)} {t.dtype}" for t in (found, expected)]
        yield f"{where} is {kinds[0]}, not {kinds[1]}"
    elif found.numel():
        found, expected = found.double(), expected.double()
        off = (found - expected).abs().max().item()
        # Not finite in the reference either: nothing can be said.
        if expected.isfinite().all() and not off <= tolerance * max(expected.abs().max().item(), 1):
            yield f"{where} is off by {off:.2g}"
