"""`halfway bench`: what does a step of this model cost, measured here?"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from typing import Any

from . import add_command
from .layers import add_input_options

_DESCRIPTION = """\
Measure one training step of a model on this machine, relative to training on all samples, in five ways:

  full       all samples
  index      cut the feature map to the retained rows; autograd still runs through the other rows
  recompute  halfway with reuse="recompute": the shallow layers run twice for the retained samples
  replay     halfway with reuse="replay": the shallow forward for all, everything else for the retained only
  limit      only the retained samples, as if the others had never existed

FLOPs are counted; predicted is (1 - p) + p * F/T for replay, with the shallow forward's share F/T of a step. Wall time
is the median over rounds that run every way once, each relative to that round's full step. Peak memory is what a step
allocates at most. The optimizer's step is not included: it costs the same for any number of samples. Run it while
nothing else runs. `halfway layers MODEL` lists the cuts.
"""
_EPILOG = """\
examples:
  halfway bench resnet50 --at layer2 --size 96
  halfway bench mypackage.models:make_encoder --at encoder.layer.2 --input 128 --dtype int64
"""


def register(commands: Any) -> None:
    """Add `bench` to the command line."""
    parser = add_command(commands, "bench", "what a step of a model costs, measured", _DESCRIPTION, _EPILOG)
    parser.add_argument("model", help="a torchvision or timm name, or package.module:factory")
    parser.add_argument("--at", required=True, metavar="LAYER", help="the cut")
    parser.add_argument("--prune-ratio", type=float, default=0.4, metavar="P", help="in (0, 1) (default: 0.4)")
    add_input_options(parser, batch=32)
    parser.add_argument("--rounds", type=int, default=15, help="of the wall time (default: 15)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, inputs and retained rows (default: 0)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    parser.add_argument("--json", action="store_true", help="print JSON, with versions and machine")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure the five ways and print the result."""
    import torch

    from .. import devices
    from ..bench import steps as bench
    from ..bench.table import text_table
    from ..environment import environment
    from ..models import by_name as models

    device = devices.named(arguments.device)
    source = models.Source(arguments.model, arguments.size, arguments.input, arguments.dtype)
    torch.manual_seed(arguments.seed)
    model = source.build().train().to(device)
    x = source.example(arguments.batch, device)
    try:
        bench.train(model, x)
    except Exception as error:
        raise ValueError(source.refused(error)) from error
    result = bench.compare(
        model,
        arguments.at,
        x,
        prune_ratio=arguments.prune_ratio,
        rounds=arguments.rounds,
        seed=arguments.seed,
        progress=arguments.model if sys.stderr.isatty() else None,
    )
    if arguments.json:
        about = {"title": arguments.model, "command": shlex.join(["halfway", *sys.argv[1:]])}
        print(json.dumps({**about, **environment(device), **result}, indent=2))
    else:
        print(f"{arguments.model}: {text_table(result)}")
    return 0
