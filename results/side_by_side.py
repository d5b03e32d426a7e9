"""The tables of results/rivals.md that put both data sets side by side, from their results.json.

python results/side_by_side.py
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from halfway.lab.comparison import results
from halfway.lab.comparison.paired import Difference
from halfway.lab.comparison.results import Row
from halfway.lab.comparison.verdict import verdict
from halfway.lab.recipes import methods
from halfway.tables import markdown

FOLDERS = ("rivals-cifar10", "rivals-cifar100")
RATIOS = (0.3, 0.5, 0.7)
# By price, then by what is alike.
ORDER = [
    *("full", "random", "balanced_remembered", "rotate", "last_loss", "last_loss_hard"),
    *("infobatch", "infobatch_dagger", "rs2", "random_subset", "epsilon_greedy", "ucb", "dyn_unc"),
    *("balanced", "density_public", "pfb"),
    *("rho", "grad_norm", "divbs", "selective_backprop", "uncertainty", "loss_rank", "loss"),
]
LOOKS_AT = {"nothing": "nothing", "features": "shallow layers", "outputs": "outputs"}

Rows = dict[tuple[str, float | None], Row]


def main() -> None:
    read = [results.read(Path(__file__).parent / folder) for folder in FOLDERS]
    sets = [by_method(found.rows) for found in read if found is not None]
    withdrawn = by_method(row for found in read if found is not None for row in found.withdrawn)
    kinds = (" (n)", ", vs random", ", vs random, same cost")
    columns = [f"{name}{kind}" for name in ("CIFAR-10", "CIFAR-100") for kind in kinds]
    for ratio in RATIOS:
        header = [f"p = {ratio}", "looks at", "FLOPs, run", *columns]
        rows = []
        for name in ORDER:
            found = [every.get((name, None if name == "full" else ratio)) for every in sets]
            if any(found):
                flops = " / ".join(dict.fromkeys(f"{row.cost:.3f}" for row in found if row))
                rows.append([f"`{name}`", looks_at(name), flops, *cells(found[0]), *cells(found[1])])
            elif (name, ratio) in withdrawn:  # why is said in results/README.md
                cost = f"{withdrawn[name, ratio].cost:.3f}"
                rows.append([f"`{name}`", looks_at(name), cost, *["withdrawn", "", ""] * 2])
        print(markdown(header, rows, words=len(header)), end="\n\n")


def by_method(rows: Iterable[Row]) -> Rows:
    return {(row.group.method, row.group.ratio): row for row in rows}


def looks_at(name: str) -> str:
    if name == "full" or name in methods.WHOLE_BATCHES:
        return ""
    method = methods.find(name)
    if method.before_epoch:
        return "nothing, not loaded"
    return LOOKS_AT[method.needs]


def cells(row: Row | None) -> list[str]:
    if row is None:
        return ["", "", ""]
    score = f"{row.mean:.2f} ± {row.error:.2f} ({len(row.scores)})"
    return [score, *(bold(d) for d in (row.minus_random, row.minus_random_at_cost))]


def bold(d: Difference | None) -> str:
    """Bold where the interval leaves out zero."""
    if d is None:
        return ""
    return str(d) if verdict(d) == "not told apart" else f"**{d}**"


if __name__ == "__main__":
    main()
