"""The report of a folder of subset files: how far the methods agree, and which images each of them likes.

Shapes: K methods, N training images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...coresets import METHODS, Coreset
from ..coresets.chosen import read
from ..files import write_whole
from ..recipes import schema as recipes
from . import page
from .page import Theme
from .pictures import Pictures, load_pictures

SHOWN = 12
# More methods than this have no numbers in the picture.
LEGIBLE = 20


@dataclass(frozen=True)
class Opinion:
    """What one method says about every image.

    label: the method, and its settings where several files differ in them.
    values_N: larger = rather retained: its scores, or 1 for the chosen images where it scores none.
    """

    label: str
    coreset: Coreset
    file: Path

    @property
    def scored(self) -> bool:
        return self.coreset.scores is not None

    @property
    def values_N(self) -> Tensor:
        if self.coreset.scores is not None:
            return self.coreset.scores.double()
        chosen_N = torch.zeros(self.coreset.num_samples, dtype=torch.float64)
        chosen_N[self.coreset.ids] = 1.0
        return chosen_N


def holds_subsets(folder: Path) -> bool:
    """Whether there are subset files in a folder."""
    return folder.is_dir() and any(read(path) is not None for path in folder.glob("*.pt"))


def write_to(folder: Path, out: Path, root: str | None, title: str | None = None) -> str:
    """Write the page; returns what to tell about it.

    Args:
        root: where the data are; None: where they were.
    """
    found = opinions(folder)
    write_whole(out, write(found, root, title))
    return f"{len(found)} methods. Look at {out}"


def opinions(folder: Path) -> list[Opinion]:
    """One of each method and its settings, in the order of `METHODS`: of several ratios the one nearest to one half, of
    several seeds the first."""
    files = {path: coreset for path in sorted(folder.glob("*.pt")) if (coreset := read(path)) is not None}
    if not files:
        raise FileNotFoundError(f"there is no subset file in {folder}; `halfway coreset` makes them")
    if len({coreset.fingerprint for coreset in files.values()}) > 1:
        raise ValueError(f"the subset files in {folder} are of different data sets; write a report for each")
    ordered = sorted(files.items(), key=lambda item: _preference(item[1]))
    best: dict[tuple[str, str], tuple[Path, Coreset]] = {}
    for path, coreset in ordered:
        best.setdefault((coreset.method, _settings(coreset)), (path, coreset))
    several = {method for method, _ in best if sum(other == method for other, _ in best) > 1}
    made = [
        Opinion(f"{method} {settings}".strip() if method in several else method, coreset, path)
        for (method, settings), (path, coreset) in best.items()
    ]
    names = list(METHODS)
    return sorted(made, key=lambda o: (names.index(o.coreset.method) if o.coreset.method in names else 99, o.label))


def rank_correlations(values: Sequence[Tensor]) -> Tensor:
    """(K, K) Spearman's, equal values with their mean rank; NaN for a method that says the same of all images."""
    import numpy as np
    from scipy.stats import rankdata

    ranks_KN = np.stack([rankdata(v.numpy()) for v in values])
    with np.errstate(divide="ignore", invalid="ignore"):
        return torch.from_numpy(np.atleast_2d(np.corrcoef(ranks_KN)))


def write(found: Sequence[Opinion], root: str | None, title: str | None = None) -> str:
    """The page."""
    first = found[0].coreset
    recipe = recipes.from_dict(first.made_from["settings"])
    pictures = load_pictures(recipe, root, first.num_samples)
    labels = [opinion.label for opinion in found]
    matrix_KK = rank_correlations([opinion.values_N for opinion in found])
    return page.render(
        "",
        template="coresets.html",
        over=title or f"halfway report · coresets of {recipe.name}",
        headline=_headline(labels, matrix_KK),
        scale=f"{recipe.title} · {first.made_from['data']}",
        matrix=_figure(labels, matrix_KK, [opinion.scored for opinion in found]),
        rows=[_row(opinion) for opinion in found],
        reason=pictures.reason,
        kind="" if pictures.data is None else f"wide {pictures.kind}".strip(),
        galleries=[] if pictures.data is None else [_gallery(o, pictures) for o in found if o.scored],
    )


def _headline(labels: Sequence[str], matrix_KK: Tensor) -> str:
    pairs = [
        (float(matrix_KK[i, j]), f"{labels[i]} and {labels[j]}")
        for i in range(len(labels))
        for j in range(i)
        if matrix_KK[i, j].isfinite()
    ]
    if not pairs:
        return f"{labels[0]}: which images it retains" if len(labels) == 1 else f"{len(labels)} methods, one data set"
    (low, least), (high, most) = min(pairs), max(pairs)
    if len(pairs) == 1:
        return f"{most} rank the images with a correlation of {high:.2f}"
    return f"{most} agree most on which images to retain (rank correlation {high:.2f}), {least} least ({low:.2f})"


def _figure(labels: Sequence[str], matrix_KK: Tensor, scored: Sequence[bool]) -> page.PageFigure | None:
    if len(labels) < 2:
        return None
    names = [label if mine else f"{label} *" for label, mine in zip(labels, scored, strict=True)]

    def draw(axes: Any, theme: Theme) -> None:
        axes.imshow(matrix_KK.numpy(), cmap="RdBu_r", vmin=-1, vmax=1)
        axes.set_anchor("N")
        axes.set_xticks(range(len(names)), names, rotation=90, fontsize=8)
        axes.set_yticks(range(len(names)), names, fontsize=8)
        for i, row in enumerate(matrix_KK.tolist()):
            for j, value in enumerate(row):
                text = f"{round(value, 2) + 0.0:.2f}".replace("0.", ".") if value == value else "–"
                colour = "#ffffff" if abs(value) > 0.6 else "#222222"
                if len(names) <= LEGIBLE:
                    axes.text(j, i, text, ha="center", va="center", color=colour, fontsize=6)

    text = "; ".join(
        f"{labels[i]} with {labels[j]} {float(matrix_KK[i, j]):.2f}" for i in range(len(labels)) for j in range(i)
    )
    chosen = " *: chooses jointly and scores none; here 1 for the images it chose and 0 for the others."
    return page.figure(
        "Rank correlation of the methods' scores",
        draw,
        f"Heat map of Spearman's rank correlation between the scores: {text}.",
        "Spearman's, over all training images. Red: the two retain the same images first; blue: the opposite ones."
        + ("" if all(scored) else chosen),
        height=max(3.5, 1.6 + 0.28 * len(labels)),
    )


def _row(opinion: Opinion) -> list[str]:
    made = opinion.coreset
    share, runs = len(made) / made.num_samples, float(made.cost.get("runs", 0.0))
    return [
        opinion.label,
        f"{share:.3f}",
        f"{1 - share:.3f}",
        f"{len(made):,} of {made.num_samples:,}",
        f"{runs:.3f}" + (f" ({made.cost['set']})" if made.cost.get("set") else ""),
        f"{share + runs:.3f}",
        opinion.file.name,
    ]


def _gallery(opinion: Opinion, pictures: Pictures) -> dict[str, Any]:
    """The images that a method likes most and least."""
    order = opinion.values_N.argsort(descending=True, stable=True).tolist()
    count = min(SHOWN, len(order) // 2)
    cards = (("Likes most", order[:count]), ("Likes least", order[len(order) - count :][::-1]))
    return {
        "title": opinion.label,
        "cards": [{"title": title, "shown": [_shown(i, opinion, pictures) for i in ids]} for title, ids in cards],
    }


def _shown(id: int, opinion: Opinion, pictures: Pictures) -> dict[str, Any]:
    assert pictures.data is not None
    label, score = pictures.data.train.label(id), f"{float(opinion.values_N[id]):.3g}"
    return {"image": pictures.image(id, f"{label}, score {score}"), "label": label, "score": score}


def _settings(coreset: Coreset) -> str:
    """The method's own, without what every choice has."""
    own = {key: value for key, value in coreset.settings.items() if key not in ("keep", "class_balance", "seed")}
    source = coreset.cost.get("set", "")
    return ", ".join([*(f"{key} = {value}" for key, value in sorted(own.items())), *([source] if source else [])])


def _preference(coreset: Coreset) -> tuple[float, int]:
    return abs(coreset.settings["keep"] - 0.5), coreset.settings["seed"]
