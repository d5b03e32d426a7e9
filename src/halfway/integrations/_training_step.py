"""Which model a user's training step calls. If it calls another than the prepared one, no step would be replayed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from ..modules import find_layer


class Place(NamedTuple):
    """Names in the user's module: of the model that the step calls ("": the module) and of the cut ("": none)."""

    model: str
    cut: str

    @property
    def at(self) -> str | None:
        """The cut by its name in the model."""
        return (self.cut.removeprefix(f"{self.model}.") if self.model else self.cut) or None


def locate_cut(module: nn.Module, model: str | None, at: str | None) -> Place:
    """Where `at` is in a user's module, and which model the step will call.

    Args:
        model: the submodule that is called; None: the module, if it has a forward, or else its child with the cut.
        at: the cut, by its name in the module or in that submodule.
    """
    if model is not None:
        find_layer(module, model)
    elif _has_forward(module):
        model = ""
    elif at is not None:
        model = at.partition(".")[0]
    else:
        children = [name for name, child in module.named_children() if any(True for _ in child.parameters())]
        if len(children) != 1:
            raise ValueError(f"say with model= which of {children} training_step calls with the batch's inputs")
        model = children[0]
    if at is None:
        return Place(model, "")
    full = at if not model or at.startswith(f"{model}.") else f"{model}.{at}"
    return Place(model, find_layer(module, full)[0])


def checked(module: nn.Module, where: Place, step: Callable[..., Any]) -> Callable[..., Any]:
    """The user's step, checked: if it calls another model than `where` says, an error names that model."""
    parts = where.cut.split(".")
    around = [".".join(parts[:i]) for i in range(len(parts))]

    def watched(*args: Any, **kwargs: Any) -> Any:
        called: list[str] = []
        with contextlib.ExitStack() as stack:
            for name in around:
                handle = module.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: called.append(name))
                stack.callback(handle.remove)
            output = step(*args, **kwargs)
        if where.cut and where.model not in called:
            found = f"calls self.{called[0]}: pass model={called[0]!r}" if called else "calls nothing around the cut"
            wanted = f"self.{where.model}" if where.model else "self(...)"
            raise RuntimeError(f"ForwardBlocking expects training_step to call {wanted}, but it {found}")
        return output

    return watched


def _has_forward(module: nn.Module) -> bool:
    """Whether the user wrote a `forward`. Not compared with LightningModule's, of which two packages have one each."""
    package, _, _ = type(module).forward.__module__.partition(".")
    return package not in ("lightning", "pytorch_lightning", "torch")
