"""Every method in the training loop of the recipes: what it trains, what it costs, and going on after a stop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("torchvision")
pytest.importorskip("torchmetrics")
pytest.importorskip("tensorboard")

from halfway.lab.cli import main
from halfway.lab.comparison.trials import plan
from halfway.lab.models import small as nets
from halfway.lab.recipes import methods
from halfway.lab.recipes import predicted_cost as price
from halfway.lab.recipes.reading import load as load_recipe
from halfway.lab.training import irreducible as losses
from halfway.lab.training.loop import Training
from halfway.lab.training.run_folder import RunFolder
from halfway.lab.training.trainable import check_trainable
from halfway.samplers import SAMPLERS, InfoBatch
from halfway.seeds import seed_of
from halfway.selectors import SELECTORS
from tests.helpers import processes
from tests.helpers.small_training import (
    CPU,
    SETTINGS,
    assert_same_run,
    load,
    plain,
    same,
    small,
    trained,
    without_times,
)

# The trainings here are shorter than its window; the test of the warning asks for it.
pytestmark = pytest.mark.filterwarnings("ignore:dyn_unc")

# A selector of each kind that learns, and the samplers that do.
# One of each kind: by what it keeps, and where.
EVERY_DAY = ("selective_backprop", "last_loss_proportional", "balanced_remembered", "infobatch")
LEARNING = [
    "selective_backprop",
    "last_loss",
    "last_loss_proportional",
    "order_dp",
    "rotate",
    "balanced",
    "balanced_proportional",
    "balanced_remembered",
    "infobatch",
    "ucb",
    "dyn_unc",
]


def test_classes_are_evened_out_by_their_sizes_in_the_data() -> None:
    training = trained(small(method="class_balanced", prune_ratio=0.5, **{"class_balanced.q": 0.5}))
    assert training.blocker is not None
    labels = training.data.train.labels
    assert labels is not None
    assert training.blocker.selector.config()["class_counts"] == torch.bincount(labels, minlength=10).tolist()
    assert training._blocking()["retained"] == 2 * 160 + 2 * 80, "two of four epochs are in the window"


def test_without_one_class_per_image_classes_cannot_be_evened_out() -> None:
    with pytest.raises(ValueError, match="'class_balanced' needs one class per image"):
        check_trainable(load_recipe("tiny-voc").with_settings({"method": "class_balanced"}))


@pytest.mark.parametrize("method", methods.comparable())
def test_every_method_trains_and_costs_what_was_predicted(method: str, feature: Callable[..., None]) -> None:
    r = small(method=method, prune_ratio=0.5)
    training = trained(r)
    counts = training._blocking()
    assert counts["seen"] == 4 * 160
    if method in ("infobatch", "infobatch_dagger"):
        # Its ratio is up to the losses.
        assert 0.6 * counts["seen"] < counts["retained"] < counts["seen"]
    else:
        # 80 of 160 samples are two whole batches of 32 and half a batch, which is left out.
        left_out = 2 * 16 / 640 if training.sampler is not None else 0.0
        assert counts["spent"] / counts["seen"] == pytest.approx(price.predicted_cost(r).run - left_out, abs=1e-6)
    if training.blocker is not None and training.blocker.selector.needs != "nothing":
        feature("methods", method, training.blocker.stats)
    if r.prunes:
        assert counts["pruned_steps"] == 10
        assert counts.get("recomputed", 0) == 0
        offered, retained = training.retention.offered, training.retention.retained
        assert offered.sum() == 2 * 160
        assert int(retained.sum()) >= counts["retained"] - 2 * 160


def test_a_proxy_is_a_smaller_network_and_costs_what_was_predicted() -> None:
    wide = {"model.options": {"width": 16, "blocks": [1, 1, 1, 1]}}
    r = small(method="proxy", prune_ratio=0.5, **wide, **{"proxy.model": {"width": 8}})
    training = trained(r)
    counts = training._blocking()
    assert 0.5 < counts["spent"] / counts["seen"] < 1
    # Every fourth of the 20 batches, which are 2 of the first epoch's 5.
    assert counts["spent"] / counts["seen"] == pytest.approx(price.predicted_cost(r).run, abs=0.01)
    with pytest.raises(ValueError, match=r"proxy\.model=\{width: 8\}"):
        small(method="proxy", prune_ratio=0.5).selector()


def test_all_selectors_and_samplers_are_methods() -> None:
    assert {*SELECTORS, *SAMPLERS} <= {*methods.METHODS, *methods.ALIASES}
    assert methods.find("density") is methods.find("pfb")
    assert methods.resolve("density") == small(method="density").method == "pfb", "one name after it was looked up"
    assert methods.names()[:2] == ["full", "pfb"]
    assert "rho" in methods.names()
    for name in methods.VARIANTS:
        preset = methods.METHODS[name].preset
        assert preset.keys() <= methods.settings_of(methods.METHODS[name].implementation).keys()


def test_the_number_of_classes_comes_from_the_data() -> None:
    r = small(method="last_loss_proportional", prune_ratio=0.5, **{"last_loss_proportional.cap": "chance"})
    selector = r.selector()
    assert selector is not None
    assert selector.config()["num_classes"] == r.data.classes == 10
    with pytest.raises(ValueError, match="no setting 'num_classes'"):
        small(method="last_loss_proportional", **{"last_loss_proportional.num_classes": 3})


def test_infobatch_is_the_hand_written_loop_bit_for_bit() -> None:
    r = small(method="infobatch", prune_ratio=0.5)
    loaded = load(r)
    model = nets.build(r.model.name, 10, r.model.options, None, r.seed).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    policy = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
    sampler = InfoBatch(160, 0.5, schedule=r.schedule, seed=r.seed)
    done = 0
    for epoch in range(4):
        sampler.set_epoch(epoch)
        ids = torch.tensor(list(sampler))
        batches = [(ids[b : b + 32], seed_of(r.seed, epoch, b // 32, 0)) for b in range(0, len(ids) - 31, 32)]
        for b, (x, y, batch) in enumerate(loaded.train.batches(batches)):
            outputs = model(x.to(memory_format=torch.channels_last))
            each = F.cross_entropy(outputs, y, label_smoothing=0.1, reduction="none")
            sampler.observe(batch, each)
            (sampler.weights(batch) * each).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            # An epoch of fewer steps goes through the learning rates of a whole one.
            while done < 5 * epoch + (b + 1) * 5 // len(batches):
                policy.step()
                done += 1
    training = trained(r)
    assert same(training.model.state_dict(), model.state_dict())
    assert training.policy.last_epoch == done == 20


@pytest.mark.parametrize("method", ["dyn_unc", "ucb"])
def test_label_smoothing_is_left_out_of_what_a_method_of_probabilities_is_told(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Tensor] = []
    monkeypatch.setattr(SAMPLERS[method], "learn", lambda self, ids, losses: told.append(losses))
    r = small(method=method, prune_ratio=0.5, label_smoothing=0.5, length=1, window=[0, 1])
    training = trained(r)
    training.model.train()
    outputs, y = torch.randn(8, 10), torch.randint(10, (8,))
    training._observe(torch.arange(8), outputs, y)
    smoothing = {"dyn_unc": 0.0, "ucb": 0.5}[method]
    assert torch.equal(told[-1], F.cross_entropy(outputs, y, label_smoothing=smoothing, reduction="none"))


def test_a_recipe_too_short_for_a_window_is_said_before_it_trains() -> None:
    with pytest.warns(UserWarning, match=r"visited about 7 times .* 10 visits"):
        check_trainable(load_recipe("tiny-cifar10").with_settings({"method": "dyn_unc", "prune_ratio": 0.5}))
    endless = {"method": "dyn_unc", "prune_ratio": 0.5, "window": [1, None]}
    with pytest.warns(UserWarning, match=r"visited about 8 times .* 10 visits"):
        check_trainable(load_recipe("tiny-cifar10").with_settings(endless))


@pytest.mark.parametrize("method", [m if m in EVERY_DAY else pytest.param(m, marks=pytest.mark.slow) for m in LEARNING])
def test_a_run_stopped_after_any_step_ends_with_the_same_bits(method: str, tmp_path: Path) -> None:
    r = small(method=method, prune_ratio=0.4)
    whole, parts = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "parts")
    for folder in (whole, parts):
        folder.open(r, resume=False)
    trained(r, whole)
    loaded = load(r)
    sessions, done = 0, False
    while not done:
        training = Training(r, loaded, CPU, parts, show=False)
        stops_after = iter([False, True])
        done = training.run(lambda: next(stops_after))  # noqa: B023  called within this round of the loop
        if training.blocker is not None:
            training.blocker.remove()
        sessions += 1
    assert sessions > 4
    assert_same_run(parts, whole)


Outcome = tuple[list[dict[str, Any]], Tensor, Any]
TOGETHER = ["last_loss", "balanced_remembered", "infobatch", "selective_backprop"]


def _on_two_ranks(rank: int, parent: str) -> dict[str, Outcome]:
    return {method: _train_in(RunFolder(Path(parent) / method), method) for method in TOGETHER}


def _train_in(folder: RunFolder, method: str) -> Outcome:
    r = small(method=method, prune_ratio=0.5)
    training = Training(r, load(r), CPU, folder, show=False)
    assert training.run()
    weights = torch.cat([p.detach().flatten() for p in training.model.parameters()])
    if training.sampler is not None:
        return folder.read_metrics(), weights, training.sampler.state_dict()
    assert training.blocker is not None
    return folder.read_metrics(), weights, training.blocker.selector.state_dict()


@pytest.fixture(scope="module")
def of_both_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Outcome]]:
    """What each rank ends with, by method; one pair of processes for all, since importing takes longest."""
    parent = tmp_path_factory.mktemp("ranks")
    for method in TOGETHER:
        RunFolder(parent / method).open(small(method=method, prune_ratio=0.5), resume=False)
    return processes.run(2, _on_two_ranks, str(parent))


@pytest.mark.parametrize("method", TOGETHER)
def test_two_processes_end_with_the_same_weights_and_the_same_memory(
    method: str, of_both_ranks: list[dict[str, Outcome]]
) -> None:
    (metrics, w0, state0), (_, w1, state1) = (found[method] for found in of_both_ranks)
    assert torch.equal(w0, w1)
    assert metrics[-1]["seen"] == 4 * 160
    assert plain(state0) == plain(state1)
    assert without_times(metrics)[-1]["retained"] < 4 * 160


@pytest.mark.parametrize("method", ["infobatch", "ucb", "divbs", "grad_norm", "last_loss", "balanced"])
def test_segmentation_trains_with_rivals_too(method: str, tmp_path: Path) -> None:
    r = load_recipe("tiny-voc").with_settings(
        {
            "root": "synthetic",
            "data.train_samples": 40,
            "data.test_samples": 4,
            "data.size": [32, 32],
            "model.options": {"width": 8, "blocks": [1, 1, 1, 1], "head_width": 16},
            "batch_size": 8,
            "length": 13,
            "window": [3, 10],
            "log_every": 4,
            "multi_scale": [],
            "method": method,
        }
    )
    folder = RunFolder(tmp_path / "run")
    folder.open(r, resume=False)
    training = trained(r, folder)
    assert training.step == 13
    assert [m["round"] for m in folder.read_metrics()] == [1, 2, 3, 4]
    counts = training._blocking()
    assert counts["seen"] == 13 * 8
    # Steps 3 to 9 for a selector; whole epochs of 5 steps, the second and what there is of others, for a sampler.
    assert counts["pruned_steps"] == (5 if training.sampler is not None else 7)
    assert counts["retained"] < counts["seen"]


def test_weights_and_losses_per_image_are_those_of_a_loop() -> None:
    for name in ("tiny-voc", "tiny-cifar10"):
        r = load_recipe(name)
        task = Training.__init__.__globals__["tasks"].make(r)
        generator = torch.Generator().manual_seed(0)
        if name == "tiny-voc":
            outputs: Any = {k: torch.randn(3, 21, 5, 5, generator=generator) for k in ("out", "aux")}
            y = torch.randint(21, (3, 5, 5), generator=generator)
            y[0, :2], y[1] = 255, 255
        else:
            outputs, y = torch.randn(3, 10, generator=generator), torch.randint(10, (3,), generator=generator)
        weights = torch.tensor([2.0, 0.5, 1.5])
        expected, total, pixels = [], 0.0, 0
        for i in range(3):
            labelled = y[i] != 255
            heads = {"": outputs[i]} if isinstance(outputs, Tensor) else {k: v[i] for k, v in outputs.items()}
            loss = 0.0
            for head, logits in heads.items():
                flat = logits.reshape(len(logits), -1).T[labelled.reshape(-1)]
                each = F.cross_entropy(
                    flat, y[i][labelled].reshape(-1), label_smoothing=r.label_smoothing, reduction="sum"
                )
                loss += float(each) * (r.auxiliary_weight if head == "aux" else 1)
            n = int(labelled.sum())
            expected.append(loss / max(1, n))
            total += float(weights[i]) * loss
            pixels += n
        assert task.losses(outputs, y).tolist() == pytest.approx(expected, rel=1e-5)
        assert float(task.loss(outputs, y, weights)) == pytest.approx(total / pixels, rel=1e-5)
        assert float(task.loss(outputs, y, torch.ones(3))) == pytest.approx(float(task.loss(outputs, y)), rel=1e-5)


def test_a_run_that_was_called_density_goes_on_as_pfb(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.open(small(method="pfb", prune_ratio=0.5), resume=False)
    folder.config.write_text(folder.config.read_text().replace("method: pfb", "method: density"))
    folder.check(small(method="pfb", prune_ratio=0.5), resume=True)
    folder.check(small(method="density", prune_ratio=0.5), resume=True)


def test_settings_are_refused_before_data_are_read_and_those_of_other_methods_do_not_matter(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="threshold must be 'mean', 'match' or a quantile"):
        check_trainable(small(method="infobatch", prune_ratio=0.5, **{"infobatch.threshold": 2.0}))
    with pytest.raises(ValueError, match="infobatch has no setting 'treshold'; did you mean threshold"):
        small(**{"infobatch.treshold": 0.5})
    folder = RunFolder(tmp_path / "run")
    folder.open(small(method="ucb", prune_ratio=0.5), resume=False)
    folder.check(small(method="ucb", prune_ratio=0.5, **{"density.noise": 0.5, "rho.losses": "x"}), resume=True)
    with pytest.raises(ValueError, match=r"another run \(ucb.c was 1.0, is 2.0\)"):
        folder.check(small(method="ucb", prune_ratio=0.5, **{"ucb.c": 2.0}), resume=True)


# -------------------------------------------------------------------- equal terms


def test_at_equal_flops_every_method_costs_what_pfb_does() -> None:
    recipe = load_recipe("tiny-cifar10")
    trials = plan(recipe, ["pfb", "random", "divbs", "last_loss"], [0.5], [0], {}, equal="flops")
    costs = {t.group.method: price.predicted_cost(t.recipe).step for t in trials}
    assert costs["pfb"] == pytest.approx(0.5537, abs=1e-3)
    for method, cost in costs.items():
        assert cost == pytest.approx(costs["pfb"], abs=1e-3), method
    ratios = {t.group.method: t.recipe.prune_ratio for t in trials}
    assert ratios["random"] < ratios["pfb"] < ratios["divbs"]


def test_at_equal_ratio_infobatch_prunes_what_the_others_do() -> None:
    trials = plan(load_recipe("tiny-cifar10"), ["random", "infobatch", "infobatch_dagger"], [0.5], [0], {}, "ratio")
    ratios = {t.group.method: t.recipe.prune_ratio for t in trials}
    assert ratios == {"random": 0.5, "infobatch": 0.5, "infobatch_dagger": 0.526}
    (infobatch,) = (t for t in trials if t.group.method == "infobatch")
    assert infobatch.recipe.methods["infobatch"] == {"threshold": "match"}
    assert infobatch.group.label == "infobatch, p = 0.5, infobatch.threshold=match"
    with pytest.raises(ValueError, match="only 95% are candidates"):
        plan(load_recipe("tiny-cifar10"), ["infobatch_dagger"], [0.96], [0], {}, "ratio")


def test_random_joins_at_the_ratios_where_it_costs_what_the_others_do() -> None:
    recipe = load_recipe("tiny-cifar10")
    trials = plan(recipe, ["full", "random", "pfb", "divbs", "loss", "ucb"], [0.5], [0], {}, random_at_equal_cost=True)
    assert [t.group.ratio for t in trials if t.group.method == "random"] == [0.5, 0.446, 0.332]
    assert len(trials) == 8


# ------------------------------------------------------------ losses of a holdout model


def test_a_holdout_model_sees_other_images_and_its_losses_feed_rho(tmp_path: Path) -> None:
    file, holdout, run = tmp_path / "losses.pt", tmp_path / "holdout", tmp_path / "rho"
    words = ["train", "tiny-cifar10", "--data", "synthetic", *SETTINGS]
    assert (
        main([*words, "--method", "full", "--out", str(holdout), "data.holdout=true", "--save-losses", str(file)]) == 0
    )
    saved = torch.load(file, weights_only=True)
    assert saved["holdout"] is True
    r = small(method="full", **{"data.holdout": True})
    flops = price.sample_flops(r)  # a whole run of 4 epochs, and each image scored once
    assert saved["cost"]["runs"] == pytest.approx(1 + 160 * flops.forward / (4 * 160 * flops.step))
    mine, others = load(small()).train, load(r).train
    assert not any(torch.equal(mine.picture(i), others.picture(j)) for i in range(20) for j in range(160))
    state = RunFolder(holdout).load()
    assert state is not None
    expected = losses.evaluate(r, state["model"], CPU)
    assert torch.equal(saved["losses"], expected)
    model = nets.build(r.model.name, 10, r.model.options, None, r.seed)
    model.load_state_dict(state["model"])
    model.eval()
    unchanged = small(**{"data.augment": "none"})
    x, y, _ = next(iter(load(unchanged).train.batches([(torch.arange(10), 0)])))
    with torch.no_grad():
        by_hand = F.cross_entropy(model(x), y, reduction="none")  # plain, whatever the training's smoothing
    assert torch.allclose(expected[:10], by_hand, atol=1e-4)
    rho = ["--method", "rho", f"rho.losses={file}", "--prune-ratio", "0.5", "--out", str(run)]
    assert main([*words, *rho]) == 0
    remembered = ["--method", "rho_remembered", f"rho_remembered.losses={file}", "--prune-ratio", "0.5"]
    assert main([*words, *remembered, "--out", str(tmp_path / "remembered")]) == 0
    assert main([*words, "--method", "rho", "--prune-ratio", "0.5", "--out", str(tmp_path / "none")]) == 2
