"""A study: stages of arms, recipes and seeds, in one YAML file.

    stages:
      screen:
        recipes: [ladder-c16, ladder-f8]
        seeds: [110, 111, 112]
        fewer_seeds: {ladder-f8: [110]}             optional: of recipes that have fewer
        fresh_seeds: [111, 112]                     optional: those that nobody had seen when the stage was planned
        settings: {data.evaluate: validation}       of all arms
        arms:
          full: {}                                  an arm is a name and what it is made of
          random: {method: random, prune_ratio: 0.5}
          pfb deep: {method: pfb, prune_ratio: 0.5, cut: layer2}
          pfb hot: {method: pfb, prune_ratio: 0.5, times: {optimizer.lr: 2}}
          pfb with a tail: {method: pfb, prune_ratio: 0.5, window_of_run: [0, 0.875]}
          loss: {method: loss, prune_ratio: 0.5, seeds: [110]}

The arm `full` is full data; any other names its method. `times` multiplies what the recipe says, `window_of_run` is a
window in shares of the run's length, and {recipe} in a text stands for the recipe's name. `primary: [pfb deep]` in a
stage names, before any result, the arms whose verdicts are corrected for their number; all others are exploratory, see
`holm`. `claims` are what a paper says about arms, see `claims`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import did_you_mean
from ..coresets.chosen import pinned
from ..recipes import reading
from ..recipes.methods import FULL
from ..recipes.schema import Recipe

# How often is looked at a run: looking changes nothing.
_NO_EFFECT = ("name", "log_every", "evaluate_every", "training_score")
# What an arm can have fewer of than its stage.
_FEWER = ("seeds", "recipes")
_STAGE = {"recipes", "seeds", "fewer_seeds", "fresh_seeds", "settings", "arms", "about", "primary", "claims"}
_CLAIM = {"says", "arm", "than", "within", "paper"}


@dataclass(frozen=True)
class Run:
    """One run of a study.

    recipe: with all settings of the arm and the seed.
    base: the name of the recipe it was made from.
    """

    stage: str
    arm: str
    base: str
    seed: int
    recipe: Recipe

    @property
    def key(self) -> str:
        """Equal for runs that end with the same weights, in whatever stage and under whatever name."""
        content = {name: value for name, value in self.recipe.identity().items() if name not in _NO_EFFECT}
        text = json.dumps(content, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def label(self) -> str:
        return f"{self.base}, {self.arm}, seed {self.seed}"


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The stages of a study file, checked."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path.name} is not YAML: {error}") from None
    stages = content.get("stages") if isinstance(content, dict) else None
    if not isinstance(stages, dict) or not stages:
        raise ValueError(f"{path.name} has no stages; see `halfway study --help`")
    for name, stage in stages.items():
        if not isinstance(stage, dict):
            raise ValueError(f"stage {name} has no recipes, seeds and arms, got {stage!r}")
        for key in stage:
            if key not in _STAGE:
                raise ValueError(f"stage {name} has no {key!r}; {did_you_mean(key, sorted(_STAGE))}")
        for key in ("recipes", "seeds", "arms"):
            if not stage.get(key):
                raise ValueError(f"stage {name} has no {key}")
            if not isinstance(stage[key], dict if key == "arms" else list):
                form = "a section, as in arms: {full: {}}" if key == "arms" else f"a list, as in {key}: [...]"
                raise ValueError(f"stage {name}: {key} is {form}, got {stage[key]!r}")
        for base, seeds in (stage.get("fewer_seeds") or {}).items():
            if base not in stage["recipes"] or not set(seeds) < set(stage["seeds"]):
                raise ValueError(
                    f"stage {name}: fewer_seeds gives a recipe of the stage some of its seeds, as in "
                    f"{{{stage['recipes'][0]}: [{stage['seeds'][0]}]}}; got {{{base}: {seeds}}}"
                )
        if not set(stage.get("fresh_seeds") or []) <= set(stage["seeds"]):
            raise ValueError(f"stage {name}: fresh_seeds are some of its seeds, got {stage['fresh_seeds']}")
        for claim in stage.get("claims", []):
            if not isinstance(claim, dict) or not {"says", "arm", "than"} <= set(claim) <= _CLAIM:
                raise ValueError(
                    f"stage {name}: a claim has says, arm and than, and maybe within and paper, as in "
                    f"{{says: better than full data, arm: pfb, than: full}}; got {claim!r}"
                )
        named = [("primary", arm) for arm in stage.get("primary", [])]
        named += [("a claim", claim[key]) for claim in stage.get("claims", []) for key in ("arm", "than")]
        for where, arm in named:
            if arm not in stage["arms"]:
                raise ValueError(
                    f"stage {name}: {where} names {arm!r}, which is no arm of it; {did_you_mean(arm, stage['arms'])}"
                )
    return {str(name): stage for name, stage in stages.items()}


def runs(name: str, stage: Mapping[str, Any], root: str) -> list[Run]:
    """All runs of a stage; those of a seed come together, so that the first ones done can be compared."""
    made = []
    fewer = stage.get("fewer_seeds") or {}
    for seed in stage["seeds"]:
        for base in stage["recipes"]:
            if seed not in fewer.get(base, stage["seeds"]):
                continue
            recipe = reading.load(base)
            for arm, content in stage["arms"].items():
                own = {**stage, **{key: value for key, value in (content or {}).items() if key in _FEWER}}
                if seed not in own["seeds"] or base not in own["recipes"]:
                    continue
                changes = {**stage.get("settings", {}), **settings_of(arm, content or {}, recipe)}
                # A subset may have been chosen for each seed.
                changes |= {k: v.replace("{seed}", str(seed)) for k, v in changes.items() if k == "coreset.file"}
                if changes.get("selection_seed") == seed:
                    raise ValueError(
                        f"stage {name}: the selection_seed of {arm!r}, {seed}, is one of its seeds, with which it "
                        "draws what it draws without: the run would be compared with itself"
                    )
                ready = pinned(recipe.with_settings({**changes, "seed": seed, "root": root}))
                made.append(Run(name, str(arm), base, seed, ready))
    return made


def settings_of(arm: str, content: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """What an arm changes in a recipe, by dotted key."""
    settings = {
        key: value.replace("{recipe}", recipe.name) if isinstance(value, str) else value
        for key, value in content.items()
        if key not in ("times", "window_of_run", *_FEWER)
    }
    if arm == FULL:
        settings.setdefault("method", FULL)
    if "method" not in settings:
        raise ValueError(f"the arm {arm!r} names no method, as in {{method: random, prune_ratio: 0.5}}")
    for key, factor in content.get("times", {}).items():
        value = recipe.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"the arm {arm!r} multiplies {key}, which is {value!r} in {recipe.name}, no number")
        product = value * factor
        # Half of 16 epochs are 8, a whole number.
        settings[key] = int(product) if isinstance(value, int) and product == int(product) else product
    if "window_of_run" in content:
        settings["window"] = [round(share * recipe.length) for share in content["window_of_run"]]
    return settings
