"""`halfway coreset`: scores are those of the proxies, nothing is trained twice, wrong input leaves nothing behind."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torchvision")
pytest.importorskip("torchmetrics")
pytest.importorskip("tensorboard")

from halfway.coresets import METHODS, Coreset, Dynamics
from halfway.lab.cli import main
from halfway.lab.coresets import choose, evidence
from halfway.lab.coresets.proxies import ProxyOptions, proxy_set
from halfway.lab.data.memory import MemoryTrainSet
from halfway.lab.files import write_tensors
from halfway.lab.models import small as nets
from halfway.lab.recipes import methods, reading
from halfway.lab.recipes.predicted_cost import sample_flops
from halfway.lab.training import session
from halfway.lab.training.run_folder import RunFolder
from tests.helpers import processes
from tests.helpers.small_training import CPU, load, same, trained
from tests.helpers.subsets import opened, recipe_file, stopped, tiny


class Workshop:
    """A recipe and a folder of proxies."""

    def __init__(self, where: Path) -> None:
        self.recipe, self.folder = recipe_file(where / "tiny.yaml"), where / "proxies"

    def __call__(self, method: str, *more: str, keep: str = "0.5") -> int:
        words = ["coreset", method, self.recipe, "--keep", keep, "--folder", str(self.folder), "--proxy-runs", "2"]
        return main([*words, *more])

    def read(self, name: str) -> Coreset:
        return Coreset.load(self.folder / name)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    made = Workshop(tmp_path_factory.mktemp("coresets"))
    assert made("el2n") == 0
    assert made("aum") == 0
    return made


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be trained any more."""
    monkeypatch.setattr(session, "train", lambda *_, **__: pytest.fail("trained again"))


def images() -> tuple[Tensor, Tensor]:
    x, y, _ = next(iter(load(tiny(**{"data.augment": "none"})).train.batches([(torch.arange(160), 0)])))
    return x, y


def network_of(run: Path) -> nn.Sequential:
    state = RunFolder(run).load()
    assert state is not None
    model = nets.build("small_resnet", 10, tiny().model.options, None, 0)
    assert isinstance(model, nn.Sequential)
    model.load_state_dict(state["model"])
    return model.eval()


@torch.no_grad()
def outputs_of(run: Path, x: Tensor) -> Tensor:
    return network_of(run)(x)


def test_el2n_is_the_mean_error_of_short_runs_and_the_largest_of_each_class_are_retained(workshop: Workshop) -> None:
    found = workshop.read("el2n-0.5-k2-s0.pt")
    x, y = images()
    errors = []
    for seed in (1000, 1001):
        p = outputs_of(workshop.folder / f"short-s{seed}", x).double().softmax(1)
        errors.append((p - torch.eye(10, dtype=torch.float64)[y]).norm(dim=1))
    expected = torch.stack(errors).mean(0)
    assert found.scores is not None
    assert torch.allclose(found.scores.double(), expected, atol=1e-4)
    for label in range(10):
        mine = (y == label).nonzero().squeeze(1)
        best = mine[found.scores[mine].argsort(descending=True)[:8]]
        assert set(best.tolist()) == set(found.ids.tolist()) & set(mine.tolist())


@pytest.mark.usefixtures("untrained")
@torch.no_grad()
def test_features_and_logits_are_those_of_the_trained_network_in_the_order_of_the_images(workshop: Workshop) -> None:
    assert workshop("moderate") == 0
    known = torch.load(workshop.folder / "long-s1000" / evidence.FILE, weights_only=True)
    network, x = network_of(workshop.folder / "long-s1000"), images()[0]
    assert torch.allclose(known["logits_NC"], network(x), atol=1e-4)
    assert torch.allclose(known["features_ND"], network[:-1](x), atol=1e-4)


def test_short_runs_follow_the_schedule_of_the_whole_run_and_end_after_a_tenth(workshop: Workshop) -> None:
    state = RunFolder(workshop.folder / "short-s1000").load()
    assert state is not None
    assert state["step"] == 2  # of 20
    early = trained(tiny(method="full", seed=1000, stop_after=0.1))
    assert same(early.model.state_dict(), state["model"])


def test_it_costs_what_was_trained_and_measured(workshop: Workshop) -> None:
    cost = workshop.read("el2n-0.5-k2-s0.pt").cost
    flops = sample_flops(tiny())
    assert cost["trainings"] == pytest.approx(2 * 2 / 20)
    assert cost["measuring"] == pytest.approx(2 * 160 * flops.forward / (20 * 32 * flops.step))
    assert cost["runs"] == pytest.approx(cost["trainings"] + cost["measuring"])
    assert cost["set"] == "short"
    assert workshop.read("aum-0.5-s0.pt").cost["runs"] == pytest.approx(1.0)


@pytest.mark.usefixtures("untrained")
def test_methods_ratios_and_seeds_share_the_trainings(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    assert workshop("grand_last") == 0
    assert workshop("grand") == 0
    for method in ("forgetting", "herding", "k_center", "moderate", "ccs", "craig", "influence"):
        assert workshop(method, keep="0.3") == 0, method
        found = workshop.read(f"{method}-0.3-s0.pt")
        assert len(found) == 48
        assert [name.split()[0] for name in found.made_from["from"]] == ["long-s1000"]
    assert workshop("el2n", "--seed", "4", keep="0.7") == 0
    shown = capsys.readouterr().out
    assert "112 of 160 training images, keep 0.7, pruning ratio 0.3" in shown
    assert "--subset" in shown


@pytest.mark.usefixtures("untrained")
def test_what_is_measured_once_is_not_measured_again(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence._Measured, "_restored", lambda *_: pytest.fail("measured again"))
    before = workshop.read("el2n-0.5-k2-s0.pt")
    assert workshop("el2n") == 0
    after = workshop.read("el2n-0.5-k2-s0.pt")
    assert torch.equal(before.ids, after.ids)


def test_a_set_that_was_stopped_goes_on_and_ends_the_same(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    again = Workshop(tmp_path)
    once = iter([True, False])
    train = session.train
    monkeypatch.setattr(session, "train", lambda *a, **k: train(*a, **k) and next(once))
    assert again("el2n") == 130  # Ctrl-C after the first of two
    assert "to go on" in capsys.readouterr().out
    assert not list(again.folder.glob("*.pt"))
    monkeypatch.setattr(session, "train", train)
    assert again("el2n") == 0
    assert torch.equal(again.read("el2n-0.5-k2-s0.pt").ids, workshop.read("el2n-0.5-k2-s0.pt").ids)


def test_moso_has_checkpoints_and_svp_a_smaller_network(workshop: Workshop) -> None:
    assert workshop("moso", "--proxy-runs", "1", "--proxy-epochs", "2") == 0
    found = workshop.read("moso-0.5-points-e2-k1-s0.pt")
    assert [name.split()[0] for name in found.made_from["from"]] == ["points-e2-s1000"]
    flops = sample_flops(tiny())
    passes = 10 * (2 * flops.step + 2 * flops.forward)  # there are ten steps
    assert found.cost["runs"] == pytest.approx(0.5 + 160 * passes / (640 * flops.step))
    assert workshop("svp", "--proxy-epochs", "1", "model.options.width=8") == 0
    svp = workshop.read("svp-0.5-small-width=8-e1-s0.pt")
    assert svp.cost["trainings"] < 0.25  # a quarter of the epochs, of a smaller network


def test_a_retention_record_counts_what_a_run_retained(workshop: Workshop, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [workshop.recipe, "window=[0, 4]", "--prune-ratio", "0.5", "--out", str(run)]
    assert main(["train", *words, "--method", "ucb"]) == 0
    assert main(["coreset", "retention", str(run), "--keep", "0.5", "--out", str(tmp_path / "kept.pt")]) == 0
    found, state = Coreset.load(tmp_path / "kept.pt"), RunFolder(run).load()
    assert state is not None
    assert found.scores is not None
    shares = state["retention"]["retained"].double() / state["retention"]["offered"]
    assert torch.allclose(found.scores.double(), shares)
    assert found.made_from["from"][0].startswith("run ")
    assert found.made_from["record"]["method"] == "ucb"


def test_a_file_says_what_its_proxies_were(workshop: Workshop) -> None:
    proxies = workshop.read("el2n-0.5-k2-s0.pt").made_from["proxies"]
    model = {"name": "small_resnet", "options": {"width": 16, "blocks": [1, 1, 1, 1]}, "weights": None}
    shared = {"model": model, "length": 4, "unit": "epoch", "batch_size": 32, "stop_after": 0.1}
    assert proxies == [{**shared, "seed": 1000}, {**shared, "seed": 1001}]


@pytest.mark.usefixtures("untrained")
def test_another_choice_s_file_is_not_replaced(
    workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "mine.pt")
    assert workshop("random_coreset", "--out", out) == 0
    before = Coreset.load(out).ids
    assert workshop("random_coreset", "--out", out) == 0, "the same again is no mistake"
    for other in (["random_coreset", "--seed", "1"], ["el2n"]):
        assert workshop(*other, "--out", out) == 2
        assert "mine.pt holds another subset; remove it, or name another" in capsys.readouterr().err
    assert torch.equal(Coreset.load(out).ids, before)


def test_what_a_diverged_proxy_shows_is_not_kept(
    workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Workshop(tmp_path)
    shutil.copytree(workshop.folder / "short-s1000", copy.folder / "short-s1000")
    run = RunFolder(copy.folder / "short-s1000")
    state = run.load()
    assert state is not None
    state["model"]["fc.bias"].fill_(torch.nan)
    write_tensors(run.checkpoint, state)
    (run.path / evidence.FILE).unlink()
    assert copy("el2n", "--proxy-runs", "1") == 2
    assert "160 of 160 samples are not finite: the model has diverged" in capsys.readouterr().err
    assert not (run.path / evidence.FILE).exists()


def test_records_of_several_runs_are_several_files(workshop: Workshop, tmp_path: Path) -> None:
    made = [choose.Choice("retention", tiny(), 0.5, tmp_path, record=Path("runs") / name) for name in ("a", "b")]
    assert made[0].file != made[1].file
    usual, other = (choose.Choice("el2n", tiny(), 0.5, tmp_path, options=ProxyOptions(seed=seed)) for seed in (1000, 7))
    assert usual.file.name == "el2n-0.5-s0.pt"
    assert other.file.name == "el2n-0.5-p7-s0.pt"


def test_a_file_of_other_proxies_is_made_again(workshop: Workshop) -> None:
    data = load(tiny())
    mine = {"folder": workshop.folder, "options": ProxyOptions(runs=2)}
    recipe = reading.load(workshop.recipe)
    assert choose.Choice("el2n", recipe, 0.5, **mine).made_already(data) is not None  # type: ignore[arg-type]
    changed = recipe.with_settings({"optimizer.lr": 0.03})
    assert choose.Choice("el2n", changed, 0.5, **mine).made_already(data) is None  # type: ignore[arg-type]


def test_proxies_and_measurements_of_other_images_are_refused(
    workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Workshop(tmp_path)
    shutil.copytree(workshop.folder, copy.folder)
    measured = copy.folder / "short-s1000" / evidence.FILE
    write_tensors(measured, {**torch.load(measured, weights_only=True), "labels": "of others"})
    assert copy("el2n", "--seed", "3") == 2
    assert "is about images with other labels; remove it" in capsys.readouterr().err
    measured.write_bytes(b"half")
    assert copy("el2n", "--seed", "3") == 2
    assert "cannot be read" in capsys.readouterr().err
    environment = copy.folder / "short-s1000" / "environment.json"
    known = environment.read_text()
    environment.write_text(known.replace('"images": "', '"images": "other '))
    assert copy("el2n", "--seed", "3") == 2
    assert "was trained on other images (synthetic pictures" in capsys.readouterr().err
    # Runs of before there was a digest.
    environment.write_text(known.replace('"images": "', '"before": "').replace('"data": "', '"data": "other '))
    assert copy("el2n", "--seed", "3") == 2
    assert "was trained on other images (other synthetic" in capsys.readouterr().err


def test_a_proxy_that_was_killed_before_its_last_checkpoint_goes_on(workshop: Workshop, tmp_path: Path) -> None:
    """All its metrics are there by then."""
    copy = Workshop(tmp_path)
    shutil.copytree(workshop.folder, copy.folder)
    run = RunFolder(copy.folder / "short-s1000")
    recipe = tiny(method="full", seed=1000, stop_after=0.1)
    half = stopped(recipe, opened(tmp_path / "half", recipe), 1)
    assert half.step == 1
    shutil.copy(tmp_path / "half" / "last.pt", run.checkpoint)
    (copy.folder / "el2n-0.5-k2-s0.pt").unlink()
    assert copy("el2n") == 0
    assert torch.equal(copy.read("el2n-0.5-k2-s0.pt").ids, workshop.read("el2n-0.5-k2-s0.pt").ids)


IMPOSSIBLE = {
    "greedy, mixed classes": (["herding", "--no-class-balance"], "leave class_balance=True"),
    "no room for validation": (["glister", "--keep", "0.95"], "set aside"),
    "more cut than left": (["ccs", "ccs.beta=0.6"], "beta of at most"),
    "not every image": (
        ["aum", "--proxy-epochs", "1", "batch_size=48"],
        "16 of 160 are in no full batch of 48 in a proxy of 1 epoch(s); take batch_size=40",
    ),
    "images that two epochs miss": (
        ["forgetting", "--proxy-epochs", "2", "batch_size=96"],
        "26 of 160 are in no full batch of 96 in a proxy of 2 epoch(s); take batch_size=80",
    ),
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
@pytest.mark.usefixtures("untrained")
def test_what_cannot_be_chosen_is_told_before_proxies_are_trained(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (method, *words), message = IMPOSSIBLE[what]
    assert Workshop(tmp_path)(method, *words) == 2
    assert message in capsys.readouterr().err


def test_a_subset_of_other_images_with_the_same_labels_is_refused(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", workshop.recipe, "--subset", str(workshop.folder / "el2n-0.5-k2-s0.pt"), "data.holdout=true"]
    assert main([*words, "--out", str(workshop.folder / "never")]) == 2
    assert "was chosen from other images (data.holdout was False, is True)" in capsys.readouterr().err


WRONG: dict[str, tuple[list[str], str]] = {
    "keep of 0": (["el2n", "--keep", "0"], "between 0 and 1"),
    "keep of 1": (["el2n", "--keep", "1"], "between 0 and 1"),
    "keep of nan": (["el2n", "--keep", "nan"], "between 0 and 1"),
    "an unknown method": (["el3n", "--keep", "0.5"], "el2n"),
    "no small network": (["svp", "--keep", "0.5"], "model.options.width=8"),
    "the same network": (["svp", "--keep", "0.5", "model.options.width=16"], "smaller than the one to train"),
    "a larger network": (
        ["svp", "--keep", "0.5", "model.options.width=24"],
        "smaller than the one to train: small_resnet",
    ),
    "another, larger network": (
        ["svp", "--keep", "0.5", "model.name=resnet18"],
        "smaller than the one to train: resnet18",
    ),
    "no record": (["retention", "--keep", "0.5"], "RUN_FOLDER"),
    "fewer than classes": (["random_coreset", "--keep", "0.05"], "fewer than the 10 classes"),
    "a setting of the runs": (["el2n", "--keep", "0.5", "prune_ratio=0.5"], "drop prune_ratio="),
    "an unknown setting": (["svp", "--keep", "0.5", "svp.mesure=margin"], "measure"),
    "another recipe": (["el2n", "--keep", "0.5", "data.train_samples=128"], "--folder"),
    "a folder as file": (["el2n", "--keep", "0.5", "--out", "."], "no subset file"),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.usefixtures("untrained")
def test_wrong_input_is_one_line_and_nothing_is_written(
    what: str, workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    (method, *words), message = WRONG[what]
    before = sorted(workshop.folder.rglob("*"))
    assert main(["coreset", method, workshop.recipe, "--folder", str(workshop.folder), *words]) == 2
    assert message in capsys.readouterr().err
    assert sorted(workshop.folder.rglob("*")) == before


@pytest.mark.usefixtures("untrained")
def test_a_missing_class_is_told_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = MemoryTrainSet.labels.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(MemoryTrainSet, "labels", property(lambda self: whole(self).clamp(max=8)))
    new = Workshop(tmp_path)
    assert new("el2n") == 2
    assert "1 of 10 classes have no sample, for example class 9" in capsys.readouterr().err
    assert not new.folder.exists()


@pytest.mark.usefixtures("untrained")
def test_nan_scores_leave_no_file(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(METHODS["el2n"], "score", lambda *_: torch.full((160,), torch.nan))
    assert workshop("el2n", "--seed", "9") == 2
    assert "NaN" in capsys.readouterr().err
    assert not list(workshop.folder.glob("*s9*"))
    assert not list(workshop.folder.glob(".*"))


def test_coresets_are_for_classes_of_images() -> None:
    recipe = tiny().with_settings({"task": "segmentation"})
    with pytest.raises(ValueError, match="is segmentation"):
        choose.Choice("random_coreset", recipe, 0.5, Path("nowhere")).check()


def test_proxies_do_not_depend_on_what_full_data_ignore(tmp_path: Path) -> None:
    def identities(**changes: Any) -> list[dict[str, Any]]:
        made = proxy_set(tiny(**changes), "short runs", tmp_path, ProxyOptions())
        assert made is not None
        return [recipe.identity() for recipe in made.recipes]

    assert len(identities()) == 10
    assert identities() == identities(seed=5, prune_ratio=0.7, method="el2n", cut="layer2", window=[0, 4])
    assert identities() != identities(label_smoothing=0.0)


def test_every_coreset_is_a_method_of_its_own() -> None:
    assert set(METHODS) <= set(methods.METHODS)
    assert len(methods.IMPLEMENTATIONS) == len(set(methods.IMPLEMENTATIONS))
    assert not set(METHODS) & set(methods.comparable())


def _on_a_rank(rank: int, folder: str) -> list[int]:
    recipe = tiny()
    choice = choose.Choice("forgetting", recipe, 0.5, Path(folder), options=ProxyOptions(epochs=2))
    choice.check()
    made = choice.make(load(recipe), CPU, "test")
    assert made is not None
    found: list[int] = made.ids.tolist()
    return found


def test_two_ranks_train_one_proxy_and_choose_the_same(tmp_path: Path) -> None:
    first, second = processes.run(2, _on_a_rank, str(tmp_path))
    assert first == second
    assert Coreset.load(tmp_path / "forgetting-0.5-long-e2-s0.pt").ids.tolist() == first
    state = RunFolder(tmp_path / "long-e2-s1000").load()
    assert state is not None
    assert len(state["random"]) == 2
    # Each of 160 samples was presented twice, by whichever of the ranks had it.
    assert Dynamics.of(state["recorded"]).presentations_N.tolist() == [2] * 160
