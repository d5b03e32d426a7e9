"""The report of a study: the map, the primary family, every arm of every stage in one table to sort and filter."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

from ..comparison.verdict import Verdict
from ..study import claims, ledger, picture, plan, tables
from ..study.gains import of_ladders
from ..study.results import Study, collect
from . import page
from .cells import first_number

_FROM_WORST: tuple[Verdict, ...] = ("worse", "not told apart", "better")
STUDY, RESULTS = "study.yaml", "runs.jsonl"
# The map has colours and markers of its own, made for a white ground.
_STYLE = "figure.map { background:#fff; color:#3d3d3a; } figure.map figcaption { color:#6f6e69; }"


def holds_study(folder: Path) -> bool:
    """Whether a folder holds a study, with results or without."""
    return (folder / STUDY).is_file()


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
    families = [name for name in study.stages if study.stages[name].get("primary")]
    return page.render(
        _STYLE,
        template="studies.html",
        over=title or f"halfway report · {folder.resolve().name}",
        headline=_headline(study, families),
        scale=tables.provenance(study, there),
        map=_map(study, there),
        families=[(name, *tables.primary(study, name)) for name in families],
        table=_table(study, there),
        notes=tables.NOTES,
        claims=[found for name in there if (found := _claims(study, name))],
        stages=[_stage(study, name) for name in study.stages],
        command=f"halfway study {folder / STUDY} --table",
    )


def _headline(study: Study, families: list[str]) -> str:
    if not families:
        return "No family of comparisons was named beforehand: all of this is exploratory"
    judged = [each for name in families for each in study.gains[name] if study.is_primary(each.arm)]
    words = [(each.arm.name, word) for each in judged if (word := study.word(each)) is not None]
    if not words:
        return f"The {study.family} comparisons that were named beforehand have no results yet"
    better = [name for name, word in words if word == "better"]
    unfinished = any(arm.missing for name in families for arm in study.arms[name])
    told = f"contender is better than both controls at equal cost in {len(better) or 'none'} of {len(words)}"
    names = f": {'; '.join(dict.fromkeys(better))}" if better else ""
    return f"{'So far a' if unfinished else 'A'} {told} comparisons{names}"


def _map(study: Study, wanted: list[str]) -> dict[str, str] | None:
    """The picture along the ladders, and what it shows for those who do not see it."""
    stage = picture.stage_of(study, wanted)
    if stage is None:
        return None
    out = io.BytesIO()
    picture.draw(study, stage, [out])
    shown = [each for members in of_ladders(study.gains[stage]).values() for each in members]
    rows = [f"{each.arm.name} on {each.arm.base} {each.score.gain}" for each in shown]
    source = "data:image/svg+xml;base64," + base64.b64encode(out.getvalue()).decode()
    return {"source": source, "alt": f"Gains over the better control along each ladder: {'; '.join(rows)}."}


def _table(study: Study, wanted: list[str]) -> dict[str, Any]:
    """All arms; cells sort by the first number in them, names in the order of the study."""
    lines = [(tables.cells(study, each), each.arm.base, name) for name in wanted for each in study.gains[name]]
    filled = [i for i in range(1, len(tables.COLUMNS)) if any(cells[i] for cells, _, _ in lines)]
    named = [(cells[0], base, name) for cells, base, name in lines]
    # Words sort by where they first come, the first of them on top.
    places = [{word: -k for k, word in enumerate(dict.fromkeys(words))} for words in zip(*named, strict=True)]
    rows = []
    for names, (cells, _, _) in zip(named, lines, strict=True):
        texts = [{"text": word, "sort": place[word]} for word, place in zip(names, places, strict=True)]
        for i in filled:
            rank = next((str(k) for k, word in enumerate(_FROM_WORST) if cells[i].startswith(word)), "")
            texts.append({"text": cells[i], "sort": first_number(cells[i]) or rank})
        rows.append({"label": " ".join(names), "cells": texts})
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
