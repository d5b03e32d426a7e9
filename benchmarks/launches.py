"""How many operations a replayed step adds to one of training on the retained samples alone.

    python benchmarks/launches.py && python benchmarks/page.py

On a GPU each of them is a launch (at least one), and where launches are the bottleneck this is what pruning costs.
Steps are counted on the CPU, as they run: operations that compute or copy; views and allocations are none. The counts
do not depend on the number of samples, nor on the clock. Models, cuts and sizes of images are those of the zoo; 8
samples, prune ratio 0.5, `density`. A step is forward pass, loss and backward pass, as in the zoo.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import halfway
from halfway.batches.batch import leaves
from halfway.engine import spot_checks
from halfway.engine.replay import Replayer
from halfway.lab.environment import environment
from halfway.lab.files import write_json
from halfway.lab.models.by_name import random_input

RESULT = Path(__file__).parent / "results" / "launches.json"
COMMAND = "python benchmarks/launches.py"
BATCH, RATIO = 8, 0.5
# Views that do not say so in their schema, and memory that is not filled.
_NOTHING = {"_unsafe_view", "_reshape_alias", "lift_fresh", "empty", "empty_like", "empty_strided", "empty_permuted"}
_NOTHING |= {"new_empty", "new_empty_strided"}


class Counting(TorchDispatchMode):
    """Counts operations by the part of the step they belong to.

    Attributes:
        names: which, by part.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, Counter[str]] = {}
        self._parts = ["rest"]

    @property
    def found(self) -> dict[str, int]:
        """How many, by part."""
        return {part: sum(names.values()) for part, names in self.names.items()}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What runs in here belongs to this part."""
        self._parts.append(name)
        try:
            yield
        finally:
            self._parts.pop()

    def wrap(self, owner: Any, method: str, name: str) -> None:
        """What this method runs belongs to this part."""
        original = getattr(owner, method)

        def counted(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return original(*args, **kwargs)

        setattr(owner, method, counted)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if launches(func):
            self.names.setdefault(self._parts[-1], Counter())[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def launches(func: Any) -> bool:
    """Whether an operation computes or copies anything on the device."""
    returns = func._schema.returns
    written = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
    view = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    gives_tensors = any("Tensor" in str(r.type) for r in returns)
    return (gives_tensors or written) and not view and func._schema.name.removeprefix("aten::") not in _NOTHING


class _Stop(BaseException):
    pass


def count(make: Callable[[], nn.Module], at: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """Operations of a plain step on the retained samples, and of a replayed one, part by part.

    plain: all of the plain step. shallow: of its forward pass up to the cut. normalisations: BatchNorms among these.
    probe: in the blocker's call, the model up to the cut on all samples. selection: choosing and learning. batch: the
    rest of that call. gathers: in the model's call, those that answer operations from the tape; answered: how many
    operations these are. replay: what else the model's call runs beyond the plain one, answered operations not counted.
    added: all of the step beyond the plain one. checked: what a step with a spot check adds to that.
    """
    torch.manual_seed(0)
    model = make().train()
    x = random_input((BATCH, *shape))
    part = x[: BATCH // 2].clone()

    def plain(counting: Counting) -> None:
        with counting, counting.part("model"):
            outputs = model(part)
        _finish(counting, outputs)

    counted = Counting()
    plain(counted)
    model.zero_grad()
    found: dict[str, Any] = {"plain": sum(counted.found.values())} | _shallow(model, at, part)
    plain_call = counted.found["model"]
    selector = halfway.Density(num_centroids=8)
    with halfway.ForwardBlocker(model, at, RATIO, selector=selector, reuse="replay") as blocker:
        for _ in range(6):  # until all centroids are filled, and operations behind random draws are proven
            _finish(Counting(), model(blocker(x + torch.randn_like(x))))
            model.zero_grad()
        steady = _replayed(blocker, model, x)
        blocker._counters.steps = spot_checks.EVERY - 1
        checked = _replayed(blocker, model, x)
        assert blocker.stats.steps_recomputed == 0
    answered = steady.pop("answered")
    gathers = steady["gathers"]
    found |= {"probe": steady["probe"], "selection": steady["selection"], "batch": steady["rest"]}
    found |= {"gathers": gathers, "answered": answered}
    found["replay"] = steady["model"] - (plain_call - answered)
    found["added"] = sum(steady.values()) - found["plain"]
    found["checked"] = sum(checked.values()) - checked["answered"] - sum(steady.values())
    return found


def _finish(counting: Counting, outputs: Any) -> None:
    with counting, counting.part("backward"):
        tensors = [t for t in leaves(outputs) if isinstance(t, Tensor)]
        sum(t.float().square().mean() for t in tensors).backward()


def _shallow(model: nn.Module, at: str, x: Tensor) -> dict[str, int]:
    def stop(*_: Any) -> None:
        raise _Stop

    counting = Counting()
    handle = model.get_submodule(at).register_forward_hook(stop)
    with contextlib.suppress(_Stop), counting:
        model(x)
    handle.remove()
    names = counting.names["rest"]
    return {
        "shallow": sum(names.values()),
        "normalisations": sum(n for name, n in names.items() if "batch_norm" in name),
    }


def _replayed(blocker: halfway.ForwardBlocker, model: nn.Module, x: Tensor) -> dict[str, int]:
    counting = Counting()
    engine, selector = blocker._engine, blocker.selector
    assert engine is not None
    before, cut = blocker._counters.operations_replayed, Replayer._cut
    counting.wrap(engine, "probe", "probe")
    for method in ("select", "learn"):
        counting.wrap(selector, method, "selection")
    counting.wrap(Replayer, "_cut", "gathers")
    try:
        with counting:
            retained = blocker(x)
            with counting.part("model"):
                outputs = model(retained)
    finally:
        Replayer._cut = cut  # type: ignore[method-assign]
        for owner, methods in ((engine, ["probe"]), (selector, ["select", "learn"])):
            for method in methods:
                delattr(owner, method)
    _finish(counting, outputs)
    model.zero_grad()
    return counting.found | {"answered": blocker._counters.operations_replayed - before}


def main() -> None:
    from zoo import CASES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=[c.key for c in CASES], metavar="MODEL", help="count only these again"
    )
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    known = json.loads(arguments.out.read_text())["models"] if arguments.only and arguments.out.exists() else []
    models = {row["model"]: row for row in known}
    for case in CASES:
        if arguments.only is None or case.key in arguments.only:
            models[case.title] = {"model": case.title, "at": case.at, **count(case.model, case.at, case.shape)}
            print(models[case.title], flush=True)
    found: dict[str, Any] = {"title": "launches", "command": COMMAND, "seed": 0, **environment(torch.device("cpu"))}
    found["models"] = [models[case.title] for case in CASES if case.title in models]
    write_json(arguments.out, found)


if __name__ == "__main__":
    main()
