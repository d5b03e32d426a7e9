"""`halfway recipes`: predicted costs are those of `halfway.cost`, beside the paper's numbers."""

from __future__ import annotations

import argparse
import io
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

pytest.importorskip("yaml")
pytest.importorskip("torchvision")

from halfway.costs import cost
from halfway.lab.cli import main
from halfway.lab.commands import recipes as recipes_command
from halfway.lab.commands.recipes import COLUMNS, cost_rows
from halfway.lab.coresets.proxies import require_smaller
from halfway.lab.models import small as nets
from halfway.lab.recipes import reading
from halfway.lab.recipes.predicted_cost import predicted_cost
from tests import ROOT


def printed(*options: str) -> str:
    parser = argparse.ArgumentParser(prog="halfway")
    recipes_command.register(parser.add_subparsers())
    arguments = parser.parse_args(["recipes", *options])
    with redirect_stdout(io.StringIO()) as out:
        assert arguments.run(arguments) == 0
    return out.getvalue()


@pytest.fixture(scope="module")
def rows() -> list[list[str]]:
    """The table's cells, from its Markdown."""
    _, _, *lines = printed("--markdown").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("name", ["tiny-cifar10", "tiny-voc"])
def test_the_prediction_is_the_cost_of_the_real_model(name: str) -> None:
    recipe = reading.load(name)
    model = nets.build(recipe.model.name, recipe.data.classes, recipe.model.options, None, 0).train()
    example = torch.randn(2, 3, *recipe.data.size)
    start, stop = recipe.window
    assert stop is not None
    pruned = (stop - start) / recipe.length
    for ratio in (0.3, 0.7):
        predicted = predicted_cost(recipe.with_settings({"prune_ratio": ratio}))
        real = cost(model, recipe.cut, ratio, example)
        assert (predicted.shallow_share, predicted.step) == (real.shallow_share, real.step)
        assert predicted.run == pytest.approx(1 - pruned + pruned * real.step)
        assert predicted.step == pytest.approx(1 - ratio + ratio * real.shallow_share)


def test_there_is_a_row_for_each_of_the_paper_s_ratios_and_one_for_recipes_without(rows: list[list[str]]) -> None:
    expected = []
    for name in reading.names():
        recipe = reading.load(name)
        ratios = sorted(recipe.paper.pfb) if recipe.paper is not None else [recipe.prune_ratio]
        expected += [[name, recipe.cut, f"{ratio:g}"] for ratio in ratios]
    assert [row[:3] for row in rows] == expected
    assert len([row for row in rows if row[0].startswith("imagenet-resnet50")]) == 4


def test_the_page_of_the_paper_s_commands_has_this_table(rows: list[list[str]]) -> None:
    page = (ROOT / "docs" / "reproduce.md").read_text().splitlines()
    start = page.index(f"| {' | '.join(COLUMNS)} |") + 2
    assert page[start : start + len(rows)] == [f"| {' | '.join(row)} |" for row in rows], "halfway recipes --markdown"


def test_small_networks_on_the_page_of_the_paper_s_commands_are_smaller() -> None:
    page = (ROOT / "docs" / "reproduce.md").read_text().split("# Figure")[0]
    blocks = [block for block in page.split("\n\n") if "coreset.small=" in block]
    assert len(blocks) == 2
    for block in blocks:
        command, twin = block.split("#   tiny twin: ")
        for text in (command.split("halfway compare ")[1], twin):
            network = reading.parse_value(text.split("coreset.small=")[1].split("'")[0])
            for name in re.findall(r"(?:tiny-)?(?:cifar|imagenet)[a-z0-9-]*", text):
                recipe = reading.load(name)
                require_smaller(recipe.with_settings({f"model.{key}": v for key, v in network.items()}), recipe)


def test_the_columns_agree_with_each_other(rows: list[list[str]]) -> None:
    assert {len(row) for row in rows} == {len(COLUMNS)}
    for row in rows:
        recipe = reading.load(row[0])
        p, share, step, run = map(float, row[2:6])
        assert 0 < share < 1 / 3, "part of the forward pass, which is about a third of a step"
        assert step == pytest.approx(1 - p + p * share, abs=0.002)
        pruned = recipe.schedule.share(recipe.length)
        assert run == pytest.approx(1 - pruned + pruned * step, abs=0.002)
        assert float(row[6].rstrip("%")) == pytest.approx(100 * (1 - run), abs=0.11)


def test_the_paper_s_numbers_stand_beside_ours(rows: list[list[str]]) -> None:
    said = {(row[0], row[2]): tuple(row[7:]) for row in rows}
    assert said["imagenet-resnet50", "0.4"] == ("33.2%", "76.4 -> 76.9")
    assert said["imagenet-resnet50", "0.3"] == ("", "76.4 -> 77.0")
    assert said["cifar100-resnet18", "0.7"] == ("", "78.2 -> 77.9")
    assert said["voc2012-deeplabv3", "0.7"] == ("56.7%", "77.9 -> 73.4")
    assert said["cityscapes-deeplabv3", "0.3"] == ("24.1%", "80.4 -> 79.8")
    assert all(cells == ("", "") for (name, _), cells in said.items() if name.startswith("tiny-"))


def test_the_table_for_the_terminal_has_the_same_cells(rows: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "names", lambda: ["tiny-cifar10", "cifar10-resnet18"])
    header, rule, *lines = printed().splitlines()
    assert all(column in header for column in COLUMNS)
    assert set(rule) == {"-", " "}
    wanted = [row for name in reading.names() for row in rows if row[0] == name]
    assert len(wanted) == 4
    for row, line in zip(wanted, lines[:4], strict=True):
        assert line.split() == " ".join(row).split()
    assert "halfway train RECIPE" in lines[-1]


def test_the_markdown_table_is_a_table() -> None:
    recipe = reading.load("tiny-cifar10")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "names", lambda: ["tiny-cifar10"])
        header, rule, *body = printed("--markdown").splitlines()
    assert header == f"| {' | '.join(COLUMNS)} |"
    assert rule.count("|") == header.count("|")
    assert rule.split(" | ")[2:] == ["---:"] * 6 + ["---: |"]
    assert body == [f"| {' | '.join(row)} |" for row in cost_rows(recipe)]


def test_a_name_prints_a_recipe_that_can_be_trained_from(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(printed("voc2012-deeplabv3"))
    assert reading.load(str(tmp_path / "config.yaml")) == reading.load("voc2012-deeplabv3")
    with pytest.raises(ValueError, match="no recipe 'voc2012'; did you mean voc2012-deeplabv3"):
        printed("voc2012")


def test_predicting_computes_nothing_and_leaves_the_generator_alone() -> None:
    before = torch.random.get_rng_state()
    predicted_cost(reading.load("tiny-imagenet-swin-t"))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_missing_library_is_named_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert main(["recipes", "tiny-cifar10"]) == 2
    said = capsys.readouterr().err
    assert "yaml" in said
    assert "pip install '.[lab]' in a checkout" in said
