"""The report of a study: the map, the primary family, every arm of every stage in one table to sort and filter."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

from ..study import claims, ledger, picture, plan, tables
from ..study.results import Study, collect
from . import page
from .cells import first_number

STUDY, RESULTS = "study.yaml", "runs.jsonl"
# The map has colours and markers of its own, made for a white ground.
_STYLE = "figure.map { background:#fff; color:#3d3d3a; } figure.map figcaption { color:#6f6e69; }"


def holds_study(folder: Path) -> bool:
    """Whether a folder holds a study and results of it."""
    return (folder / STUDY).is_file() and (folder / RESULTS).is_file()


def read(folder: Path) -> Study:
    """The study of a folder, with its results."""
    entries = ledger.read(folder / RESULTS)
    if not entries:
        raise ValueError(
            f"there are no results in {folder / RESULTS} yet; `halfway study {folder / STUDY}` trains them"
        )
    return collect(plan.read(folder / STUDY), entries)


def write(study: Study, folder: Path, title: str | None = None) -> str:
    """The page. title: the line above the headline; None: the folder's name."""
    there = [name for name in study.stages if study.gains[name]]
    primary = next((name for name in there if study.stages[name].get("primary")), None)
    family = None if primary is None else tables.primary(study, primary)
    return page.render(
        _STYLE,
        template="studies.html",
        over=title or f"halfway report · {folder.resolve().name}",
        headline=_headline(study, primary),
        scale=tables.provenance(study, there),
        map=_map(study, there),
        family=family,
        table=_table(study, there),
        notes=tables.NOTES,
        claims=[found for name in there if (found := _claims(study, name))],
        stages=[_stage(study, name) for name in study.stages],
        command=f"halfway study {folder / STUDY} --table",
    )


def _headline(study: Study, primary: str | None) -> str:
    if primary is None:
        return "No family of comparisons was named beforehand: all of this is exploratory"
    contenders = [each for each in study.gains[primary] if study.is_primary(each.arm)]
    better = dict.fromkeys(each.arm.name for each in contenders if study.word(each) == "better")
    if not better:
        count = len(study.stages[primary]["primary"])
        return f"None of {count} contenders is better than both controls at equal cost on any recipe of {primary}"
    return f"Better than both controls at equal cost on some recipe of {primary}: {'; '.join(better)}"


def _map(study: Study, wanted: list[str]) -> dict[str, str] | None:
    """The picture along the ladders, and what it shows for those who do not see it."""
    stage = picture.stage_of(study, wanted)
    if stage is None:
        return None
    out = io.BytesIO()
    picture.draw(study, stage, [out])
    rows = [f"{each.arm.name} on {each.arm.base} {each.score.gain}" for each in study.gains[stage] if each.score.gain]
    source = "data:image/svg+xml;base64," + base64.b64encode(out.getvalue()).decode()
    return {"source": source, "alt": f"Gains over the better control along each ladder: {'; '.join(rows)}."}


def _table(study: Study, wanted: list[str]) -> dict[str, Any]:
    """All arms; cells sort by the first number in them, names in the order of the study."""
    lines = [(name, each.arm.base, tables.cells(study, each)) for name in wanted for each in study.gains[name]]
    filled = [i for i in range(1, len(tables.COLUMNS)) if any(cells[i] for _, _, cells in lines)]
    rows = []
    for place, (name, base, cells) in enumerate(lines):
        texts = [{"text": cells[i], "sort": first_number(cells[i])} for i in filled]
        rows.append({"place": len(lines) - place, "names": (cells[0], base, name), "cells": texts})
    return {"header": ["arm", "recipe", "stage", *(tables.COLUMNS[i] for i in filled)], "rows": rows}


def _claims(study: Study, name: str) -> dict[str, Any] | None:
    """Those that can be judged by now."""
    rows = [
        [claim["says"], word, found, str(claim.get("paper", "")), claim["arm"], claim["than"], base]
        for base in study.stages[name]["recipes"]
        for claim, found, word in claims.judge(study.stages[name], study.arms[name], base)
        if word != "missing"
    ]
    return {"stage": name, "rows": rows} if rows else None


def _stage(study: Study, name: str) -> dict[str, str]:
    about = str(study.stages[name].get("about", "")).strip()
    return {"name": name, "about": about, "missing": tables.missing(study.arms[name])}
