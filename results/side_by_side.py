"""The tables of results/ that put several comparisons side by side, from their results.json.

python results/side_by_side.py rivals      the tables of rivals.md
python results/side_by_side.py coresets    the paper's Table 1 in small, of coresets.md
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from scipy.stats import spearmanr

from halfway.lab.comparison import results
from halfway.lab.comparison.paired import Difference, difference, residual
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

# The paper's Table 1: CIFAR-10 at 30, 50 and 70 %, and CIFAR-100 at 50 %.
PAPER = {
    "full": ("95.6", "78.2"),
    "pfb": ("95.9 / 95.5 / 95.2", "78.8"),
    "divbs": ("95.4 / 95.2 / 95.1", "78.2"),
    "random_subset": ("94.6 / 93.3 / 90.2", "72.1"),
    "herding": ("92.2 / 88.0 / 80.1", "71.8"),
    "k_center": ("94.7 / 93.9 / 90.9", "72.2"),
    "svp": ("95.0 / 94.5 / 90.3", "72.3"),
    "moderate": ("93.7 / 92.6 / 90.6", "68.3"),
    "forgetting": ("94.7 / 94.1 / 91.7", "73.1"),
    "aum": ("95.1 / 95.3 / 91.4", "67.4"),
    "ccs": ("95.4 / 95.0 / 93.0", "74.5"),
    "el2n": ("95.3 / 95.1 / 91.9", "72.1"),
    "grand": ("95.3 / 94.6 / 91.2", "71.4"),
    "craig": ("94.8 / 93.3 / 88.4", "71.9"),
    "glister": ("95.2 / 94.0 / 90.9", "73.2"),
    "influence": ("93.1 / 91.3 / 88.3", "72.0"),
    "dataset_pruning": ("94.9 / 93.8 / 90.8", "73.1"),
    "moso": ("", "72.3"),
}
# Heading, folder and ratio of each column of ours. The rows are in the order of the second.
TABLE_1 = {
    "CIFAR-10, p = 0.3": ("coresets-cifar10-ratios", 0.3),
    "CIFAR-10, p = 0.5": ("coresets-cifar10", 0.5),
    "CIFAR-10, p = 0.7": ("coresets-cifar10-ratios", 0.7),
    "CIFAR-100, p = 0.5": ("coresets-cifar100", 0.5),
    "Fashion-MNIST, p = 0.5": ("coresets-fashion-mnist", 0.5),
}
# Those of them that the paper has too, in its order.
ITS_COLUMNS = tuple(TABLE_1)[:4]

Rows = dict[tuple[str, float | None], Row]


def rivals() -> None:
    """Every method beside random pruning, on both data sets."""
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


def coresets() -> None:
    """The paper's Table 1 in small. Cells: the score and, in brackets, its difference to random pruning per batch. The
    proxies' cost, in runs on all data, is that of CIFAR-10."""
    columns = {heading: rows for heading, (folder, ratio) in TABLE_1.items() if (rows := of_ratio(folder, ratio))}
    order = sorted(columns["CIFAR-10, p = 0.5"].values(), key=lambda row: -row.mean)
    header = ["", "the paper's, CIFAR-10 at 30 / 50 / 70 %", "CIFAR-100 at 50 %", "proxies", *columns]
    table = []
    for first in order:
        name = first.group.method
        proxies = "" if first.with_proxy is None else f"{first.with_proxy - first.cost:.2f}"
        found = [column.get(name) for column in columns.values()]
        scores = ["" if row is None else scored(row) for row in found]
        table.append([f"`{name}`", *PAPER.get(name, ("", "")), proxies, *scores])
    halves = [half_an_interval(column.values()) for column in columns.values()]
    table.append(["*half an interval*", "", "", "", *halves])
    orders = [rank_correlation(heading, column) for heading, column in columns.items()]
    table.append(["*rank correlation with the paper's*", "", "", "", *orders])
    print(markdown(header, table), end="\n\n")
    best_of_each(columns)
    equal_steps(columns["CIFAR-10, p = 0.5"])
    switched_off()


def best_of_each(columns: dict[str, dict[str, Row]]) -> None:
    """The best of those that decide once by a proxy, beside what takes as many steps without one."""
    table = []
    for heading, rows in columns.items():
        pooled = residual({row.group: row.scores for row in rows_of(TABLE_1[heading][0])})
        by_proxy = [row for name, row in rows.items() if row.with_proxy is not None and name != "random_coreset"]
        best = max(by_proxy, key=lambda row: row.mean)
        rivals = [rows[name].scores for name in ("random_coreset", "rs2", "shorter")]
        against = [bold(difference(best.scores, rival, pooled)) for rival in rivals]
        table.append([heading, f"`{best.group.method}`", f"{best.mean:.2f}", *against])
    print(markdown(["", "best by a proxy", "score", "to random_coreset", "to rs2", "to shorter"], table), end="\n\n")


def equal_steps(equal_epochs: dict[str, Row]) -> None:
    """Half of the images, in as many steps as all of them take: at the cost of full data, to which it is compared."""
    rows = of_ratio("coresets-equal-steps", 0.5)
    full = rows.pop("full")
    table = [["`full`", "", f"{full.mean:.2f}", ""]]
    for row in sorted(rows.values(), key=lambda row: -row.mean):
        name = row.group.method
        table.append([f"`{name}`", f"{equal_epochs[name].mean:.2f}", f"{row.mean:.2f}", bold(row.minus_full)])
    header = ["p = 0.5", "half of the steps", "as many steps as full data", "to full data"]
    print(markdown(header, table), end="\n\n")


def switched_off() -> None:
    """What Craig's weights and the class balance of CCS do."""
    table = []
    for folder in ("coresets-craig", "coresets-ccs"):
        on, off = rows_of(folder)
        change = difference(off.scores, on.scores, residual({"on": on.scores, "off": off.scores}))
        table.append([off.group.label, f"{on.mean:.2f}", f"{off.mean:.2f}", bold(change)])
    print(markdown(["", "with it", "without", "difference"], table))


def of_ratio(folder: str, ratio: float) -> dict[str, Row]:
    """The rows of a comparison at one ratio, and full data; nothing if it was not run."""
    return {row.group.method: row for row in rows_of(folder) if row.group.ratio in (None, ratio)}


def rows_of(folder: str) -> list[Row]:
    read = results.read(Path(__file__).parent / folder)
    return [] if read is None else list(read.rows)


def scored(row: Row) -> str:
    to_random = row.minus_random or row.minus_random_at_cost
    if to_random is None:
        return f"{row.mean:.2f}"
    told = f"({to_random.mean:+.2f})"
    return f"{row.mean:.2f} {told if verdict(to_random) == 'not told apart' else f'**{told}**'}"


def half_an_interval(rows: Iterable[Row]) -> str:
    """Of the differences to random pruning: one number, since they share their spread and their seeds."""
    found = (row.minus_random for row in rows)
    return " to ".join(sorted({f"{d.high - d.mean:.2f}" for d in found if d is not None and d.high is not None}))


def rank_correlation(heading: str, ours: dict[str, Row]) -> str:
    """Of the scores of those methods that decide once by a proxy, in the paper's column and in ours."""
    if heading not in ITS_COLUMNS:
        return ""
    place = ITS_COLUMNS.index(heading)
    theirs = {name: " / ".join(cells).split(" / ")[place] for name, cells in PAPER.items() if "/" in cells[0]}
    common = [name for name, row in ours.items() if row.with_proxy is not None and name in theirs]
    found = spearmanr([float(theirs[name]) for name in common], [ours[name].mean for name in common])
    return f"{found.statistic:+.2f} ({len(common)} methods)"


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
    tables = {"rivals": rivals, "coresets": coresets}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=tables)
    tables[parser.parse_args().table]()
