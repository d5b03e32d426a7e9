"""`compile`: torch.compile for what comes after the cut, so that what comes before it can still be replayed."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..engine.interception import Interception
from ..engine.probe import modules_seen
from ..modules import find_layer, is_compiled, unwrap
from .refusals import check_at, check_layer, check_model, check_root

# Graphs of one region: of a batch, of its retained part at each of at most 8 ratios, both again for a smaller last
# batch, and of evaluation. Dynamo's own limit is 8, beyond which a region would run eagerly.
_GRAPHS = 32


def compile(model: nn.Module, at: str | nn.Module, **options: Any) -> nn.Module:
    """Compile what a model runs after the cut, in place; what it runs before stays eager and is replayed.

        model = halfway.compile(resnet50(), at="layer2")  # before DDP
        blocker = halfway.ForwardBlocker(model, at="layer2", prune_ratio=0.4)

    What comes after the cut shows in the model's first call in training mode. That call runs eagerly, like any call in
    eval mode before it. From the next one on, the largest modules that it entered only after the cut's output are
    compiled, each for itself, as `nn.Module.compile()` does it: names, weights and `state_dict` stay, and a copy of the
    model (deepcopy, pickle) is not compiled. A layer of `torch.nn` that has no layers of its own, such as the last
    linear one, stays eager, because there is nothing in it to fuse; so does a module that the first call skips.

    Args:
        model: without wrappers.
        at: the blocker's cut, or a layer after it: a submodule or its name.
        **options: of `torch.compile`: backend, mode, fullgraph, ... Every batch size gets a graph of its own
            (`dynamic=False`, unless you say otherwise).

    Returns:
        the model itself.
    """
    name, layer = _find_cut(model, at)
    torch.compile(lambda: None, **options)  # an error about them now, not in the second step
    _Compilation(model, name, layer, options)
    return model


def to_be_compiled(root: nn.Module) -> bool:
    """Whether the model, or a part of it, waits for its first training call to be compiled."""
    return any(isinstance(vars(module).get("_call_impl"), _Waiting) for module in root.modules())


class _Waiting(Interception):
    """Stands in for the call of a model that will be compiled, and for that of its cut."""


class _Compilation:
    """Watches a model's first training call, and has the modules compiled when a later call comes to them."""

    def __init__(self, model: nn.Module, name: str, layer: nn.Module, options: dict[str, Any]) -> None:
        self._model, self._name, self._layer, self._options = model, name, layer, options
        self._regions: dict[nn.Module, None] = {}
        self._within = False  # a later call
        self._root_call = _Waiting(model, "_call_impl", self._called)
        self._layer_call = _Waiting(layer, "_call_impl", self._through_the_cut)

    def _called(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not (self._regions or self._model.training):
            return original(*args, **kwargs)
        if not self._regions:
            return self._watched(original, args, kwargs)
        self._within = True
        try:
            return original(*args, **kwargs)
        finally:
            self._within = False
            if all(map(is_compiled, self._regions)):
                self._root_call.remove()

    def _watched(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        before: set[nn.Module] = set()
        after: set[nn.Module] = set()
        passed = False

        def enter(module: nn.Module, _: Any) -> None:
            (after if passed else before).add(module)

        def leave(module: nn.Module, *_: Any) -> None:
            nonlocal passed
            passed = passed or module is self._layer

        with modules_seen(enter, leave):
            output = original(*args, **kwargs)
        if output is None:  # a probe, which ended at the cut: under FSDP2 every forward has to return
            return output
        if not passed:
            warnings.warn(
                f"layer {self._name!r} did not run in this call, so nothing is compiled yet; if it never runs, choose "
                "one that does (`halfway layers` lists them)",
                stacklevel=4,
            )
            return output
        self._regions = dict.fromkeys(_regions(self._model, before, after))
        if not self._regions:
            raise ValueError(
                f"nothing that could be compiled runs after layer {self._name!r} of this {type(self._model).__name__}; "
                "cut earlier (`halfway layers` lists where), or compile all of it, torch.compile(model), without a "
                "replay"
            )
        return output

    def _through_the_cut(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What comes next may be compiled now. A probe does not come here, it ends at the cut.

        Not at the end of the first call: where that was checkpointed, its backward pass runs layers again, and must
        find what its forward pass found. And not under a dispatch mode, which some versions of torch remember for ever.
        """
        output = original(*args, **kwargs)
        if self._within and _get_current_dispatch_mode() is None:
            for region in self._regions:
                _compile(region, self._options)
            self._layer_call.remove()
        return output


def _find_cut(model: nn.Module, at: str | nn.Module) -> tuple[str, nn.Module]:
    """The cut, in a model that can be compiled."""
    check_model(model)
    root, compiled = unwrap(model)
    if compiled or to_be_compiled(root) or any(map(is_compiled, root.modules())):
        raise ValueError(
            f"this {type(root).__name__} is compiled already, all of it or a part; give halfway.compile(model, at=...) "
            "a model of which nothing is"
        )
    if root is not model:
        raise ValueError("DDP wraps this model already; use halfway.compile(model, at=...) before DDP(model)")
    if isinstance(vars(root).get("_call_impl"), Interception):
        raise RuntimeError(
            "a ForwardBlocker waits for the next call of this model; use halfway.compile(model, at=...) before the "
            "training begins"
        )
    check_root(root)
    if at is None:
        raise ValueError(
            "at=None has no layers before the cut that could be replayed; compile the whole model: torch.compile(model)"
        )
    check_at(at)
    name, layer = find_layer(root, at)
    check_layer(name, layer)
    return name, layer


def _regions(module: nn.Module, before: set[nn.Module], after: set[nn.Module]) -> Iterator[nn.Module]:
    """The largest modules within this one that were entered after the cut, and nothing in them before it."""
    if module in after and before.isdisjoint(module.modules()):
        if not _is_one_layer(module):
            yield module
        return
    for child in module.children():
        yield from _regions(child, before, after)


def _is_one_layer(module: nn.Module) -> bool:
    """Whether it is a layer of torch's, or derived from one, without layers of its own."""
    kinds = [kind for kind in type(module).__mro__ if issubclass(kind, nn.Module) and kind is not nn.Module]
    return not module._modules and any(kind.__module__.startswith("torch.nn.") for kind in kinds)


def _compile(region: nn.Module, options: dict[str, Any]) -> None:
    # Not region.compile(): versions before 2.15 compile nothing of an nn.Sequential, whose forward they skip as torch's
    # own. And graphs are counted per code object, so that each region needs one of its own.
    def entered(*args: Any, **kwargs: Any) -> Any:
        return region._call_impl(*args, **kwargs)

    entered.__code__ = entered.__code__.replace(co_name=f"{type(region).__name__}_entered")
    limits = {"isolate_recompiles": True, "recompile_limit": _GRAPHS}  # the first for what lies behind a graph break
    known = {k: v for k, v in limits.items() if k in inspect.signature(torch.compile).parameters}
    region._compiled_call_impl = torch.compile(entered, **{"dynamic": False, **known, **options})
