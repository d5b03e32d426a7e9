"""A place in a model where its forward pass is cut: what comes out there, and how to be called when it does."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from ..batches import batch
from ..errors import not_finite

AtCut = Callable[[nn.Module, Any, Any], None]


class CutSkipped(Exception):
    """The cut, which did run in an earlier batch, did not run in this one."""


class Seen(NamedTuple):
    """What a pass over all samples showed.

    features: the cut's output; of a whole model, the first of its outputs that has a row per sample.
    outputs: all that the cut returned, detached.
    watched: what entered the watched module, if there is one.
    """

    features: Tensor
    outputs: Any
    watched: Tensor | None


class Cut:
    """The output of one layer of a model, or of the whole model: then only the backward pass is saved.

    Args:
        root: the innermost model, without wrappers.
        layer: a submodule of root, or root itself.
        name: of the layer, for messages.
        compiled: whether the model is called through torch.compile.
        watched: a module before the cut whose input probes report.
        output: which of several outputs of the layer is meant, by position or name.

    Attributes:
        at_output: whether the shallow part is the whole model.
    """

    def __init__(
        self,
        root: nn.Module,
        layer: nn.Module,
        name: str,
        compiled: bool,
        watched: nn.Module | None = None,
        output: int | str | None = None,
    ) -> None:
        self.root = root
        self.name = name
        self.compiled = compiled
        self.at_output = layer is root
        self._output = output
        self._reached = False
        self._waiting: list[AtCut] = []
        self._entering: list[list[Tensor] | None] = []
        self._hooks = [_Hook(layer, "_forward_hooks", _passing_on_to(self._waiting))]
        if watched is not None:
            self._hooks.append(_Hook(watched, "_forward_pre_hooks", _collecting_in(self._entering)))

    def hooked(self, at_cut: AtCut, entering: list[Tensor] | None = None) -> _Hooked:
        """Have `at_cut` called when the layer returns, and collect what enters the watched module in `entering`.

        Always the same hooks under the same numbers, which pass on to whatever is waiting: what the model holds is
        compared from step to step, and this is no change of it.
        """
        return _Hooked(self._hooks, self._waiting, at_cut, self._entering, entering)

    def seen(self, found: list[Any], size: int, watched: list[Tensor] | None = None) -> Seen:
        """What the cut returned, checked, and what entered the watched module."""
        features = self.features(found, size)
        outputs = tree_map_only(Tensor, Tensor.detach, found[0]) if self.at_output else features
        return Seen(features, outputs, watched[0] if watched else None)

    def features(self, found: list[Any], size: int) -> Tensor:
        """The one tensor with a row per sample that the cut returned, detached. `found` is empty if it never ran."""
        if self.at_output:
            return self._first_output(found[0], size)
        if not found and self._reached:
            raise CutSkipped
        if not found:
            raise ValueError(
                f"layer {self.name!r} never runs in the model's forward pass, so nothing can be cut there; choose one "
                "that does (`halfway layers` lists them)"
            )
        features = self.part_of(found[0])
        if not isinstance(features, Tensor):
            what = type(features).__name__
            raise TypeError(
                f"layer {self.name!r} returns a {what}, not a tensor; say which part of it is the cut (output=0, or "
                "output='name'), or cut at another layer (`halfway layers` lists those that return a tensor)"
                if self._output is None
                else f"output={self._output!r} of layer {self.name!r} is a {what}, not a tensor"
            )
        if not features.is_floating_point():
            raise TypeError(
                f"layer {self.name!r} returns {features.dtype}, not floating point features; cut further down"
            )
        if features.ndim < 2 or features.shape[0] != size:
            raise ValueError(
                f"layer {self.name!r} returns shape {tuple(features.shape)} for {size} samples; the batch must come "
                "first. Cut at a layer outside of the part that folds or transposes the batch"
            )
        self._reached = True
        return features.detach()

    def _first_output(self, outputs: Any, size: int) -> Tensor:
        for leaf in batch.leaves(outputs):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim > 0 and leaf.shape[0] == size:
                return leaf.detach().reshape(size, -1)
        raise TypeError(
            f"the model returns a {type(outputs).__name__} without a floating point tensor of {size} rows, one per "
            "sample, so there is nothing to score; use a selector that looks at features or at nothing"
        )

    def part_of(self, output: Any) -> Any:
        """The part of the layer's output that is the cut."""
        if self._output is None:
            return output
        try:
            return output[self._output]
        except (LookupError, TypeError) as error:
            raise ValueError(
                f"layer {self.name!r} returns a {type(output).__name__} that has no output={self._output!r} ({error})"
            ) from None

    def check_finite(self, features: Tensor) -> None:
        """Raise if they cannot be scored. Waits for the device."""
        if not features.isfinite().all():
            raise FloatingPointError(not_finite(self.name))

    def more_than_once(self) -> ValueError:
        return ValueError(
            f"layer {self.name!r} runs more than once in one forward pass, so it is no place to cut; choose one that "
            "runs once (`halfway layers` lists them)"
        )


class _Hook:
    """A hook of a module that comes and goes, always under the same number."""

    def __init__(self, module: nn.Module, kind: str, function: Any) -> None:
        self._module, self._kind, self._function = module, kind, function
        self._number = RemovableHandle(OrderedDict()).id

    def put_in(self) -> None:
        getattr(self._module, self._kind)[self._number] = self._function

    def take_out(self) -> None:
        getattr(self._module, self._kind).pop(self._number, None)


class _Hooked:
    def __init__(
        self,
        hooks: list[_Hook],
        waiting: list[AtCut],
        at_cut: AtCut,
        entering: list[list[Tensor] | None],
        collected: list[Tensor] | None,
    ) -> None:
        self._hooks, self._waiting, self._at_cut = hooks, waiting, at_cut
        self._entering, self._collected = entering, collected

    def __enter__(self) -> None:
        self._waiting.append(self._at_cut)
        self._entering.append(self._collected)
        for hook in self._hooks:
            hook.put_in()

    def __exit__(self, *_: object) -> None:
        self._waiting.pop()
        self._entering.pop()
        if not self._waiting:
            for hook in self._hooks:
                hook.take_out()


# Functions, which a copy of the model takes along as they are; a bound method would be copied with its object.


def _passing_on_to(waiting: list[AtCut]) -> AtCut:
    def reached(module: nn.Module, args: Any, output: Any) -> None:
        for at_cut in waiting:
            at_cut(module, args, output)

    return reached


def _collecting_in(entering: list[list[Tensor] | None]) -> Callable[[nn.Module, Any], None]:
    def enters(module: nn.Module, args: Any) -> None:
        collected = entering[-1] if entering else None
        if collected is not None and args and isinstance(args[0], Tensor):
            collected.append(args[0].detach())

    return enters
