"""What goes to the model: which parts of the batch, and how they are passed."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from . import batch, reading
from .batch import Batch


class Inputs(NamedTuple):
    """What goes to the model.

    more: whether the model may be called with further arguments. The user has named all inputs that matter up to the
        cut; labels, for example, only matter to the loss.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    more: bool = False

    def tensors(self) -> list[Tensor]:
        if len(self.args) == 1 and type(self.args[0]) is Tensor and not self.kwargs:  # by far the most usual
            return [self.args[0]]
        return [leaf for leaf in batch.leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]


# The usual names of targets in a batch with names.
_TARGETS = ("labels", "label", "targets", "target", "y")


def targets_of(whole: Batch, where: int | str | None) -> Any:
    """The part of a batch that holds the targets; None if there is none in the usual places.

    Args:
        where: a position or a name; None: the second part of a batch by position, or the first of the usual names.
    """
    first = whole.parts[0] if len(whole.parts) == 1 else None
    named = whole.named or (first if isinstance(first, Mapping) else {})
    if isinstance(where, str):
        if where not in named:
            raise ValueError(f"the targets {where!r} are not in the batch, which has {list(named) or 'no names'}")
        return named[where]
    if isinstance(where, int):
        if not 0 <= where < len(whole.parts):
            raise ValueError(f"the targets should be part {where} of the batch, which has {len(whole.parts)} parts")
        return whole.parts[where]
    if named:
        return next((named[name] for name in _TARGETS if name in named), None)
    return whole.parts[1] if len(whole.parts) > 1 else None


class Forward:
    """The signature of a model's forward."""

    def __init__(self, root: nn.Module) -> None:
        self._only = ""
        self._signature = inspect.signature(root.forward)
        self._parameters = list(self._signature.parameters)
        self._by_keyword = {
            p.name for p in self._signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        }
        kinds = {p.kind: p.name for p in self._signature.parameters.values()}
        self._rest = kinds.get(inspect.Parameter.VAR_KEYWORD)
        # By far the most common call has one tensor. This is the parameter that takes it; "" if no such call works.
        self._only = "" if self._unbound((None,), {}) else next(iter(self._signature.bind(None).arguments), "")
        if self._only and isinstance(self._signature.bind(None).arguments[self._only], tuple):
            self._only = ""

    def read(self, whole: Batch, inputs: Any) -> Batch:
        """The batch, with `first` set to what its first part is to the model.

        A tuple holds the model's arguments, one by one. So does a list of as many tensors as `forward` can take, each
        with all samples. Any other list is one argument, usually with an entry per sample, like the images of a
        detector. Where both are possible, earlier batches decide; if there are none, a list of as many mappings beside
        it (targets) makes it one entry per sample.
        """
        if inputs is not None or not whole.parts or not isinstance(whole.parts[0], (tuple, list)):
            return whole
        return whole._replace(first="arguments" if isinstance(whole.parts[0], tuple) else self._meant_by_list(whole))

    def _meant_by_list(self, whole: Batch) -> Literal["part", "arguments", "samples"]:
        first, others = whole.parts[0], whole.parts[1:]
        rows = {len(leaf) for leaf in batch.leaves(first) if isinstance(leaf, Tensor) and leaf.ndim > 0}
        beside = {n for n in map(reading.direct_length, others) if n is not None}
        targets = any(reading.has_records(part) and len(part) == len(first) for part in others)
        may_be_samples = targets or len(first) in beside
        may_be_parts = len(rows) < 2 and (rows <= beside or not beside)
        if self._unbound(first, {}):
            return "part" if may_be_parts and beside and not may_be_samples else "samples"
        if may_be_samples != may_be_parts:
            return "samples" if may_be_samples else "arguments"
        known = whole.readings.known("first") if whole.readings is not None else None
        return "samples" if (targets if known is None else known) else "arguments"

    def inputs(self, whole: Batch, inputs: Any) -> Inputs:
        """Which parts of the batch the model gets, and how; `inputs` as in `ForwardBlocker.__call__`."""
        if whole.named:
            names = list(inputs) if inputs is not None else [n for n, v in whole.named.items() if self._takes(n, v)]
            unknown = [n for n in names if n not in whole.named]
            if unknown:
                raise ValueError(f"inputs={unknown} are not in the batch, which has {list(whole.named)}")
            if not names:
                raise ValueError(
                    f"none of {list(whole.named)} is a parameter of the model's "
                    f"forward({', '.join(self._parameters)}); say which go to the model with inputs=[...]"
                )
            return self._named({n: whole.named[n] for n in names}, more=inputs is not None)
        if inputs is not None:
            positions = [inputs] if isinstance(inputs, int) else list(inputs)
            if not all(isinstance(i, int) and 0 <= i < len(whole.parts) for i in positions):
                raise ValueError(f"inputs={inputs!r} must be positions in the batch of {len(whole.parts)} parts")
            return Inputs(tuple(whole.parts[i] for i in positions), {}, more=True)
        first = whole.parts[0]
        if isinstance(first, Mapping):
            return Inputs((), dict(first))
        return Inputs(tuple(first) if whole.first == "arguments" else (first,), {})

    def _takes(self, name: str, value: Any) -> bool:
        """Whether a named part of the batch goes to the model. Of what only its **kwargs would take, plain values do:
        they say how to run (output_hidden_states=True) and belong to no sample."""
        return name in self._parameters or (self._rest is not None and reading.is_plain(value))

    def _named(self, chosen: dict[str, Any], more: bool) -> Inputs:
        """By keyword where forward knows the name; otherwise by position (the "image" of a batch for forward(x))."""
        keywords = {n: v for n, v in chosen.items() if n in self._by_keyword or self._rest is not None}
        return Inputs(tuple(v for n, v in chosen.items() if n not in keywords), keywords, more)

    def check(self, to_model: Inputs) -> None:
        """Raise if the model cannot be called with this."""
        problem = self._unbound(to_model.args, to_model.kwargs)
        if problem:
            raise TypeError(
                f"the model's forward({', '.join(self._parameters)}) cannot be called with what goes to it from the "
                f"batch: {problem}. A dict goes to it as keywords, a tuple as positionals, a list as positionals too "
                "or, if it is too long for that, as one argument with an entry per sample; inputs= says otherwise"
            )

    @contextlib.contextmanager
    def explaining(self, whole: Batch) -> Iterator[None]:
        """Put around the model's first run: if that fails, the error also says how the batch was read."""
        try:
            yield
        except (TypeError, AttributeError) as error:
            if whole.first != "samples":
                raise
            raise TypeError(
                f"{error}. (The list in first place went to the model's forward({', '.join(self._parameters)}) as one "
                "argument, with one entry per sample. A model that takes a tensor wants them stacked: "
                "blocker(torch.stack(x), y))"
            ) from error

    def _unbound(self, args: Any, kwargs: Any) -> str:
        """Why forward cannot be called like this; "" if it can."""
        if self._only and len(args) == 1 and not kwargs:
            return ""
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            return str(error)
        return ""

    def bind(self, args: Any, kwargs: Any) -> dict[str, list[Any]] | None:
        """The call's arguments, flattened, by parameter name; the same whether passed by position or by keyword."""
        if self._only and len(args) == 1 and type(args[0]) is Tensor and not kwargs:
            return {self._only: [args[0]]}
        try:
            bound = dict(self._signature.bind(*args, **kwargs).arguments)
        except TypeError:
            return None
        rest = bound.pop(self._rest, {}) if self._rest else {}
        return {name: list(batch.leaves(value)) for name, value in {**bound, **rest}.items()}


class Call:
    """The model's call on a batch.

    Args:
        forward: the model's signature.
        whole: the batch.
        which: what of it goes to the model, `inputs` as in `ForwardBlocker.__call__`.
        size: how many samples it has; None: not known, and the batch is checked for it.

    Attributes:
        inputs: what goes to the model.
    """

    def __init__(self, forward: Forward, whole: Batch, which: Any, size: int | None = None) -> None:
        self.forward, self.whole, self._which = forward, whole, which
        self.inputs = forward.inputs(whole, which)
        if size is None:
            if self.inputs.tensors():
                forward.check(self.inputs)
            size = whole.length([*self.inputs.args, *self.inputs.kwargs.values()])
            whole.validate(size)
        self.size = size

    def part(self, rows: Tensor) -> Call:
        """The call on some of the samples, in the order of `rows`."""
        return Call(self.forward, self.whole.cut(rows, self.size), self._which, len(rows))

    def arguments(self) -> dict[str, list[Any]]:
        """What goes to the model, by the names of the parameters, flat."""
        arguments = self.forward.bind(self.inputs.args, self.inputs.kwargs)
        assert arguments is not None, "the blocker has checked it"
        return arguments
