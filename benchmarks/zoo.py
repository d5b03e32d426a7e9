"""Measures the whole zoo: `make bench`, or `python benchmarks/zoo.py`. At most 25 minutes on two quiet cores.

On a GPU: `python benchmarks/zoo.py --device cuda --size 224 --batch 128 --amp --channels-last --out FOLDER`. `make gpu`
does that, and more.

Each model's result is written to `benchmarks/results/models/` as it arrives, and the page of the results is written
anew. A model that has a result is not measured again, so an interrupted run resumes; `--fresh` starts over.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import page
from halfway.lab import devices
from halfway.lab.bench import steps as bench
from halfway.lab.bench.table import text_table
from halfway.lab.environment import environment
from halfway.lab.files import write_json
from halfway.lab.models.by_name import build, random_input

COMMAND = "python benchmarks/zoo.py"
SMALLEST = 8  # samples


@dataclass(frozen=True)
class Case:
    """A model of the zoo.

    key: its file's name.
    title: in tables.
    build: makes the model.
    at: the cut.
    shape: of one sample.
    batch: samples.
    sized: whether `build` must be told the size of the images.
    """

    key: str
    title: str
    build: Callable[..., nn.Module]
    at: str
    shape: tuple[int, ...]
    batch: int = 32
    sized: bool = False

    def resized(self, size: int | None, batch: int | None) -> Case:
        """The same at another size of images, or with another number of them."""
        shape = self.shape if size is None else (*self.shape[:-2], size, size)
        return replace(self, shape=shape, batch=batch or self.batch)

    def model(self) -> nn.Module:
        return self.build(self.shape[-1]) if self.sized else self.build()


@dataclass(frozen=True)
class Circumstances:
    """Where and how steps are taken. amp: autocast, to float16 on CUDA and to bfloat16 elsewhere."""

    device: torch.device
    amp: bool = False
    channels_last: bool = False

    @property
    def autocast(self) -> torch.dtype | None:
        half = torch.float16 if self.device.type == "cuda" else torch.bfloat16
        return half if self.amp else None

    def place(self, t: Any) -> Any:
        """A model, or a batch of images."""
        t = t.to(self.device)
        return t.to(memory_format=torch.channels_last) if self.channels_last else t


PLAIN = Circumstances(torch.device("cpu"))


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
    Case(
        "vit_small",
        "ViT-S/16",
        lambda size: build("vit_small_patch16_224", size=size),
        "blocks.2",
        (3, 96, 96),
        sized=True,
    ),
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
    cases: Iterable[Case],
    folder: Path,
    command: str,
    rounds: int = 15,
    seed: int = 0,
    fresh: bool = False,
    circumstances: Circumstances = PLAIN,
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
        result = _fitting(case, rounds, seed, circumstances)
        about = {"title": case.title, "command": f"{command} --only {case.key} --rounds {rounds}"}
        write_json(path, {**about, **environment(circumstances.device), **result})
        done.append(case.key)
    return done


def _fitting(case: Case, rounds: int, seed: int, circumstances: Circumstances) -> dict[str, Any]:
    """Measure with as many samples as fit: the batch is halved as long as memory runs out."""
    batch = case.batch
    while True:
        try:
            result = _measure(replace(case, batch=batch), rounds, seed, circumstances)
        except torch.OutOfMemoryError:
            if batch < 2 * SMALLEST:
                raise
            print(f"{case.title}: {batch} samples do not fit, halved", flush=True)
        else:
            return result if batch == case.batch else {**result, "halved_from": case.batch}
        batch //= 2
        gc.collect()
        torch.cuda.empty_cache()


def _measure(case: Case, rounds: int, seed: int, circumstances: Circumstances) -> dict[str, Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = circumstances.place(case.model().train())
        x = circumstances.place(random_input((case.batch, *case.shape)))
        result = bench.compare(
            model, case.at, x, rounds=rounds, seed=seed, autocast=circumstances.autocast, progress=case.title
        )
    del model, x
    gc.collect()
    return {**result, "channels_last": circumstances.channels_last}


def main() -> int:
    """Measure what is missing, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[c.key for c in CASES], metavar="MODEL", help="only these")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--fresh", action="store_true", help="measure again what has a result")
    parser.add_argument("--out", type=Path, default=page.RESULTS, help="folder of the results")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    parser.add_argument("--size", type=int, metavar="PX", help="of the images (default: 96 or 128, by model)")
    parser.add_argument(
        "--batch", type=int, metavar="N", help="samples (default: 10 to 32, by model); halved if too many"
    )
    parser.add_argument("--amp", action="store_true", help="under autocast: float16 on CUDA, bfloat16 elsewhere")
    parser.add_argument("--channels-last", action="store_true", help="images and weights in this memory format")
    arguments = parser.parse_args()
    circumstances = Circumstances(devices.named(arguments.device), arguments.amp, arguments.channels_last)
    command = _command(arguments)
    for case in CASES:
        if arguments.only and case.key not in arguments.only:
            continue
        resized = case.resized(arguments.size, arguments.batch)
        if run_cases([resized], arguments.out, command, arguments.rounds, 0, arguments.fresh, circumstances):
            result = json.loads((arguments.out / "models" / f"{case.key}.json").read_text())
            print(f"{case.title}: {text_table(result)}\n", flush=True)
        else:
            print(f"{case.title}: has a result (--fresh measures again)", flush=True)
        page.write(arguments.out)
    if circumstances == PLAIN:
        _measure_selection(arguments.out, arguments.rounds, arguments.fresh)
    page.write(arguments.out)
    return 0


def _command(arguments: argparse.Namespace) -> str:
    """What repeats a measurement, without the model and the rounds."""
    words = [COMMAND]
    for name, default in (("device", "cpu"), ("size", None), ("batch", None)):
        value = getattr(arguments, name)
        words += [] if value == default else [f"--{name} {value}"]
    return " ".join([*words, *(["--amp"] * arguments.amp), *(["--channels-last"] * arguments.channels_last)])


def _measure_selection(folder: Path, rounds: int, fresh: bool) -> None:
    path, reference = folder / "selection.json", folder / "models" / "resnet50.json"
    if not reference.exists() or (path.exists() and not fresh):
        return
    full = json.loads(reference.read_text())
    overhead = bench.selection_overhead(full["ways"]["full"]["seconds"] / full["input"][0], rounds)
    write_json(path, {"command": COMMAND, **environment(torch.device("cpu")), **overhead})


if __name__ == "__main__":
    sys.exit(main())
