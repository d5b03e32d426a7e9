"""The page of one card: `benchmarks/gpu.py` writes it from the JSON files in the card's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import page
from halfway.lab.bench.steps import WAYS
from halfway.lab.files import write_whole
from halfway.tables import markdown


def write(folder: Path) -> None:
    """Write the folder's README.md anew."""
    write_whole(folder / "README.md", render(folder))


def render(folder: Path) -> str:
    """All results of a folder, and what could not be run."""
    parts = [f"# {folder.name}\n\n*Written by `benchmarks/gpu.py`; see [the benchmarks](../../../README.md#on-a-gpu).*"]
    tests, models, recipes = folder / "tests.json", _all(folder / "models"), _all(folder / "recipes")
    if tests.exists():
        parts.append(f"## Tests\n\n{_tests(json.loads(tests.read_text()))}")
    if recipes:
        parts.append(f"## Trainings\n\n{_recipes(recipes)}")
    if models:
        parts.append(f"## Steps\n\n{_STEPS}\n\n{_steps(models)}")
        detail = page.render(folder).replace("\n## ", "\n### ").replace("# What a step costs", "## In detail", 1)
        parts.append(detail.replace("(../README.md)", "(../../../README.md)", 1))
    reasons = folder / "not_run.json"
    if reasons.exists() and (found := json.loads(reasons.read_text())):
        rows = [[key, " ".join(why.split())[-400:].replace("|", "\\|")] for key, why in found.items()]
        parts.append(f"## Not run\n\n{markdown(['item', 'reason'], rows)}")
    return "\n\n".join(part.strip() for part in parts) + "\n"


_STEPS = """\
Milliseconds of a step by CUDA events, beside how long it keeps the host busy (*host*): if the two are about equal, the
card waits for launches. Peak memory as the allocator has it. The other figures are relative to the full step."""


def read_tests(report: Path) -> dict[str, Any]:
    """What pytest's XML report says."""
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    failed: dict[str, str] = {}
    skipped: dict[str, str] = {}
    passed = []
    for case in suite.iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        fault = case.find("failure") if case.find("failure") is not None else case.find("error")
        skip = case.find("skipped")
        if fault is not None:
            failed[name] = fault.get("message", "")
        elif skip is not None:
            skipped[name] = skip.get("message", "")
        else:
            passed.append(name)
    return {"passed": passed, "failed": failed, "skipped": skipped}


def _all(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def _tests(found: dict[str, Any]) -> str:
    counts = ", ".join(f"{len(found[how])} {how}" for how in ("passed", "failed", "skipped"))
    rows = [
        [f"`{name}`", how, " ".join(why.split())[:300].replace("|", "\\|")]
        for how in ("failed", "skipped")
        for name, why in found[how].items()
    ]
    table = f"\n\n{markdown(['test', '', 'why'], rows)}" if rows else ""
    return f"{counts}; {found['date']}, torch {found['versions']['torch']}; `{found['command']}`{table}"


def _steps(results: list[dict[str, Any]]) -> str:
    header = ["model, cut", "samples", "full, ms", "host, ms", "peak", *(f"{w}: step / host / peak" for w in WAYS[1:])]
    rows = []
    for r in results:
        full = r["ways"]["full"]
        samples = f"{r['input'][0]}" + (f" ({r['halved_from']} do not fit)" if "halved_from" in r else "")
        ways = [
            "n/a" if "unavailable" in w else f"{w['wall']['median']:.3f} / {w['host']:.3f} / {w['peak']:.3f}"
            for w in (r["ways"][way] for way in WAYS[1:])
        ]
        figures = [1000 * full["seconds"], 1000 * full["seconds"] * full["host"]]
        peak = f"{full['peak_bytes'] / 2**20:.0f} MiB"
        rows.append([f"{r['title']}, `{r['cut']}`", samples, *(f"{f:.2f}" for f in figures), peak, *ways])
    return markdown(header, rows)


def _recipes(results: list[dict[str, Any]]) -> str:
    full = {r["recipe"]: r["seconds"] for r in results if r["method"] == "full"}
    rows = [
        [
            *(r["recipe"], r["method"], str(r["length"]), f"{r['score']:.2f} %", f"{r['cost']:.3f}"),
            *(f"{r['seconds']:.1f} s", f"{r['seconds'] / full[r['recipe']]:.3f}" if r["recipe"] in full else ""),
            *(f"{r['waited']:.1%}", r["data"], r["date"]),
        ]
        for r in results
    ]
    header = [
        "recipe",
        "method",
        "epochs",
        "score",
        "FLOPs",
        "training",
        "relative",
        "waiting for data",
        "data",
        "date",
    ]
    return markdown(header, rows)
