"""Which runs a comparison needs: every method at every seed, and nothing twice."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("yaml")

from halfway.lab.comparison.trials import Group, Trial, group_of, plan
from halfway.lab.recipes.predicted_cost import predicted_cost
from halfway.lab.recipes.reading import load

RECIPE = load("tiny-cifar10")


def planned(
    methods: str = "full random pfb",
    ratios: tuple[float, ...] = (0.5,),
    seeds: tuple[int, ...] = (0, 1),
    **over: Any,
) -> list[Trial]:
    return plan(RECIPE, methods.split(), ratios, seeds, {key.replace("__", "."): value for key, value in over.items()})


def per_method(trials: list[Trial]) -> dict[str, int]:
    return dict(Counter(trial.group.method for trial in trials))


def assert_nothing_twice(trials: list[Trial]) -> None:
    """No two trials train the same thing, and no two write to the same folder."""
    trained = []
    for trial in trials:
        settings = trial.recipe.as_dict()
        unseen = {"full": ("prune_ratio", "window", "cut", "density"), "random": ("cut", "density")}
        trained.append({k: v for k, v in settings.items() if k not in unseen.get(trial.group.method, ())})
    assert all(one != other for i, one in enumerate(trained) for other in trained[:i])
    assert len({trial.folder for trial in trials}) == len(trials)
    assert len({trial.group.label for trial in trials}) == len({trial.group for trial in trials})


def test_full_data_are_trained_once_per_seed_whatever_the_ratios() -> None:
    trials = planned(ratios=(0.3, 0.5, 0.7), seeds=(0, 1, 2))
    assert per_method(trials) == {"full": 3, "random": 9, "pfb": 9}
    assert_nothing_twice(trials)


@pytest.mark.parametrize(
    ("over", "counts"),
    [
        ({"cut": ["relu", "layer1", "layer2"]}, {"full": 2, "random": 2, "pfb": 6}),
        ({"density__noise": [0.01, 0.1]}, {"full": 2, "random": 2, "pfb": 4}),
        ({"window": [(1, 8), (4, 16)]}, {"full": 2, "random": 4, "pfb": 4}),
        ({"batch_size": [64, 128]}, {"full": 4, "random": 4, "pfb": 4}),
        ({"optimizer__lr": [0.1, 0.2]}, {"full": 4, "random": 4, "pfb": 4}),
        ({"cut": ["layer1", "layer2"], "batch_size": [64, 128]}, {"full": 4, "random": 4, "pfb": 8}),
    ],
)
def test_a_sweep_repeats_only_the_methods_that_look_at_the_setting(
    over: dict[str, list[Any]], counts: dict[str, int]
) -> None:
    trials = planned(**over)
    assert per_method(trials) == counts
    assert_nothing_twice(trials)


def test_every_trial_trains_what_its_group_says() -> None:
    trials = planned(ratios=(0.3, 0.7), density__noise=[0.01, 0.1], batch_size=[64, 128])
    assert len(trials) == 2 * 2 + 2 * 2 * 2 + 2 * 2 * 2 * 2
    for trial in trials:
        recipe, group = trial.recipe, trial.group
        assert (recipe.method, recipe.seed) == (group.method, trial.seed)
        assert group.ratio is None or recipe.prune_ratio == group.ratio
        for key, value in group.settings:
            assert recipe.get(key) == value
        untouched = ("optimizer", "length", "window", "data", "model", "cut")
        assert all(recipe.get(key) == RECIPE.get(key) for key in untouched)


def test_all_methods_of_a_seed_come_side_by_side() -> None:
    trials = planned(ratios=(0.3, 0.5), seeds=(4, 5))
    assert [(t.group.method, t.group.ratio, t.seed) for t in trials] == [
        ("full", None, 4),
        ("random", 0.3, 4),
        ("pfb", 0.3, 4),
        ("full", None, 5),
        ("random", 0.3, 5),
        ("pfb", 0.3, 5),
        ("random", 0.5, 4),
        ("pfb", 0.5, 4),
        ("random", 0.5, 5),
        ("pfb", 0.5, 5),
    ]


def test_repeated_methods_ratios_and_seeds_are_taken_once() -> None:
    assert planned("pfb full pfb", ratios=(0.5, 0.5), seeds=(1, 1)) == planned("pfb full", seeds=(1,))


def test_folders_say_what_is_in_them() -> None:
    folders = [t.folder for t in planned(seeds=(3,), cut=["layer1", "layer2"])]
    assert folders == ["full-s3", "random-0.5-s3", "pfb-0.5-cut=layer1-s3", "pfb-0.5-cut=layer2-s3"]
    (group,) = {t.group for t in planned("pfb", model__name=["my/own net"])}
    assert group.folder == "pfb-0.5-model.name=my_ownnet", "one folder, and not a folder within"
    assert group.label == "pfb, p = 0.5, model.name=my/own net"


def test_rivals_are_at_the_same_settings_as_far_as_they_matter() -> None:
    group = group_of("pfb", 0.3, {"density.noise": 0.1, "cut": "layer2", "batch_size": 64, "window": (1, 3)})
    assert group.rival_full == Group("full", None, (("batch_size", 64),))
    assert group.rival("random") == Group("random", 0.3, (("batch_size", 64), ("window", (1, 3))))
    assert group.rival("pfb") == group
    assert group.rival_full.rival_full == group.rival_full


def test_every_rival_of_a_plan_is_in_the_plan() -> None:
    trials = planned(ratios=(0.3, 0.7), cut=["layer1", "layer2"], batch_size=[64, 128])
    groups = {trial.group for trial in trials}
    for group in groups:
        assert group.rival_full in groups
        assert group.ratio is None or group.rival("random") in groups


@pytest.mark.parametrize(("key", "option"), [("prune_ratio", "ratios"), ("seed", "seeds"), ("method", "methods")])
def test_what_has_an_option_of_its_own_is_not_swept(key: str, option: str) -> None:
    with pytest.raises(ValueError, match=f"{key} is not swept by --over, but by --{option}"):
        planned(**{key: [0.1, 0.2]})


def test_a_wrong_setting_is_refused_when_planning() -> None:
    with pytest.raises(ValueError, match="density has no setting 'nois'; did you mean noise"):
        planned(density__nois=[1, 2])
    with pytest.raises(ValueError, match="unknown method 'pbf'"):
        planned("full pbf")


def test_controls_among_the_methods_cost_what_random_pruning_does_in_its_window() -> None:
    controls = ("random_even", "shorter", "smaller_batch", "smaller_batch_scaled")
    trials = planned(" ".join(["random", *controls]), seeds=(0,))
    # 13 of 16 epochs prune: random costs 1 - 0.5 * 13/16 = 0.5938 of full data.
    assert [t.group.ratio for t in trials] == [0.5, *[0.4062] * 4]
    assert all(predicted_cost(t.recipe).run == pytest.approx(1 - 0.5 * 13 / 16, abs=1e-4) for t in trials)
    equal = plan(RECIPE, ["pfb", "random_even"], [0.5], [0], {}, "flops")
    costs = [predicted_cost(t.recipe).run for t in equal]
    assert costs[0] == pytest.approx(costs[1], abs=1e-3)


def test_control_curves_go_from_the_cheapest_run_up_to_full_data() -> None:
    trials = plan(RECIPE, ["pfb", "random"], [0.5, 0.3], [0, 1], {}, controls="auto")
    cheapest = min(predicted_cost(t.recipe).run for t in trials if t.group.method == "random")
    for method in ("random_even", "shorter"):
        costs = sorted({predicted_cost(t.recipe).run for t in trials if t.group.method == method})
        assert costs[0] == pytest.approx(cheapest, abs=1e-4)
        assert len(costs) >= 2
        assert all(b / a <= 1.2501 for a, b in itertools.pairwise([*costs, 1.0]))
        assert sum(t.group.method == method for t in trials) == 2 * len(costs), "at both seeds"
    assert per_method(trials)["full"] == 2, "the upper end"
    assert_nothing_twice(trials)


def test_control_curves_at_given_costs() -> None:
    trials = plan(RECIPE, ["full"], [0.5], [0], {}, controls=[0.45, 0.6])
    labels = ["full", "random_even, p = 0.55", "shorter, p = 0.55", "random_even, p = 0.4", "shorter, p = 0.4"]
    assert [t.group.label for t in trials] == labels
    with pytest.raises(ValueError, match="costs relative to full data, between 0 and 1, got 60"):
        plan(RECIPE, ["full"], [0.5], [0], {}, controls=[60])
    with pytest.raises(ValueError, match="name costs, like --controls"):
        plan(RECIPE, ["full"], [0.5], [0], {}, controls="auto")


def test_controls_know_no_window_and_no_cut() -> None:
    trials = planned("random_even shorter", seeds=(0,), cut=["layer1", "layer2"])
    assert per_method(trials) == {"random_even": 1, "shorter": 1}
    trials = planned("random_even", seeds=(0,), window=[(0, 8), (4, 12)])
    assert len(trials) == 1, "windows of the same length cost the same"


def test_another_draw_is_compared_with_the_usual_one() -> None:
    trials = planned("full random", seeds=(0,), selection_seed=[None, 7])
    assert [t.folder for t in trials] == ["full-s0", "random-0.5-s0", "random-0.5-selection_seed=7-s0"]
    assert [t.recipe.draw_seed for t in trials] == [0, 0, 7]
    assert trials[2].group.rival("random") == trials[1].group
    assert trials[2].group.rival_full == trials[0].group


def test_a_run_is_not_compared_with_itself() -> None:
    """With seed 1 it draws as without a selection_seed."""
    with pytest.raises(ValueError, match="selection_seed=1 is one of --seeds, for which null draws the same"):
        planned("random", selection_seed=[None, 1])
    assert len(planned("random", selection_seed=[0, 1])) == 4


def test_an_alias_is_the_method_it_stands_for() -> None:
    assert planned("density") == planned("pfb")
    assert planned("full density pfb") == planned("full pfb")
