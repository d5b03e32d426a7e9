"""`halfway demo`: see the method at work, and what it costs, in a few minutes on a laptop."""

from __future__ import annotations

import argparse
import os
import platform
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

_HELP = """\
Trains a small ResNet on 1,200 real handwritten digits (they ship with scikit-learn; nothing is downloaded),
three times per seed: on all data, with random pruning, and with PFB (Partial Forward Blocking). The three
start from the same weights, see the same batches, and advance side by side, so that only the pruning differs.

It prints a table and writes a page to look at:
  accuracy         on 597 held-out images after the last epoch, mean ± standard error over seeds
  vs random        paired by seed; random pruning is the rival to beat, since it costs nothing at all
  effective ratio  share of samples that were pruned: in the epochs that prune (step), and in all (run)
  FLOPs            relative to full data, again for a pruned step and for the whole run
  wall time        of pruned epochs relative to the full epoch trained beside them: median [quartiles]

What it measures is what it reports: if random does as well, the page says so."""

_EXAMPLES = """\
examples:
  halfway demo                          about two minutes on two quiet cores
  halfway demo --prune-ratio 0.7        where the choice of samples matters more
  halfway demo --seeds 10 --out demo10  ten seeds: smaller errors, three times as long"""


def register(commands: Any) -> None:
    """Add `demo` to the command line."""
    parser = commands.add_parser(
        "demo",
        help="train on real digits with full data, random pruning and PFB, and write a page about it",
        description=_HELP,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out", default="halfway-demo", metavar="DIR", help="where index.html and results.json go (%(default)s)"
    )
    parser.add_argument(
        "--prune-ratio", type=float, default=0.5, metavar="P", help="share of each batch to prune (%(default)s)"
    )
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="repetitions (%(default)s)")
    parser.add_argument(
        "--epochs", type=int, default=10, metavar="N", help="the first and last tenth see all data (%(default)s)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train, print the table, write the page."""
    from ..demo import demo
    from ..demo import page as demo_page
    from ..demo import summary as demo_summary
    from ..files import write_json, write_whole

    settings = demo.Settings(arguments.prune_ratio, arguments.seeds, arguments.epochs)
    out = _folder(arguments.out)
    digits = demo.load_digits()
    print(
        f"Training {len(digits.train_labels):,} digits for {settings.epochs} epochs, {settings.seeds} seed(s), "
        "three methods side by side."
    )
    start = time.perf_counter()
    records = demo.train_all(settings, digits)
    environment = _environment(_command(arguments), time.perf_counter() - start)
    summary = demo_summary.summarise(records, settings, digits)
    print(f"\n{demo_summary.table_text(summary)}\n")
    print("\n".join(demo_summary.reading(summary)))
    results = demo_summary.as_json(summary, records, digits, environment)
    write_json(out / "results.json", results, indent=1)
    write_whole(out / "index.html", demo_page.page(summary, records, digits, environment))
    print(f"\nLook at {out / 'index.html'}")
    return 0


def _folder(name: str) -> Path:
    """The output folder, made before any training: a run should not fail at its end."""
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {name!r} cannot be made a folder ({error.strerror}); choose another") from error
    if not os.access(folder, os.W_OK):
        raise ValueError(f"--out {name!r} is not writable; choose another folder")
    return folder


def _command(arguments: argparse.Namespace) -> str:
    out = "" if arguments.out == "halfway-demo" else f" --out {Path(arguments.out).name}"
    options = f"--prune-ratio {arguments.prune_ratio} --seeds {arguments.seeds} --epochs {arguments.epochs}"
    return f"halfway demo {options}{out}"


def _environment(command: str, seconds: float) -> dict[str, Any]:
    import torch

    import halfway

    return {
        "command": command,
        "versions": {"halfway": halfway.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "seconds": seconds,
    }
