"""All that a model is: compared with a plain copy of it, place by place."""

from __future__ import annotations

import collections
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import halfway

# Dictionaries of hooks: by number, their keys and functions are not comparable.
_HOOKS = frozenset(k for k in vars(nn.Module()) if "hooks" in k)


def assert_same_state(mine: Any, theirs: Any, where: str = "model", seen: set[int] | None = None) -> None:
    """The same parameters, gradients, buffers, hooks, submodules and attributes, whatever they hold."""
    seen = set() if seen is None else seen
    assert type(mine) is type(theirs), where
    if isinstance(mine, (Tensor, dict, list, nn.Module)) or hasattr(mine, "__dict__"):
        if id(mine) in seen:
            return
        seen.add(id(mine))
    if isinstance(mine, Tensor):
        message = lambda m: f"{where}: {m}"  # noqa: E731
        torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-5, atol=1e-6, msg=message)
        assert mine.requires_grad == theirs.requires_grad, where
        for what in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            assert len(getattr(mine, what) or ()) == len(getattr(theirs, what) or ()), (where, what)
        assert_same_state(vars(mine), vars(theirs), where, seen)
        if mine.is_leaf:
            assert_same_state(mine.grad, theirs.grad, f"{where}.grad", seen)
    elif isinstance(mine, RemovableHandle):
        pass  # numbered through all models
    elif isinstance(mine, torch.Generator):
        assert torch.equal(mine.get_state(), theirs.get_state()), where
    elif isinstance(mine, dict):
        assert list(mine) == list(theirs), where
        for key, value in mine.items():
            if key in _HOOKS:
                assert len(value or ()) == len(theirs[key] or ()), (where, key)
            else:
                assert_same_state(value, theirs[key], f"{where}.{key}", seen)
    elif isinstance(mine, (list, tuple, collections.deque)):
        assert len(mine) == len(theirs), where
        for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert_same_state(a, b, f"{where}[{i}]", seen)
    elif isinstance(mine, nn.Module) or (hasattr(mine, "__dict__") and not callable(mine)):
        assert_same_state(vars(mine), vars(theirs), where, seen)
    elif not callable(mine):
        assert mine == theirs, where


def drive(
    make: Callable[[], nn.Module],
    *,
    steps: int = 5,
    reuse: str = "auto",
    between: Callable[[int, nn.Module], None] | None = None,
    batches: Iterable[Tensor] | None = None,
) -> tuple[nn.Module, halfway.Stats]:
    """Train one model with a blocker and one without it, on the retained samples; after each step they are the same.

    Returns the first one and what its blocker did; the blocker is gone.

    make: builds the model; called twice, with the same seed. Its cut is called "cut".
    between: done to both models before a step, given its number.
    """
    torch.manual_seed(0)
    model = make()
    torch.manual_seed(0)
    plain = make()
    blocker = halfway.ForwardBlocker(model, "cut", 0.5, selector=halfway.Density(num_centroids=4), reuse=reuse)
    batches = list(torch.randn(steps, 8, 6)) if batches is None else batches
    with blocker, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="halfway")
        for step, x in enumerate(batches):
            if between is not None:
                between(step, model)
                between(step, plain)
            retained = blocker(x)
            for m, given in ((model, retained), (plain, x[blocker.last.indices])):
                m.zero_grad()
                out = m(given)
                out.square().mean().backward()
            assert_same_state(model, plain, f"model after {step + 1} steps")
        stats = blocker.stats
    return model, stats
