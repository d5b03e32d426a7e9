"""Invented studies: a plan on the real ladder recipes, and a ledger of made-up scores."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from math import log
from pathlib import Path
from typing import Any

import yaml

from halfway.lab.study import plan
from halfway.lab.study.plan import Run

CONTROLS: dict[str, Any] = {
    "full": {},
    "random 0.3": {"method": "random", "prune_ratio": 0.3},
    "random 0.5": {"method": "random", "prune_ratio": 0.5},
    "random 0.7": {"method": "random", "prune_ratio": 0.7},
    "random 0.5 again": {"method": "random", "prune_ratio": 0.5, "selection_seed": 77},
    "shorter 0.3": {"method": "shorter", "prune_ratio": 0.3},
    "shorter 0.5": {"method": "shorter", "prune_ratio": 0.5},
    "shorter 0.7": {"method": "shorter", "prune_ratio": 0.7},
}
PFB = {"pfb": {"method": "pfb", "prune_ratio": 0.5}}
PFB_COST = 0.62  # between two costs of the controls

Score = Callable[[Run, float], float]


def cost_of(run: Run) -> float:
    if run.arm == "full":
        return 1.0
    return PFB_COST if run.recipe.method in ("pfb", "early_exit") else 1 - float(run.recipe.prune_ratio)


def stage(
    recipes: Sequence[str], arms: Mapping[str, Any], seeds: Sequence[int] = (0, 1, 2), **more: Any
) -> dict[str, Any]:
    return {"recipes": list(recipes), "seeds": list(seeds), "arms": dict(arms), **more}


def on_the_curves(run: Run, cost: float) -> float:
    """Random pruning loses 8 points per e-fold of cost, fewer steps 10; a method reaches what random pruning does."""
    return 80 + (10 if run.recipe.method == "shorter" else 8) * log(cost)


def entry(run: Run, score: float, loss: float | None = None, small: float = 0.25) -> dict[str, Any]:
    """A line of a ledger."""
    return {
        "key": run.key,
        "stage": run.stage,
        "recipe": run.base,
        "arm": run.arm,
        "method": run.recipe.method,
        "seed": run.seed,
        "evaluated_on": run.recipe.data.evaluate,
        "score": score,
        "test_loss": (100 - score) / 50 if loss is None else loss,
        "training_score": 91.5,
        "training_loss": 0.3,
        "training_small_losses": 0.4,
        "cost": cost_of(run),
        "pruned": 0.5,
        "chosen_by_density": 0.9 if run.recipe.method == "pfb" else None,
        "curve": [[1.0, score - 5, 1.0, 0.01, 1.0], [2.0, score, 1.0, small, 0.5]],
        "date": "2024-05-06",
        "versions": {"halfway": "0.0", "torch": "9.8.7"},
        "machine": {"cpu": "Imaginary CPU", "cores": 3},
    }


def entries(stages: Mapping[str, Any], score: Score, spread: float = 0.3, **more: Any) -> list[dict[str, Any]]:
    """Results of all runs: `score(run, cost)` plus an effect of the seed and noise."""
    draw = random.Random(3)
    made = []
    for name, content in stages.items():
        for run in plan.runs(name, content, "data"):
            noise = 0.4 * run.seed + draw.gauss(0, spread)
            made.append(entry(run, score(run, cost_of(run)) + noise, **more))
    return made


def write(folder: Path, stages: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> Path:
    """A study file and its ledger beside it."""
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump({"stages": dict(stages)}, sort_keys=False))
    (folder / "runs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
