"""The tables of results/README.md and README.md that put both data sets side by side, from their results.json.

python results/side_by_side.py            # a table for each ratio, as in results/README.md
python results/side_by_side.py --short    # differences to random at the same cost only, as in README.md
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from halfway.lab.recipes import methods

FOLDERS = ("rivals-cifar10", "rivals-cifar100")
RATIOS = (0.3, 0.5, 0.7)
# By price, then by what is alike.
ORDER = [
    *("full", "random", "balanced_remembered", "rotate", "last_loss", "last_loss_hard"),
    *("infobatch", "infobatch_dagger", "rs2", "random_subset", "epsilon_greedy", "ucb", "dyn_unc"),
    *("balanced", "density_public", "pfb"),
    *("rho", "grad_norm", "divbs", "selective_backprop", "uncertainty", "loss_rank", "loss"),
]
SHORT = ["balanced_remembered", "rotate", "last_loss", "balanced", "pfb", "infobatch", "ucb", *ORDER[17:20], "rho"]
# Runs that did not do what their method says; why is said in results/README.md. Their numbers stay in results.json.
WITHDRAWN = {"dyn_unc"}
LOOKS_AT = {"nothing": "nothing", "features": "shallow layers", "outputs": "outputs"}

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="only the differences to random at the same cost")
    sets = [rows_of(Path(__file__).parent / folder / "results.json") for folder in FOLDERS]
    if parser.parse_args().short:
        print(line(["", *(f"{c}, p = {p}" for c in ("C10", "C100") for p in RATIOS)]), line(["---"] * 7), sep="\n")
        for name in SHORT:
            print(line([name, *(difference(found.get((name, p)), bold=False) for found in sets for p in RATIOS)]))
        return
    kinds = (" (n)", ", - random", ", - random, same cost")
    columns = [f"{name}{kind}" for name in ("CIFAR-10", "CIFAR-100") for kind in kinds]
    for ratio in RATIOS:
        print(line([f"p = {ratio}", "looks at", "FLOPs, run", *columns]), line(["---"] * 9), sep="\n")
        for name in ORDER:
            found = [rows.get((name, None if name == "full" else ratio)) for rows in sets]
            if any(found):
                flops = " / ".join(dict.fromkeys(f"{row['flops'][1]:.3f}" for row in found if row))
                scores = ["withdrawn", "", ""] * 2 if name in WITHDRAWN else [*cells(found[0]), *cells(found[1])]
                print(line([f"`{name}`", looks_at(name), flops, *scores]))
        print()


def rows_of(path: Path) -> dict[tuple[str, float | None], Row]:
    rows = json.loads(path.read_text())["rows"]
    return {(row["group"]["method"], row["group"]["ratio"]): row for row in rows}


def looks_at(name: str) -> str:
    if name == "full":
        return ""
    method = methods.find(name)
    if method.before_epoch:
        return "nothing, not loaded"
    return LOOKS_AT["outputs" if name == "rho" else method.selector({}).needs]


def cells(row: Row | None) -> list[str]:
    if row is None:
        return ["", "", ""]
    score = f"{row['mean']:.2f} ± {row['error']:.2f} ({len(row['scores'])})"
    return [score, difference(row, "minus_random"), difference(row)]


def difference(row: Row | None, kind: str = "minus_random_at_cost", bold: bool = True) -> str:
    found = row and row[kind]
    if not found:
        return ""
    text = f"{found['mean']:+.2f} [{found['low']:+.2f}, {found['high']:+.2f}]"
    return f"**{text}**" if bold and (found["low"] > 0 or found["high"] < 0) else text


def line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
