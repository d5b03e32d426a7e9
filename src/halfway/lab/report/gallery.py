"""The report's pictures: what PFB pruned and retained, and what its density is made of."""

from __future__ import annotations

import sys
from typing import Any

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


def galleries(runs: Runs, counts: dict[Group, Counts], pictures: Pictures) -> dict[str, Any] | None:
    """The samples pruned and retained most often; only a `reason` where they cannot be shown."""
    main = runs.main
    if main is None or main not in counts:
        return None
    if pictures.data is None:
        return {"reason": pictures.reason}
    found = counts[main]
    # If there are few samples, none should be in both galleries.
    pruned, retained = found.extremes(min(GALLERY, max(1, int((found.offered > 0).sum()) // 2)))
    rates = found.rates[found.offered > 0]
    cards = (
        ("Pruned most often", "common, says the density at the cut", pruned),
        ("Retained most often", "rare, says the density at the cut", retained),
    )
    return {
        "reason": "",
        "intro": f"{chosen(runs, main)} Of {len(rates):,} training samples.",
        "lowest": page.percent(rates.min()),
        "highest": page.percent(rates.max()),
        "kind": f"wide {pictures.kind}".strip(),
        "cards": [
            {"title": title, "note": note, "shown": [_sample(id, found, pictures) for id in ids]}
            for title, note, ids in cards
        ],
    }


def _sample(id: int, counts: Counts, pictures: Pictures) -> dict[str, Any]:
    assert pictures.data is not None
    label, rate = pictures.data.train.label(id), page.percent(counts.rates[id])
    times = f"{int(counts.retained[id])} of {int(counts.offered[id])}"
    image = pictures.image(id, f"{label or 'sample'}, retained in {rate} ({times})")
    return {"image": image, "label": label, "rate": rate}


def centroid_gallery(runs: Runs, pictures: Pictures, trust: bool) -> dict[str, Any] | None:
    """The centroids with pictures; `reason` or `untrusted` where they cannot be shown.

    trust: build the run's model even if that runs code that the run folder names.
    """
    main = runs.main
    if main is None:
        return None
    if pictures.data is None:
        return {"reason": pictures.reason}
    run = runs.example
    model = run.recipe.model
    if not trust and not nets.known(model.name, model.options):
        return {"reason": "", "untrusted": {"name": model.name, "options": bool(model.options)}}
    try:
        state = RunFolder(run.path).load()
        if state is None:
            return {"reason": "The checkpoint of the run is gone, and the centroids with it."}
        found = heaviest(run.recipe, state, pictures.data, CENTROIDS, NEAREST)
    except Exception as error:  # a model that is not halfway's own may fail in any way
        print(f"no centroids: {error or type(error).__name__}", file=sys.stderr)
        return {"reason": "The model of the run could not be restored by this version."}
    shown = []
    for centroid in found:
        labels = [pictures.data.train.label(id) for id in centroid.nearest]
        images = [
            pictures.image(id, label or "sample near a centroid")
            for id, label in zip(centroid.nearest, labels, strict=True)
        ]
        names = ", ".join(dict.fromkeys(filter(None, labels)))
        shown.append({"images": images, "share": page.percent(centroid.share, 1), "names": names})
    return {
        "reason": "",
        "untrusted": None,
        "shown": shown,
        "total": len(state["blocker"]["selector"]["counts"]),
        "of": plots.short(main),
        "seed": run.recipe.seed,
        "cut": run.recipe.cut,
        "nearest": NEAREST,
        "together": page.percent(sum(c.share for c in found)),
        "samples": f"{min(SAMPLES, len(pictures.data.train)):,}",
        "kind": pictures.kind,
    }
