"""What blocking costs on the host: calls of Python functions in a steady step, and microseconds per operation.

    python benchmarks/host.py && python benchmarks/page.py

On a GPU this is the time that launches have to hide. Calls are counted by cProfile (batch of 8 images, SGD, selector
`density`, prune ratio 0.5): a count, so it is the same on every machine with these versions. Beside the plain step on
the retained samples stands its *floor*: the same with the shallow forward run once more, both shallow forwards under a
dispatch mode that does nothing. The microseconds are those that a chain of tiny layers (16 x 16) takes longer, per
layer, in the blocker's call and in the replayed call; taken in turn with plain passes, one thread. Last, what choosing
and bookkeeping take of a step of ResNet-50, with all cores: measured where layers compute next to nothing, on 4 images
of 32 px, since a step has as many operations whatever the images. Run it while nothing else runs.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import halfway
from halfway.lab.bench.measure import Clock, interleaved, quartiles
from halfway.lab.bench.steps import train as train_step
from halfway.lab.environment import environment
from halfway.lab.files import write_json

RESULT = Path(__file__).parent / "results" / "host.json"
COMMAND = "python benchmarks/host.py"
SIZE, RATIO = 8, 0.5
MODELS: dict[str, tuple[Callable[[], nn.Module], int, tuple[str, str]]] = {
    "ResNet-18": (lambda: torchvision.models.resnet18(num_classes=10), 32, ("layer1", "layer2")),
    "ResNet-50": (lambda: torchvision.models.resnet50(num_classes=10), 32, ("layer1", "layer2")),
    "ViT-S/16": (
        lambda: timm.create_model("vit_small_patch16_224", img_size=64, num_classes=10),
        64,
        ("blocks.2", "blocks.5"),
    ),
    "Swin-T": (
        lambda: timm.create_model("swin_tiny_patch4_window7_224", img_size=112, num_classes=10),
        112,
        ("layers.0", "layers.1"),
    ),
}
CHAINS: dict[str, Callable[[], nn.Module]] = {
    "matrix products (recorded)": lambda: nn.Linear(16, 16),
    "cheap operations (run twice)": nn.Tanh,
}


class _Counting(TorchDispatchMode):
    """Does nothing but count operations."""

    operations = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))


class _Stop(BaseException):
    pass


def calls(step: Callable[[], object]) -> int:
    """How many functions a steady step calls."""
    for _ in range(3):
        step()
    profile = cProfile.Profile()
    profile.runcall(step)
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


def count(make: Callable[[], nn.Module], side: int, at: str) -> dict[str, Any]:
    """Calls of a plain step, of its floor, and of a replayed step."""
    torch.manual_seed(0)
    model = make().train()
    layer = model.get_submodule(at)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x, y = torch.randn(SIZE, 3, side, side), torch.randint(10, (SIZE,))
    part, targets = x[: SIZE // 2].clone(), y[: SIZE // 2].clone()

    def train(logits: Tensor, targets: Tensor) -> None:
        loss = nn.functional.cross_entropy(logits, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def plain() -> None:
        train(model(part), targets)

    operations = 0

    def floor() -> None:
        nonlocal operations

        def stop(*_: Any) -> None:
            raise _Stop

        def leave(*_: Any) -> None:
            mode.__exit__(None, None, None)

        handle = layer.register_forward_hook(stop)
        try:
            with _Counting() as mode:
                model(x)
        except _Stop:
            operations = mode.operations
        handle.remove()
        handle = layer.register_forward_hook(leave)
        mode = _Counting()
        mode.__enter__()
        logits = model(part)
        handle.remove()
        train(logits, targets)

    found = {"plain": calls(plain), "floor": calls(floor), "operations": operations}
    with halfway.ForwardBlocker(model, at, RATIO, selector="density") as blocker:

        def blocked() -> None:
            retained, retained_targets = blocker(x, y)
            train(model(retained), retained_targets)

        for _ in range(20):  # until all centroids are filled
            blocked()
        found["replayed"] = calls(blocked)
        assert blocker.stats.steps_recomputed == 0, blocker.stats.recompute_reasons
    return found


def milliseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def chain(make: Callable[[], nn.Module], layers: int, rounds: int) -> dict[str, Any]:
    """Microseconds per layer that the blocker's call and the replayed call add: quartiles over the rounds."""
    model = nn.Sequential(*(make() for _ in range(layers)), nn.Identity(), nn.Linear(16, 2)).train()
    blocker = halfway.ForwardBlocker(model, str(layers), RATIO, selector=halfway.Density(num_centroids=4))
    x = torch.randn(SIZE, 16)
    part = x[: len(x) // 2].clone()
    retained = [x]

    def block() -> None:
        retained[0] = blocker(x)

    added: dict[str, list[float]] = {"blocker": [], "replay": []}
    for i in range(rounds + 5):
        plain_all, blocked = milliseconds(lambda: model(x)), milliseconds(block)
        replayed, plain_part = milliseconds(lambda: model(retained[0])), milliseconds(lambda: model(part))
        if i >= 5:
            added["blocker"].append(1e3 * (blocked - plain_all) / layers)
            added["replay"].append(1e3 * (replayed - plain_part) / layers)
    assert blocker.stats.steps_recomputed == 0, blocker.stats.recompute_reasons
    return {where: quartiles(values) for where, values in added.items()}


def bookkeeping(rounds: int) -> dict[str, Any]:
    """What a replayed step of ResNet-50 takes beyond its operations: quartiles, relative to a full step as well.

    Per round, on few small images: the probe less a plain shallow forward, plus the selection, plus the replayed
    shallow forward less that of a twin without halfway, whose convolutions give back stored outputs, cut to the
    retained rows. The full step of the same round is one at the zoo's size.
    """
    make, _, (_, at) = MODELS["ResNet-50"]
    plain, blocked, twin = (make().train() for _ in range(3))
    small, large = torch.randn(4, 3, 32, 32), torch.randn(32, 3, 96, 96)
    rows = torch.arange(len(small) // 2)
    _answer_from_memory(twin, at, small, rows)
    clock = Clock(small.device)
    with halfway.ForwardBlocker(blocked, at, RATIO, reuse="replay") as blocker:

        def block(x: Tensor) -> Tensor:
            retained: Tensor = blocker(x)
            clock.mark()
            return retained

        for model in (plain, blocked, twin):
            model.get_submodule(at).register_forward_hook(lambda *_: clock.mark())
        steps = {
            "full": lambda: train_step(plain, large),
            "plain": lambda: train_step(plain, small),
            "twin": lambda: train_step(twin, small[rows]),
            "replayed": lambda: train_step(blocked, small, block),
        }
        for _ in range(20):  # until all centroids are filled
            steps["replayed"]()
        interleaved(steps, 2, clock, None)
        taken = interleaved(steps, rounds, clock, "bookkeeping")
        assert blocker.stats.steps_recomputed == 0, blocker.stats.recompute_reasons
    added = []
    for one, other, replayed in zip(taken["plain"], taken["twin"], taken["replayed"], strict=True):
        probe, selection, replay, _ = replayed.phases
        added.append((probe - one.phases[0], selection, replay - other.phases[0]))
    full = [step.total for step in taken["full"]]
    return {
        "model": "ResNet-50",
        "at": at,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "milliseconds": quartiles([1e3 * sum(parts) for parts in added]),
        "parts": [1e3 * statistics.median(part) for part in zip(*added, strict=True)],
        "full_milliseconds": quartiles([1e3 * s for s in full]),
        "relative": quartiles([sum(parts) / f for parts, f in zip(added, full, strict=True)]),
    }


def _answer_from_memory(model: nn.Module, at: str, x: Tensor, rows: Tensor) -> None:
    """From now on the convolutions up to the cut return what they return now, cut to these rows."""
    outputs: dict[nn.Module, Tensor] = {}

    def note(module: nn.Module, _: Any, output: Tensor) -> None:
        outputs[module] = output.detach().requires_grad_()

    def stop(*_: Any) -> None:
        raise _Stop

    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    handles = [m.register_forward_hook(note) for m in convolutions]
    handles.append(model.get_submodule(at).register_forward_hook(stop))
    with contextlib.suppress(_Stop):
        model(x)
    for handle in handles:
        handle.remove()
    for module, output in outputs.items():
        module.forward = lambda _, output=output: output.index_select(0, rows)  # type: ignore[assignment]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=100, help="layers of the chain (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=41, help="timed steps of each kind (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    share = bookkeeping(arguments.rounds)
    print(share, flush=True)
    torch.set_num_threads(1)
    found: dict[str, Any] = {"title": "host time", "command": COMMAND, "seed": 0, **environment(torch.device("cpu"))}
    found |= {"layers": arguments.layers, "rounds": arguments.rounds, "calls": [], "microseconds": {}}
    found["bookkeeping"] = share
    for name, (make, side, cuts) in MODELS.items():
        for at in cuts:
            found["calls"].append({"model": name, "at": at, **count(make, side, at)})
            print(found["calls"][-1], flush=True)
    for name, layer in CHAINS.items():
        found["microseconds"][name] = chain(layer, arguments.layers, arguments.rounds)
        print(name, found["microseconds"][name], flush=True)
    write_json(arguments.out, found)


if __name__ == "__main__":
    main()
