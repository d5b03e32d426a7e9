"""Measures the whole zoo: `make bench`, or `python benchmarks/zoo.py`. At most 25 minutes on two quiet cores.

Each model's result is written to `benchmarks/results/models/` as it arrives, and the page of the results is written
anew. A model that has a result is not measured again, so an interrupted run resumes; `--fresh` starts over.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import page
from halfway.lab.bench import steps as bench
from halfway.lab.bench.table import text_table
from halfway.lab.environment import environment
from halfway.lab.files import write_json
from halfway.lab.models.by_name import build, random_input

COMMAND = "python benchmarks/zoo.py"


@dataclass(frozen=True)
class Case:
    """A model of the zoo.

    key: its file's name.
    title: in tables.
    build: makes the model.
    at: the cut.
    shape: of one sample.
    batch: samples.
    """

    key: str
    title: str
    build: Callable[[], nn.Module]
    at: str
    shape: tuple[int, ...]
    batch: int = 32


def unet() -> nn.Module:
    """Skip connections around the cut."""
    import segmentation_models_pytorch as smp

    return smp.Unet("resnet18", encoder_weights=None)


CASES = (
    Case("resnet18", "ResNet-18", lambda: build("resnet18"), "layer1", (3, 96, 96)),
    Case("resnet50", "ResNet-50", lambda: build("resnet50"), "layer2", (3, 96, 96)),
    Case("mobilenet_v3_large", "MobileNetV3-Large", lambda: build("mobilenet_v3_large"), "features.4", (3, 128, 128)),
    Case("efficientnet_b0", "EfficientNet-B0", lambda: build("efficientnet_b0"), "features.3", (3, 96, 96)),
    Case("convnext_tiny", "ConvNeXt-T", lambda: build("convnext_tiny"), "features.1", (3, 96, 96)),
    Case("swin_t", "Swin-T", lambda: build("swin_t"), "features.1", (3, 96, 96)),
    Case("vit_small", "ViT-S/16", lambda: build("vit_small_patch16_224", size=96), "blocks.2", (3, 96, 96)),
    Case(
        "deeplabv3_resnet50",
        "DeepLabV3-R50",
        lambda: build("deeplabv3_resnet50", aux_loss=True),
        "backbone.layer3",
        (3, 96, 96),
        batch=10,
    ),
    Case("unet_resnet18", "U-Net-R18", unet, "encoder.layer2", (3, 96, 96), batch=20),
)


def run_cases(
    cases: Iterable[Case], folder: Path, command: str, rounds: int = 15, seed: int = 0, fresh: bool = False
) -> list[str]:
    """Measure every case that has no result in `folder/models` yet, and write each as it arrives.

    Returns:
        the keys of the cases that were measured.
    """
    done = []
    for case in cases:
        path = folder / "models" / f"{case.key}.json"
        if path.exists() and not fresh:
            continue
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = case.build().train()
            x = random_input((case.batch, *case.shape))
            result = bench.compare(model, case.at, x, rounds=rounds, seed=seed, progress=case.title)
        about = {"title": case.title, "command": f"{command} --only {case.key} --rounds {rounds}"}
        write_json(path, {**about, **environment(x.device), **result})
        done.append(case.key)
        del model, x
        gc.collect()
    return done


def main() -> int:
    """Measure what is missing, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[c.key for c in CASES], metavar="MODEL", help="only these")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--fresh", action="store_true", help="measure again what has a result")
    parser.add_argument("--out", type=Path, default=page.RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    for case in CASES:
        if arguments.only and case.key not in arguments.only:
            continue
        if run_cases([case], arguments.out, COMMAND, arguments.rounds, fresh=arguments.fresh):
            result = json.loads((arguments.out / "models" / f"{case.key}.json").read_text())
            print(f"{case.title}: {text_table(result)}\n", flush=True)
        else:
            print(f"{case.title}: has a result (--fresh measures again)", flush=True)
        page.write(arguments.out)
    _measure_selection(arguments.out, arguments.rounds, arguments.fresh)
    page.write(arguments.out)
    return 0


def _measure_selection(folder: Path, rounds: int, fresh: bool) -> None:
    path, reference = folder / "selection.json", folder / "models" / "resnet50.json"
    if not reference.exists() or (path.exists() and not fresh):
        return
    full = json.loads(reference.read_text())
    overhead = bench.selection_overhead(full["ways"]["full"]["seconds"] / full["input"][0], rounds)
    write_json(path, {"command": COMMAND, **environment(torch.device("cpu")), **overhead})


if __name__ == "__main__":
    sys.exit(main())
