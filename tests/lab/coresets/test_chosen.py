"""`halfway train --subset`: the same samples in every epoch, and no others."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

pytest.importorskip("torchvision")
pytest.importorskip("torchmetrics")
pytest.importorskip("tensorboard")

from halfway.coresets import Coreset
from halfway.lab.cli import main
from halfway.lab.coresets.chosen import content_of, kept_per_class, pinned
from halfway.lab.recipes.predicted_cost import predicted_cost
from halfway.lab.recipes.schema import Recipe
from halfway.lab.training.loop import Training
from halfway.lab.training.run_folder import RunFolder
from halfway.lab.training.run_result import RunResult
from halfway.lab.training.trainable import check_trainable
from tests.helpers.small_training import CPU, load, trained
from tests.helpers.subsets import WORDS, opened, tiny


def made(path: Path, weights: bool = False, count: int = 80) -> Path:
    """A subset of the small recipe's images: every other one."""
    labels_N = load(tiny()).train.labels
    assert labels_N is not None
    ids = torch.arange(0, 2 * count, 2)
    Coreset(
        ids=ids,
        weights=torch.arange(1.0, count + 1) if weights else None,
        method="craig" if weights else "el2n",
        settings={"keep": count / 160, "class_balance": True, "seed": 0},
        num_samples=160,
        fingerprint=Coreset.fingerprint_of(labels_N),
    ).save(path)
    return path


def on(path: Path, **changes: object) -> Recipe:
    return pinned(tiny(**{"coreset.file": str(path), **changes}))


def seen_in(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> tuple[Training, list[list[int]]]:
    seen: list[list[int]] = []
    step = Training.train_step

    def spy(self: Training, x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
        seen.append(ids.tolist())
        return step(self, x, y, ids)

    monkeypatch.setattr(Training, "train_step", spy)
    training = Training(recipe, load(recipe), CPU, show=False)
    assert training.run()
    return training, seen


def test_equal_epochs_see_the_subset_and_take_fewer_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = on(made(tmp_path / "s.pt"))
    assert (recipe.method, recipe.prune_ratio, recipe.window) == ("el2n", 0.5, (1, 3))
    training, seen = seen_in(recipe, monkeypatch)
    assert len(seen) == 4 * 2  # of 80 samples, two batches of 32 fit into an epoch; the window does not matter
    assert all(id % 2 == 0 for batch in seen for id in batch)
    assert len({id for batch in seen for id in batch}) > 64, "the order changes from epoch to epoch"
    assert training.step == training.steps == 20
    whole = trained(tiny(method="full"))
    assert training.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]
    assert training._blocking()["spent"] == 8 * 32
    assert predicted_cost(recipe).run == pytest.approx(0.5)


def test_equal_steps_repeat_the_subset_more_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = on(made(tmp_path / "s.pt"), **{"coreset.equal_steps": True})
    training, seen = seen_in(recipe, monkeypatch)
    assert len(seen) == training.step == 20
    assert all(id % 2 == 0 for batch in seen for id in batch)
    for epoch in range(10):  # each epoch of the subset is two batches of different samples
        assert len({*seen[2 * epoch], *seen[2 * epoch + 1]}) == 64
    assert training._blocking()["spent"] == 20 * 32
    assert predicted_cost(recipe).run == 1.0


def test_a_stopped_run_with_equal_steps_goes_on_with_the_same_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = on(made(tmp_path / "s.pt"), **{"coreset.equal_steps": True})
    _, whole = seen_in(recipe, monkeypatch)
    monkeypatch.undo()
    folder = opened(tmp_path / "run", recipe)
    first = Training(recipe, load(recipe), CPU, folder, show=False)
    assert not first.run(lambda: first.step >= 7)
    seen: list[list[int]] = []
    step = Training.train_step
    monkeypatch.setattr(
        Training, "train_step", lambda self, x, y, ids: (seen.append(ids.tolist()), step(self, x, y, ids))[1]
    )
    assert Training(recipe, load(recipe), CPU, folder, show=False).run()
    assert seen == whole[7:]


def test_weights_of_a_method_multiply_the_losses_unless_turned_off(tmp_path: Path) -> None:
    path = made(tmp_path / "s.pt", weights=True)
    training = Training(on(path), load(tiny()), CPU, show=False)
    assert training.sampler is not None
    training.sampler.set_epoch(0)
    ids = torch.tensor([0, 2, 158])
    assert training._weights(ids) is not None
    assert torch.allclose(training._weights(ids), torch.tensor([1.0, 2.0, 80.0]) / 40.5)  # type: ignore[arg-type]
    plain = Training(on(path, **{"coreset.weights": False}), load(tiny()), CPU, show=False)
    assert plain.sampler is not None
    plain.sampler.set_epoch(0)
    assert plain._weights(ids) is None
    assert on(path).identity() != on(path, **{"coreset.weights": False}).identity()


def test_a_run_is_what_the_file_holds_and_not_where_it_is(tmp_path: Path) -> None:
    here, there = made(tmp_path / "here.pt"), tmp_path / "there.pt"
    shutil.copy(here, there)
    assert on(here).identity() == on(there).identity()
    other = made(tmp_path / "other.pt", count=70)
    assert on(here).identity() != on(other).identity()
    planned = on(here)
    shutil.copy(other, here)
    with pytest.raises(ValueError, match="holds another subset"):
        check_trainable(planned)


def test_a_subset_of_other_data_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made(tmp_path / "s.pt")
    words = ["train", "tiny-cifar10", *WORDS, "data.train_samples=192", "--subset", str(path)]
    out = tmp_path / "run"
    assert main([*words, "--out", str(out)]) == 2
    assert "192 samples, the subset is of 160" in capsys.readouterr().err
    assert not out.exists(), "the corrected command finds no run there"
    assert main(["train", "tiny-cifar10", *WORDS, "--subset", str(path), "--out", str(out)]) == 0


def pictures(root: Path, seed: int) -> Path:
    """A folder of images: 2 classes of 16, whatever the seed."""
    random = np.random.default_rng(seed)
    for part, count in (("train", 16), ("val", 4)):
        for label in ("cat", "dog"):
            (root / part / label).mkdir(parents=True)
            for i in range(count):
                pixels = random.integers(0, 256, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / part / label / f"{i:03}.png")
    return root


FOLDER_RECIPE = """\
extends: tiny-cifar10
data: {name: imagefolder, classes: 2, size: [8, 8], train_samples: null, test_samples: null, memory: true}
model: {name: small_cnn, options: {width: 2}}
batch_size: 8
length: 2
window: [0, 2]
cut: layer1
"""


def test_a_subset_or_a_record_of_another_folder_is_refused_and_one_of_a_moved_folder_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Class sizes and names of files are the same."""
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(FOLDER_RECIPE)
    pictures(tmp_path / "da", 0), pictures(tmp_path / "db", 1)
    shutil.copytree("da", "elsewhere/moved")
    assert main(["coreset", "random_coreset", "r.yaml", "--keep", "0.5", "--data", "da", "--out", "s.pt"]) == 0
    train = ["train", "r.yaml", "--subset", "s.pt", "--out", "run", "--data"]
    assert main([*train, "db"]) == 2
    told = capsys.readouterr().err
    assert "s.pt was chosen from other images (images in da: 32 training images" in told
    assert "than these (images in db: 32 training images" in told
    assert "choose again for these (`halfway coreset`), or name the folder of those with --data" in told
    assert not Path("run").exists()
    assert main([*train, "elsewhere/moved"]) == 0
    assert main(["train", "r.yaml", "--method", "random", "--out", "record", "--data", "da"]) == 0
    retention = ["coreset", "retention", "record", "--keep", "0.5", "--out", "kept.pt", "--data"]
    capsys.readouterr()
    assert main([*retention, "db"]) == 2
    assert "record was trained on other images (images in da: 32" in capsys.readouterr().err
    assert not Path("kept.pt").exists()
    assert main([*retention, "elsewhere/moved"]) == 0


def test_a_subset_of_less_than_a_batch_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made(tmp_path / "s.pt", count=30)
    assert main(["train", "tiny-cifar10", *WORDS, "--subset", str(path), "--out", str(tmp_path / "run")]) == 2
    assert "the 30 images of" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


OWN = """
import sys
from halfway import coresets

class Mine(coresets.Scored):
    name, needs, uses = "mine", "nothing", ()
    def score(self, evidence, generator=None):
        return evidence.labels_N.float()

coresets.METHODS["mine"] = Mine
from halfway.lab.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_method_of_one_s_own_is_trained_on_once_it_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = made(tmp_path / "s.pt")
    dataclasses.replace(Coreset.load(path), method="mine").save(path)
    words = ["train", "tiny-cifar10", *WORDS, "--subset", str(path), "--out", str(tmp_path / "run")]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert "made by 'mine', which the command line does not know; put its class into coresets.METHODS before" in told
    subprocess.run([sys.executable, "-c", OWN, *words], check=True, capture_output=True)
    config = (tmp_path / "run" / "config.yaml").read_text()
    assert "method: mine\n" in config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": torch.ones(3)}, "one finite weight for each of its 80 samples"),
        ({"ids": torch.arange(80.0)}, "whole numbers as ids"),
        ({"settings": {}}, "the settings keep and seed"),
    ],
)
def test_a_broken_file_is_one_line(
    change: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = made(tmp_path / "s.pt")
    dataclasses.replace(Coreset.load(path), **change).save(path)
    assert main(["train", "tiny-cifar10", *WORDS, "--subset", str(path), "--out", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err


def test_mistakes_are_told_before_the_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(made(tmp_path / "s.pt"))
    wrong = {
        "drop --method": ["--subset", path, "--method", "pfb"],
        "--subset FILE": ["--equal-steps"],
        "there is no subset file": ["--subset", str(tmp_path / "none.pt")],
        "halfway coreset el2n": ["--method", "el2n"],
    }
    for message, words in wrong.items():
        assert main(["train", "tiny-cifar10", *WORDS, *words]) == 2, message
        assert message in capsys.readouterr().err


def test_the_command_trains_and_says_what_it_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = made(tmp_path / "s.pt")
    assert main(["train", "tiny-cifar10", *WORDS, "--subset", str(path)]) == 0
    assert "0.5 of the training images, chosen once" in capsys.readouterr().out
    result = RunResult.read(tmp_path / "runs" / "tiny-cifar10-el2n-0.5-s0")
    assert result.cost == pytest.approx(8 / 20)
    assert result.recipe.coreset.content == content_of(Coreset.load(path))
    state = RunFolder(result.path).load()
    assert state is not None
    assert state["retention"]["retained"][::2].tolist() == [4] * 80
    assert not state["retention"]["retained"][1::2].any()


def test_what_is_kept_per_class_is_told() -> None:
    coreset = Coreset(torch.tensor([0, 1, 4]), "el2n", {}, 5, "")
    labels_N = torch.tensor([0, 0, 0, 1, 1])
    assert kept_per_class(coreset, labels_N, ["cat", "dog"]) == "cat 2 of 3, dog 1 of 2"
    even = dataclasses.replace(coreset, ids=torch.tensor([0, 3]))
    assert kept_per_class(even, torch.tensor([0, 0, 1, 1]), ["cat", "dog"]) == "1 of 2 in each of the 2 classes"
    many = [f"c{i}" for i in range(30)]
    told = kept_per_class(dataclasses.replace(coreset, ids=torch.arange(29)), torch.arange(30), many)
    assert told == "c29 (0 of 1) to c0 (1 of 1), of 30 classes"
