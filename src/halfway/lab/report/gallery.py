"""The report's pictures: what PFB pruned and retained, and what its density is made of."""

from __future__ import annotations

import html
import sys
from collections.abc import Sequence

from ..comparison.trials import Group
from ..models import small as nets
from ..training.run_folder import RunFolder
from . import page, plots
from .centroids import SAMPLES, heaviest
from .counts import Counts
from .pictures import Pictures
from .retention import chosen
from .runs import Runs

GALLERY = 24
CENTROIDS = 16
NEAREST = 4


def galleries(runs: Runs, counts: dict[Group, Counts], pictures: Pictures) -> str:
    main = runs.main
    if main is None or main not in counts:
        return ""
    head = "<h2>What PFB pruned, and what it retained</h2>"
    if pictures.data is None:
        return f'{head}<div class="note"><p>{html.escape(pictures.reason)}</p></div>'
    found = counts[main]
    # Of few samples, none should be in both galleries.
    pruned, retained = found.extremes(min(GALLERY, max(1, int((found.offered > 0).sum()) // 2)))
    rates = found.rates[found.offered > 0]
    return (
        f'{head}<p class="soft">{html.escape(chosen(runs, main))} Of {len(rates):,} training samples. Below each: its '
        "class, and in how many of the pruned batches it was in it was retained. The range is "
        f"{page.percent(rates.min())} to {page.percent(rates.max())}.</p>"
        + page.pair(
            _gallery("Pruned most often", "common, says the density at the cut", pruned, found, pictures),
            _gallery("Retained most often", "rare, says the density at the cut", retained, found, pictures),
        )
    )


def _gallery(title: str, note: str, ids: Sequence[int], counts: Counts, pictures: Pictures) -> str:
    assert pictures.data is not None
    items = []
    for id in ids:
        label, rate = pictures.data.train.label(id), page.percent(counts.rates[id])
        times = f"{int(counts.retained[id])} of {int(counts.offered[id])}"
        image = pictures.image(id, f"{label or 'sample'}, retained in {rate} ({times})")
        caption = f"<b>{html.escape(label)}</b><br>{rate}" if label else rate
        items.append(f"<li>{image}<span>{caption}</span></li>")
    return page.gallery(title, note, items, f"wide {pictures.kind}".strip())


def centroid_gallery(runs: Runs, pictures: Pictures, trust: bool) -> str:
    """The centroids with pictures. trust: build the run's model even if that runs code that the run folder names."""
    main = runs.main
    if main is None:
        return ""
    head = "<h2>What the density is made of</h2>"
    if pictures.data is None:
        return f'{head}<div class="note"><p>{html.escape(pictures.reason)}</p></div>'
    run = runs.example
    model = run.recipe.model
    if not trust and not nets.known(model.name, model.options):
        name, options = html.escape(model.name), " with its options" if model.options else ""
        return (
            f'{head}<div class="note"><p>Left out: it needs the model of the run, <code>{name}</code>{options}, and '
            "building that may run code that is not halfway's. <code>halfway report ... --trust</code> builds it; only "
            "for runs of your own.</p></div>"
        )
    try:
        state = RunFolder(run.path).load()
        if state is None:
            return f'{head}<div class="note"><p>The checkpoint of the run is gone, and the centroids with it.</p></div>'
        found = heaviest(run.recipe, state, pictures.data, CENTROIDS, NEAREST)
    except Exception as error:  # a model of somebody's own may fail in any way
        print(f"no centroids: {error or type(error).__name__}", file=sys.stderr)
        return f'{head}<div class="note"><p>The model of the run could not be restored by this version.</p></div>'
    items = []
    for centroid in found:
        labels = [pictures.data.train.label(id) for id in centroid.nearest]
        images = "".join(
            pictures.image(id, label or "sample near a centroid")
            for id, label in zip(centroid.nearest, labels, strict=True)
        )
        names = html.escape(", ".join(dict.fromkeys(filter(None, labels))))
        items.append(f"<li><div>{images}</div><span><b>{page.percent(centroid.share, 1)}</b> {names}</span></li>")
    total = len(state["blocker"]["selector"]["counts"])
    together = page.percent(sum(c.share for c in found))
    return (
        f'{head}<p class="soft">The {len(found)} heaviest of the {total} centroids at the end of training '
        f"({html.escape(plots.short(main))}, seed {run.recipe.seed}, cut "
        f"<code>{html.escape(run.recipe.cut)}</code>), with the {NEAREST} training samples nearest to each. Below: its "
        f"share of the samples that the density has learned from; together {together}. Samples near a heavy centroid "
        f"are common, and pruned first. Nearest of {min(SAMPLES, len(pictures.data.train)):,} samples "
        f"spread over the training set, the model in eval mode.</p>"
        f'<div class="card"><ul class="centroids {pictures.kind}">{"".join(items)}</ul></div>'
    )
