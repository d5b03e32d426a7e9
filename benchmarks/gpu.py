"""Everything that waits for a GPU, in one command: `make gpu`, or `python benchmarks/gpu.py --download`.

Three parts, each item of them a command of its own, so that one that fails does not take the others with it:

  tests     those marked gpu (`pytest -m gpu`): gradients of replayed steps, no waiting for the device, memory
  models    benchmarks/zoo.py at 224 px, 128 samples or as many as fit, AMP, channels_last: what a step costs
  recipes   speedrun-cifar10, and one epoch of the CIFAR recipes: full, random, pfb and early_exit

Results go to benchmarks/results/gpu/NAME-OF-CARD/, one JSON file for each item, and a page: commit the folder. What has
a result is not run again, so an interrupted run resumes. What could not be run is on the page with its reason, and is
tried again next time, like tests that failed. After --minutes nothing new is begun.

Without a GPU, `--device cpu --quick` runs the same in miniature, in folders of its own, to see that it works:

  python benchmarks/gpu.py --device cpu --quick
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import gpu_page
import zoo
from halfway.lab.environment import environment
from halfway.lab.files import write_json
from halfway.lab.training.run_result import RunResult

HERE = Path(__file__).resolve().parent
TRAININGS, MINIATURE = HERE.parent / "runs" / "gpu", HERE.parent / "runs" / "gpu-quick"
METHODS = ("full", "random", "pfb", "early_exit")
EPOCHS = {"speedrun-cifar10": 10, "cifar10-resnet18": 1, "cifar100-resnet18": 1}
# Minutes on a consumer card, guessed from FLOPs; the page shows what they were.
GUESSES = {"tests": 4.0, "models": 2.0, "speedrun-cifar10": 2.0, "cifar10-resnet18": 1.0, "cifar100-resnet18": 1.0}
# Settings of a miniature.
QUICK_MODELS = ("resnet18", "vit_small")
QUICK_ZOO = ("--size", "32", "--batch", "8", "--rounds", "2")
QUICK_RECIPE = ("data.train_samples=128", "data.test_samples=32", "batch_size=32")
QUICK_NETS = {"speedrun-cifar10": ("model.options.widths=[4,8,8]",)}
QUICK_RESNET = ("model.options.width=4",)
# Lines of an error that are kept.
_TAIL = 12


@dataclass(frozen=True)
class Item:
    """One measurement.

    key: its name, on the command line too.
    part: tests, models or recipes.
    command: runs it.
    file: of the result, in the results' folder.
    guess: minutes.
    """

    key: str
    part: str
    command: tuple[str, ...]
    file: str
    guess: float


def items(arguments: argparse.Namespace, folder: Path, runs: Path) -> Iterator[Item]:
    """All of them, in the order in which they are run."""
    python = sys.executable
    report = folder / "tests.xml"
    tests = (python, "-m", "pytest", "-m", "gpu", "-q", f"--junitxml={report}", "-p", "no:cacheprovider")
    where = ("tests/engine/test_on_a_gpu.py",) if arguments.quick else ("tests",)
    yield Item("tests", "tests", (*tests, *where), "tests.json", GUESSES["tests"])
    size = QUICK_ZOO if arguments.quick else ("--size", "224", "--batch", "128", "--rounds", "15")
    how = ("--device", arguments.device, "--amp", "--channels-last", "--out", str(folder), "--fresh")
    for case in zoo.CASES:
        if not arguments.quick or case.key in QUICK_MODELS:
            command = (python, str(HERE / "zoo.py"), "--only", case.key, *size, *how)
            yield Item(case.key, "models", command, f"models/{case.key}.json", GUESSES["models"])
    for recipe, epochs in EPOCHS.items():
        # In one epoch everything is pruned: the window of the paper leaves the first epochs alone.
        settings = ["precision=amp", "channels_last=true", "window=[0,null]"]
        if arguments.quick:
            epochs = 1
            settings += [*QUICK_RECIPE, *QUICK_NETS.get(recipe, QUICK_RESNET)]
        for method in METHODS:
            key = f"{recipe}-{method}"
            place = ("--data", arguments.data, *(["--download"] if arguments.download else []))
            command = (python, "-m", "halfway", "train", recipe, *settings, "--epochs", str(epochs), "--method", method)
            resume = ["--resume"] if not arguments.fresh and (runs / key / "config.yaml").exists() else []
            command = (*command, *place, "--out", str(runs / key), *resume)
            yield Item(key, "recipes", command, f"recipes/{key}.json", GUESSES[recipe])


def run(item: Item, folder: Path, runs: Path, device: torch.device) -> None:
    """Run an item and write its result. Raises RuntimeError with the reason if there is none."""
    begin = time.monotonic()
    if "--resume" not in item.command:
        shutil.rmtree(runs / item.key, ignore_errors=True)
    said, code = _shown(item.command, device)
    about = {"command": _typed(item.command), "minutes": (time.monotonic() - begin) / 60}
    if item.part == "tests" and (folder / "tests.xml").exists():
        found = gpu_page.read_tests(folder / "tests.xml")
        (folder / "tests.xml").unlink()
        write_json(folder / item.file, {**about, **environment(device), **found})
        if found["failed"]:
            raise RuntimeError(f"{len(found['failed'])} tests failed, see above")
    elif code:
        raise RuntimeError(said or f"exit code {code}")
    elif item.part == "recipes":
        result = RunResult.read(runs / item.key)
        figures = {
            "recipe": result.recipe.name,
            "method": result.method,
            "length": result.recipe.length,
            "steps": result.steps,
            "data": result.sessions[-1]["data"],
            "score": result.score,
            "cost": result.cost,
            "seconds": result.seconds,
            "waited": result.waited,
        }
        write_json(folder / item.file, {**about, **environment(device), **figures})


def _shown(command: tuple[str, ...], device: torch.device) -> tuple[str, int]:
    """Run a command and show what it prints. Returns the end of what it said on stderr, and its exit code."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device.type == "cpu" else {}
    path = os.pathsep.join(filter(None, [str(HERE.parent / "src"), str(HERE.parent), os.environ.get("PYTHONPATH")]))
    environment_ = {**os.environ, **hidden, "PYTHONPATH": path}
    lines: list[str] = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment_, cwd=HERE.parent) as process:
        assert process.stderr is not None
        for line in process.stderr:
            print(line, end="", file=sys.stderr, flush=True)
            lines = [*lines, line][-_TAIL:]
    return "".join(lines).strip(), process.returncode


def _typed(command: tuple[str, ...]) -> str:
    """The command without the paths of this machine."""
    words = ["python" if word == sys.executable else word.replace(f"{HERE.parent}{os.sep}", "") for word in command]
    return " ".join(words)


def card(device: torch.device) -> str:
    """The name of the card, as a folder."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")


def main(argv: list[str] | None = None) -> int:
    arguments = _parse(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("gpu.py: torch finds no CUDA device here; `--device cpu --quick` tries the kit out", file=sys.stderr)
        return 2
    device = torch.device(arguments.device)
    folder = (arguments.out or (MINIATURE if arguments.quick else HERE / "results" / "gpu")).resolve() / card(device)
    runs = (arguments.runs or (MINIATURE if arguments.quick else TRAININGS) / "trainings").resolve() / card(device)
    wanted = [i for i in items(arguments, folder, runs) if not arguments.only or {i.key, i.part} & set(arguments.only)]
    reasons = _reasons(folder)
    left = [i for i in wanted if arguments.fresh or i.key in reasons or not (folder / i.file).exists()]
    print(f"results: {folder}\n{len(wanted)} items, {len(wanted) - len(left)} of them have a result", flush=True)
    if not arguments.quick:
        print(f"about {sum(i.guess for i in left):.0f} minutes on a consumer card (a guess)", flush=True)
    begin = time.monotonic()
    for number, item in enumerate(left, 1):
        spent = (time.monotonic() - begin) / 60
        print(f"\n[{number}/{len(left)}, {spent:.0f} of {arguments.minutes:g} minutes] {item.key}", flush=True)
        reasons.pop(item.key, None)
        if spent > arguments.minutes:
            reasons[item.key] = f"not begun: the {arguments.minutes:g} minutes were over; the same command goes on"
        else:
            try:
                run(item, folder, runs, device)
            except (RuntimeError, OSError) as error:
                reasons[item.key] = str(error)
        if item.key in reasons:
            print(f"{item.key}: {reasons[item.key].splitlines()[-1]}", flush=True)
        write_json(folder / "not_run.json", reasons)
        gpu_page.write(folder)
    gpu_page.write(folder)
    missing = [i for i in wanted if i.key in reasons]
    print(f"\n{folder / 'README.md'}: {len(wanted) - len(missing)} results, {len(missing)} not run", flush=True)
    if not missing and device.type == "cuda":
        print(f"commit it: git add {folder} && git commit -m 'results: {card(device)}'")
    return 1 if missing else 0


def _reasons(folder: Path) -> dict[str, str]:
    path = folder / "not_run.json"
    reasons: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return reasons


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="CUDA_VISIBLE_DEVICES says which one")
    parser.add_argument("--quick", action="store_true", help="tiny models and data: does it run?")
    parser.add_argument("--only", nargs="+", metavar="ITEM", help="items, or parts: tests, models, recipes")
    parser.add_argument(
        "--data", metavar="DIR", help="folder of CIFAR (default: data; with --quick, synthetic pictures)"
    )
    parser.add_argument(
        "--download", action="store_true", help="fetch CIFAR-10 and CIFAR-100 first, if they are missing"
    )
    parser.add_argument("--minutes", type=float, default=55, help="begin nothing new after that (default: 55)")
    parser.add_argument("--fresh", action="store_true", help="measure again what has a result")
    parser.add_argument(
        "--out", type=Path, help="folder of the results (default: benchmarks/results/gpu; with --quick, runs/gpu-quick)"
    )
    parser.add_argument(
        "--runs", type=Path, help="folder of the trainings, which are no results (default: in runs/gpu)"
    )
    arguments = parser.parse_args(argv)
    arguments.data = arguments.data or ("synthetic" if arguments.quick else "data")
    known = {i.key for i in items(arguments, Path(), Path())} | {"tests", "models", "recipes"}
    if unknown := sorted(set(arguments.only or ()) - known):
        parser.error(f"--only {unknown[0]}: no such item; there are {', '.join(sorted(known))}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
