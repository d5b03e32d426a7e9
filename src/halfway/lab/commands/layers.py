"""`halfway layers`: where could this model be cut, and what would that save?"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from . import add_command

if TYPE_CHECKING:
    from ...costs.layers import Layers
    from ...schedule import Schedule
    from ..models.by_name import Source

_DESCRIPTION = """\
List every sensible cut of a model with what blocking there would cost, before any training.

  cut      the name to pass as `at` to halfway.ForwardBlocker
  stage    of a timm model: its number there (as in out_indices) and its resolution
  output   shape of one sample's features there
  F/T      FLOPs of the shallow forward relative to a whole training step (forward and backward) of the model
  p=0.3    cost of a step that prunes 30 % of its samples: (1 - p) + p * F/T, where 1 is training on all samples
  run p=   cost of a whole run, in whose first and last epochs nothing is pruned (--schedule, --length)

Auxiliary heads and layers within a branch of a block cannot be cut at and are not listed.

A shallow cut costs next to nothing, but its features know little; cuts with F/T up to about 0.1 are usual.
"""
_EPILOG = """\
examples:
  halfway layers resnet50
  halfway layers timm.models:resnet18      (torchvision's resnet18 would come first)
  halfway layers vit_small_patch16_224 --size 384 --schedule 15:265 --length 300
  halfway layers mypackage.models:make_encoder --input 128 --dtype int64
"""


def register(commands: Any) -> None:
    """Add `layers` to the command line."""
    parser = add_command(commands, "layers", "what each cut of a model would save", _DESCRIPTION, _EPILOG)
    parser.add_argument("model", help="a torchvision or timm name, or package.module:factory")
    add_input_options(parser, batch=2)
    parser.add_argument(
        "--schedule",
        default="5:80",
        metavar="START:STOP",
        help="the epochs in which samples are pruned (default: 5:80, the paper's for ResNet-50 on ImageNet)",
    )
    parser.add_argument("--length", type=int, default=90, help="epochs of the whole run (default: 90)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def add_input_options(parser: argparse.ArgumentParser, batch: int) -> None:
    """Add the options that describe the model's input."""
    parser.add_argument("--batch", type=int, default=batch, help=f"samples in a batch (default: {batch})")
    parser.add_argument("--size", type=int, help="of square RGB images (default: what the model is made for, or 224)")
    parser.add_argument("--input", metavar="SHAPE", help="shape of one sample if not an image, like 128 or 1,28,28")
    parser.add_argument("--dtype", default="float32", help="of the input; int64 for token ids (default: float32)")


def run(arguments: argparse.Namespace) -> int:
    """Print the table."""
    from ...costs.layers import RATIOS
    from ..models import by_name as models

    if arguments.batch < 2:
        raise ValueError("--batch must be at least 2: some models cannot train on a single sample")
    schedule = _schedule(arguments.schedule)
    source = models.Source(arguments.model, arguments.size, arguments.input, arguments.dtype)
    table = _survey(source, arguments.batch, schedule, arguments.length)
    if not arguments.json:
        print(table)
        return 0
    rows = [
        {
            "name": row.name,
            "type": row.type,
            "stage": row.stage,
            "output_shape": row.output_shape,
            "shallow_share": row.shallow_share,
            "step": {str(p): row.cost(p).step for p in RATIOS},
            "run": {str(p): row.cost(p).run for p in RATIOS},
        }
        for row in table
    ]
    setting = {"schedule": [schedule.start, schedule.stop], "length": arguments.length, "input": source.shape}
    print(json.dumps({"model": arguments.model, **setting, "layers": rows}, indent=2))
    return 0


def _schedule(text: str) -> Schedule:
    from ...schedule import Schedule

    start, _, stop = text.partition(":")
    try:
        return Schedule(int(start or 0), int(stop) if stop else None)
    except ValueError as error:
        raise ValueError(f"--schedule takes START:STOP, like 5:80, got {text!r} ({error})") from None


def _survey(source: Source, batch: int, schedule: Schedule, length: int) -> Layers:
    """Count on the meta device, which computes nothing; on the CPU for a model that needs real values."""
    import torch

    from ...costs.layers import layers

    try:
        with torch.device("meta"):
            model = source.build()
    except (NotImplementedError, RuntimeError):  # it looks at values while it is built
        model = source.build().to("meta")
    try:
        return layers(model.train(), source.example(batch, "meta"), schedule=schedule, length=length)
    except Exception as error:
        on_meta = error
    model = source.build().train()
    try:
        table = layers(model, source.example(batch), schedule=schedule, length=length)
    except Exception as error:
        raise ValueError(source.refused(error)) from error
    print(f"(counted on the CPU; on the meta device: {str(on_meta).splitlines()[0]})", file=sys.stderr)
    return table
