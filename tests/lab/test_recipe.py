"""Recipes: settings that are read, inherited, changed and refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml")

from halfway import Density
from halfway.lab.recipes import reading
from halfway.lab.recipes import schema as recipes
from halfway.lab.recipes.predicted_cost import predicted_cost
from halfway.lab.recipes.reading import load, parse_settings, parse_value
from halfway.lab.recipes.schema import Recipe
from halfway.selectors import Random
from tests.helpers.recipe_files import written


def tiny(*settings: str) -> Recipe:
    return load("tiny-cifar10").with_settings(parse_settings(settings))


# ------------------------------------------------------------------------------------------------------- extends


def test_extends_merges_sections(tmp_path: Path) -> None:
    text = "extends: cifar10-resnet18\noptimizer: {lr: 0.2}\ndensity: {noise: 0.5}\ndata: {size: [8, 8]}\n"
    recipe, parent = load(written(tmp_path / "mine.yaml", text)), load("cifar10-resnet18")
    assert recipe.name == "mine"
    assert recipe.optimizer == dataclasses.replace(parent.optimizer, lr=0.2)
    assert recipe.methods["density"] == {"noise": 0.5, "num_centroids": 64, "dim": 128}
    assert recipe.data == dataclasses.replace(parent.data, size=(8, 8))
    assert recipe.paper == parent.paper


def test_a_renamed_model_or_optimizer_does_not_inherit_options(tmp_path: Path) -> None:
    text = "extends: cifar10-resnet18\nmodel: {name: resnet34}\noptimizer: {name: adamw}\n"
    recipe = load(written(tmp_path / "mine.yaml", text))
    assert recipe.model.options == {}, "torchvision's resnet34 has no width and blocks"
    assert recipe.optimizer.options == {}, "AdamW has no momentum"
    assert (recipe.optimizer.lr, recipe.optimizer.weight_decay) == (0.1, 0.0005)
    own = tiny("model.name=bottleneck_resnet", "model.options.width=8")
    assert own.model.options == {"width": 8}
    same = tiny("model.name=small_resnet", "model.options.width=8")
    assert same.model.options == {"width": 8, "blocks": [1, 1, 1, 1]}


def test_the_paper_s_numbers_are_replaced_as_a_whole(tmp_path: Path) -> None:
    text = "extends: imagenet-resnet50\npaper: {where: Table 9, score: top-1, pfb: {0.5: 1.0}}\n"
    paper = load(written(tmp_path / "mine.yaml", text)).paper
    assert paper == recipes.Paper("Table 9", "top-1", None, {0.5: 1.0}, {})
    assert load(written(tmp_path / "none.yaml", "extends: imagenet-resnet50\npaper: null\n")).paper is None


def test_a_recipe_extends_a_file_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    written(tmp_path / "sub" / "base.yaml", "extends: tiny-cifar10\nseed: 7\n")
    path = written(tmp_path / "sub" / "mine.yaml", "extends: base.yaml\nlength: 20\n")
    monkeypatch.chdir(tmp_path)
    for name in (path, "sub/mine.yaml"):
        recipe = load(name)
        assert (recipe.seed, recipe.length, recipe.batch_size) == (7, 20, 128)


def test_a_recipe_that_extends_itself_is_refused_by_the_circle(tmp_path: Path) -> None:
    alone = written(tmp_path / "alone.yaml", "extends: alone.yaml\n")
    with pytest.raises(ValueError, match=r"cannot extend itself: alone\.yaml extends alone\.yaml; remove one"):
        load(alone)
    written(tmp_path / "a.yaml", "extends: b.yaml\n")
    written(tmp_path / "b.yaml", "extends: ./a.yaml\n")
    circle = "cannot extend itself: a.yaml extends b.yaml extends a.yaml; remove one"
    with pytest.raises(ValueError, match=circle):
        load(written(tmp_path / "mine.yaml", "extends: a.yaml\n"))


def test_the_same_parent_twice_on_different_ways_is_no_circle(tmp_path: Path) -> None:
    written(tmp_path / "tiny-cifar10.yaml", "extends: tiny-cifar10\nseed: 7\n")
    assert load(str(tmp_path / "tiny-cifar10.yaml")).seed == 7, "the shipped one of that name is another file"


def test_extends_takes_a_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"mine\.yaml: extends takes the name of a recipe or of a \.yaml file, got 5"):
        load(written(tmp_path / "mine.yaml", "extends: 5\n"))


# ----------------------------------------------------------------------------------------------------- key=value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-0.5", -0.5),
        ("1e-3", 1e-3),
        ("5E2", 500.0),
        ("null", None),
        ("true", True),
        ("False", False),
        ("layer1", "layer1"),
        ("resnet50", "resnet50"),
        ("[1, 2.5, null]", [1, 2.5, None]),
        ("{width: 8}", {"width": 8}),
        ("a=b", "a=b"),
    ],
)
def test_values_are_what_they_look_like(text: str, value: Any) -> None:
    parsed = parse_value(text)
    assert parsed == value
    assert type(parsed) is type(value)


def test_settings_reach_their_place() -> None:
    recipe = tiny(
        "optimizer.lr=1e-3",
        "window=[2, null]",
        "channels_last=false",
        "clip_norm=1",
        "model.options.blocks=[2, 1, 1, 1]",
        "density.noise=1e-4",
        "data.train_samples=null",
        "cut=layer2",
    )
    assert recipe.optimizer.lr == 0.001
    assert recipe.window == (2, None)
    assert recipe.channels_last is False
    assert recipe.clip_norm == 1.0
    assert type(recipe.clip_norm) is float
    assert recipe.model.options == {"width": 16, "blocks": [2, 1, 1, 1]}
    assert recipe.methods["density"] == {"noise": 1e-4, "num_centroids": 64, "dim": 128}
    assert recipe.data.train_samples is None
    assert recipe.cut == "layer2"
    untouched = {"optimizer", "window", "channels_last", "clip_norm", "model", "density", "data", "cut"}
    before = load("tiny-cifar10").as_dict()
    assert {k: v for k, v in recipe.as_dict().items() if k not in untouched} == {
        k: v for k, v in before.items() if k not in untouched
    }


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("optimiser.lr=1", "no setting 'optimiser'; did you mean optimizer"),
        ("optimizer.lrr=1", "no setting 'optimizer.lrr'; did you mean lr"),
        ("batchsize=4", "no setting 'batchsize'; did you mean batch_size"),
        ("data.zzz=4", "no setting 'data.zzz'; there are name, classes, size"),
        ("density.nois=4", "density has no setting 'nois'; did you mean noise"),
        ("batch_size=4.5", "batch_size must be a whole number, got 4.5"),
        ("batch_size=true", "batch_size must be a whole number, got True"),
        ("optimizer.lr=fast", "optimizer.lr must be a number, got 'fast'"),
        ("optimizer.lr=true", "optimizer.lr must be a number, got True"),
        ("optimizer.lr=null", "optimizer.lr must be a number, got None"),
        ("data.memory=1", "data.memory must be true or false, got 1"),
        ("data.size=32", r"data.size is a list like \[1, 2\], got 32"),
        ("data.size=[32, 32, 3]", "data.size has 2 values, got"),
        ("data.size=[32, a]", "data.size must be a whole number, got 'a'"),
        ("cut=3", "cut must be text, got 3"),
        ("optimizer=sgd", "optimizer is a section; set one of its settings, like optimizer.name="),
        ("density=3", "density is a section of settings, got 3"),
        ("optimizer.name=adam", "optimizer.name must be one of sgd, lars, adamw, got 'adam'"),
        ("unit=iteration", "unit must be one of epoch, step, got 'iteration'"),
        ("prune_ratio=1", r"prune_ratio .*must be in \[0, 1\), got 1"),
        ("prune_ratio=.nan", r"prune_ratio .*must be in \[0, 1\), got nan"),
        ("length=0", "length must be at least 1, got 0"),
        ("optimizer.lr=0", "optimizer.lr must be positive, got 0"),
        ("window=[9, 3]", r"stop \(3\) lies before start \(9\)"),
        ("method=pbf", "unknown method 'pbf'; did you mean pfb"),
        ("optimizer.lr", "given as key=value, like optimizer.lr=0.05; got 'optimizer.lr'"),
        ("=3", "given as key=value, like optimizer.lr=0.05; got '=3'"),
        ("window=[1, 2", r"'\[1, 2' is not a value; lists are written \[1, 2\]"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_dotted_name(setting: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny(setting)


def test_every_missing_setting_is_named() -> None:
    content = load("tiny-cifar10").as_dict()
    del content["cut"], content["length"], content["seed"]
    with pytest.raises(ValueError, match=r"does not say length, cut$"):
        recipes.from_dict(content)
    del content["optimizer"]["lr"]
    with pytest.raises(ValueError, match=r"does not say optimizer\.lr$"):
        recipes.from_dict({**content, "cut": "layer1", "length": 3})


def test_an_unknown_recipe_is_refused_and_the_closest_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no recipe 'cifar10-resnet'; did you mean cifar10-resnet18 "):
        load("cifar10-resnet")
    with pytest.raises(FileNotFoundError, match=r"no recipe file 'nowhere\.yaml'"):
        load("nowhere.yaml")
    with pytest.raises(ValueError, match=r"list\.yaml holds no settings"):
        load(written(tmp_path / "list.yaml", "- 1\n"))
    with pytest.raises(ValueError, match=r"broken\.yaml is not YAML"):
        load(written(tmp_path / "broken.yaml", "a: [1\n"))


# ----------------------------------------------------------------------------------------------------- of_length


@pytest.mark.parametrize("name", reading.names())
def test_another_length_keeps_the_shares(name: str) -> None:
    recipe = load(name)
    for factor in (2, 10):
        longer = recipe.of_length(recipe.length * factor)
        assert longer.schedule.share(longer.length) == pytest.approx(recipe.schedule.share(recipe.length))
        assert longer.window == tuple(None if w is None else factor * w for w in recipe.window)
        warmup = recipe.learning_rate.warmup
        assert longer.learning_rate.warmup == (None if warmup is None else pytest.approx(factor * warmup))
        assert longer.of_length(recipe.length) == recipe
    assert recipe.of_length(recipe.length) == recipe


@pytest.mark.parametrize("name", reading.names())
def test_no_length_makes_the_window_empty(name: str) -> None:
    recipe = load(name)
    share = recipe.schedule.share(recipe.length)
    for length in (*range(1, 40), 100, 1000):
        short = recipe.of_length(length)
        active = [at for at in range(length) if short.schedule.active(at)]
        assert active, f"nothing is pruned in {length}"
        # The end is rounded, and the beginning is rounded or moved up to 1.
        assert len(active) == pytest.approx(share * length, abs=1.5)
        assert length == 1 or (active[0] > 0) == (recipe.window[0] > 0), "what comes before the window stays"


def test_an_open_window_stays_open_and_one_from_the_start_stays_there() -> None:
    assert tiny("window=[4, null]").of_length(8).window == (2, None)
    assert tiny("window=[4, null]").of_length(1).window == (0, None)
    assert tiny("window=[0, 8]").of_length(4).window == (0, 2)


# ------------------------------------------------------------------------------------------------------- methods


def test_the_selector_is_the_method_s_with_its_settings() -> None:
    selector = tiny("density.noise=0.25", "density.dim=32").selector()
    assert isinstance(selector, Density)
    config = selector.config()
    assert (config["noise"], config["dim"], config["num_centroids"]) == (0.25, 32, 64)
    assert isinstance(tiny("method=density").selector(), Density)
    assert isinstance(tiny("method=random").selector(), Random)


@pytest.mark.parametrize("setting", ["method=full", "prune_ratio=0"])
def test_where_nothing_is_pruned_there_is_no_selector(setting: str) -> None:
    recipe = tiny(setting)
    assert not recipe.prunes
    assert recipe.selector() is None


# --------------------------------------------------------------------------------------------- ratios that change


def test_a_ratio_may_change_in_the_course_of_the_run() -> None:
    recipe = tiny("prune_ratio={ramp: [0, 0.8]}", "window=[0, 16]")
    assert recipe.ratios.at(0) == 0
    assert recipe.ratios.at(15) == pytest.approx(0.8)
    assert recipe.mean_ratio == pytest.approx(0.4)
    assert recipe.prunes
    stepwise = tiny("prune_ratio={steps: {0: 0.0, 4: 0.5}}", "window=[0, 16]")
    assert [stepwise.ratios.at(epoch) for epoch in (3, 4)] == [0.0, 0.5]
    assert stepwise.identity() != tiny("prune_ratio={steps: {0: 0.0, 5: 0.5}}", "window=[0, 16]").identity()


def test_its_cost_is_the_mean_over_the_epochs() -> None:
    changing = tiny("prune_ratio={ramp: [0.2, 0.6]}", "window=[4, 12]", "length=16")
    constant = [tiny(f"prune_ratio={p}", "window=[4, 12]", "length=16") for p in (0.2, 0.6)]
    assert predicted_cost(changing).run == pytest.approx(sum(predicted_cost(r).run for r in constant) / 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("prune_ratio={ramp: [0, 0.8]}", "window=[2, null]"), "give the window an end"),
        (("prune_ratio={rump: [0, 0.8]}",), "prune_ratio is a number"),
        (("prune_ratio={ramp: [0, 1.0]}",), r"in \[0, 1\)"),
        (("prune_ratio=1.0",), r"in \[0, 1\)"),
    ],
)
def test_a_ratio_that_makes_no_sense_is_refused(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny(*settings)


def test_a_method_that_decides_before_the_epoch_takes_one_ratio() -> None:
    recipe = tiny("method=rs2", "prune_ratio={ramp: [0, 0.8]}", "window=[0, 16]")
    with pytest.raises(ValueError, match="rs2, which decides before the epoch, takes one ratio"):
        recipe.sampler(100, 10)
