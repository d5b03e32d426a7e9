"""timm: its stages as cuts, and its helpers around a training step."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

pytest.importorskip("timm")

import timm
from timm.data import Mixup
from timm.loss import AsymmetricLossSingleLabel, BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3, NativeScaler

from halfway import Density, ForwardBlocker, WithIds, layers
from halfway.lab.cli import main
from halfway.selectors import Balanced
from tests.helpers import processes

GROUP = "timm"
N, CLASSES = 10, 5
STEPS = 3


def exact(model: nn.Module) -> nn.Module:
    """Without BatchNorm's statistics and drop path, training on the retained samples is the exact reference."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) or type(module).__name__ in ("DropPath", "Dropout"):
            module.eval()
    return model


def small() -> nn.Module:
    return exact(timm.create_model("resnet10t", num_classes=CLASSES))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(N, 3, 32, 32, generator=generator), torch.randint(0, CLASSES, (N,), generator=generator)


def blocked(model: nn.Module, at: str = "layer1", **options: Any) -> ForwardBlocker:
    return ForwardBlocker(model, at, 0.4, selector=Density(num_centroids=4), **options)


def assert_same_gradients(model: nn.Module, reference: nn.Module) -> None:
    for found, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-4, atol=1e-6)


# ----------------------------------------------------------------------- stages

# By model: the stages that are listed, and what would have stood in their place without timm's names.
STAGES: dict[str, tuple[dict[str, str], set[str]]] = {
    "resnet18": (
        {"act1": "0 (1/2)", "layer1": "1 (1/4)", "layer2": "2 (1/8)", "layer3": "3 (1/16)", "layer4": "4 (1/32)"},
        set(),
    ),
    "convnext_atto": ({f"stages.{i}": f"{i} (1/{4 * 2**i})" for i in range(4)}, {"stages"}),
    "swin_tiny_patch4_window7_224": ({f"layers.{i}": f"{i} (1/{4 * 2**i})" for i in range(4)}, {"layers"}),
    "vit_tiny_patch16_224": ({f"blocks.{i}": f"{i} (1/16)" for i in range(12)}, {"blocks"}),
    "mobilenetv3_small_100": (
        {
            "bn1": "0 (1/2)",
            "blocks.0": "1 (1/4)",
            "blocks.1": "2 (1/8)",
            "blocks.3": "3 (1/16)",
            "blocks.5": "4 (1/32)",
        },
        {"conv_stem"},
    ),
    "efficientnet_b0": (
        {f"blocks.{block}": f"{i} (1/{2 ** (i + 1)})" for i, block in enumerate((0, 1, 2, 4, 6))},
        {"blocks"},
    ),
    "regnety_002": (
        {name: f"{i} (1/{2 ** (i + 1)})" for i, name in enumerate(("stem", "s1", "s2", "s3", "s4"))},
        set(),
    ),
}


@pytest.mark.parametrize("name", STAGES)
def test_stages_are_listed_under_timm_s_names(name: str) -> None:
    wanted, replaced = STAGES[name]
    with torch.device("meta"):
        model = timm.create_model(name).train()
    table = layers(model, torch.randn(2, 3, 224, 224, device="meta"))
    assert {row.name: row.stage for row in table if row.stage} == wanted
    assert not replaced & {row.name for row in table}
    channels = {stage["module"]: stage["num_chs"] for stage in model.feature_info}
    for row in table:
        if row.stage:
            assert channels[row.name] in row.output_shape
    shares = [row.shallow_share for row in table]
    assert shares == sorted(shares)


def test_a_backbone_s_stages_are_those_of_the_model_around_it() -> None:
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = timm.create_model("resnet10t", features_only=True, out_indices=(1, 2))
            self.head = nn.Conv2d(128, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.backbone(x)[-1])

    stages = {row.name: row.stage for row in layers(Detector(), torch.randn(2, 3, 64, 64)) if row.stage}
    assert stages == {"backbone.act1": "0 (1/2)", "backbone.layer1": "1 (1/4)", "backbone.layer2": "2 (1/8)"}


def test_the_command_shows_stages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layers", "timm.models:regnety_002", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["layers"]
    assert {row["name"]: row["stage"] for row in rows}["s2"] == "2 (1/8)"
    assert {row["name"]: row["stage"] for row in rows}["s3.b1"] == ""
    assert main(["layers", "regnety_002"]) == 0
    assert "2 (1/8)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "at"),
    [
        ("resnet10t", "act1"),
        ("resnet10t", "layer1"),
        ("mobilenetv3_small_100", "bn1"),
        ("mobilenetv3_small_100", "blocks.1"),
        ("efficientnet_b0", "blocks.1"),
        ("regnety_002", "s1"),
        ("maxvit_rmlp_pico_rw_256", "stages.0"),
    ],
)
def test_a_stage_is_a_cut(name: str, at: str, feature: Callable[..., None]) -> None:
    options = {"img_size": 64} if name.startswith("maxvit") else {}
    model = exact(timm.create_model(name, num_classes=CLASSES, **options))
    blocker = blocked(model, at, reuse="replay")
    x = torch.randn(N, 3, 64, 64)
    for _ in range(2):
        model.zero_grad()
        model(blocker(x)).square().mean().backward()
    assert blocker.last is not None
    reference = copy.deepcopy(model)
    reference.zero_grad()
    reference(x[blocker.last.indices]).square().mean().backward()
    assert_same_gradients(model, reference)
    assert blocker.stats.steps_replayed == 2
    feature(GROUP, f"{name}, cut at stage `{at}`", blocker.stats)


# --------------------------------------------------------------------- the loop


def hard(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x, y


def soft(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=CLASSES)(x, y)


def binary(logits: Tensor, y: Tensor) -> Tensor:
    smooth = F.one_hot(y, CLASSES) * 0.9 + 0.1 / CLASSES
    return -(smooth * F.logsigmoid(logits) + (1 - smooth) * F.logsigmoid(-logits))


# timm's loss; the mixing before the blocker; the same loss written by hand, one per sample.
LOSSES: dict[str, tuple[nn.Module, Callable[..., Any], Callable[[Tensor, Tensor], Tensor]]] = {
    "SoftTargetCrossEntropy, Mixup": (
        SoftTargetCrossEntropy(),
        soft,
        lambda logits, y: -(y * logits.log_softmax(1)).sum(1),
    ),
    "LabelSmoothingCrossEntropy": (
        LabelSmoothingCrossEntropy(0.1),
        hard,
        lambda logits, y: F.cross_entropy(logits, y, label_smoothing=0.1, reduction="none"),
    ),
    "BinaryCrossEntropy": (BinaryCrossEntropy(0.1), hard, lambda logits, y: binary(logits, y).mean(1)),
    "BinaryCrossEntropy, Mixup, thresholded": (
        BinaryCrossEntropy(target_threshold=0.2),
        soft,
        lambda logits, y: F.binary_cross_entropy_with_logits(logits, (y > 0.2).float(), reduction="none").mean(1),
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_timm_s_helpers_train_as_a_loop_by_hand(name: str, feature: Callable[..., None]) -> None:
    criterion, mix, by_hand = LOSSES[name]
    model = small()
    averages = {n: p.clone() for n, p in model.named_parameters()}
    ema = ModelEmaV3(model, decay=0.9)
    blocker = blocked(model)
    optimizer = create_optimizer_v2(model, opt="lamb", lr=1e-2, weight_decay=0.05)
    for step in range(STEPS):
        x, y = mix(*batch(step))
        x_retained, y_retained = blocker(x, y)
        assert blocker.last is not None
        indices = blocker.last.indices
        reference = copy.deepcopy(model)
        optimizer.zero_grad()
        criterion(model(x_retained), y_retained).backward()
        reference.zero_grad()
        by_hand(reference(x[indices]), y[indices]).mean().backward()
        assert_same_gradients(model, reference)
        optimizer.step()
        ema.update(model)
        for n, p in model.named_parameters():
            averages[n] = 0.9 * averages[n] + 0.1 * p.detach()
    for n, p in ema.module.named_parameters():
        torch.testing.assert_close(p, averages[n], rtol=1e-4, atol=1e-6)
    assert blocker.stats.steps_replayed == STEPS
    assert blocker.stats.operations_computed == 0
    feature(GROUP, f"{name}, ModelEmaV3, LAMB", blocker.stats)


@pytest.mark.parametrize("opt", ["sgd", "adamw", "lamb", "lookahead_radam"])
def test_optimizers_step_between_replays(opt: str, feature: Callable[..., None]) -> None:
    model = small()
    blocker = blocked(model)
    optimizer = create_optimizer_v2(model, opt=opt, lr=1e-3)
    for step in range(STEPS):
        x, y = blocker(*batch(step))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert blocker.stats.steps_replayed == STEPS
    feature(GROUP, f"create_optimizer_v2, {opt}", blocker.stats)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_its_scaler(dtype: torch.dtype, feature: Callable[..., None]) -> None:
    model = small()
    blocker = blocked(model)
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.01, momentum=0.9)
    scaler = NativeScaler(device="cpu") if dtype is torch.float16 else None
    reference = copy.deepcopy(model)
    by_hand = torch.optim.SGD(reference.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    for step in range(STEPS):
        x, y = batch(step)
        x_retained, y_retained = blocker(x, y)
        with torch.autocast("cpu", dtype):
            loss = F.cross_entropy(model(x_retained), y_retained)
        if scaler is not None:
            scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
        else:
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        optimizer.zero_grad()
        assert blocker.last is not None
        F.cross_entropy(reference(x[blocker.last.indices]), y[blocker.last.indices]).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        by_hand.step()
        by_hand.zero_grad()
    for found, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0.02, atol=2e-3)
    assert blocker.stats.steps_replayed == STEPS - 1
    feature(GROUP, "autocast bfloat16" if scaler is None else "autocast float16, NativeScaler", blocker.stats)


# ------------------------------------------------------------- timm.task, ranks


def classification(model: nn.Module) -> Any:
    task = pytest.importorskip("timm.task")
    return task.ClassificationTask(model, SoftTargetCrossEntropy(), verbose=False)


def test_a_task_is_called_on_what_the_blocker_of_its_model_retained(feature: Callable[..., None]) -> None:
    model = small()
    task = classification(model)
    blocker = blocked(task.get_trainable_module())
    task.setup_ema(decay=0.9)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3)
    for step in range(STEPS):
        x, y = soft(*batch(step))
        x_retained, y_retained = blocker(x, y)
        reference = copy.deepcopy(model)
        optimizer.zero_grad()
        task(x_retained, y_retained)["loss"].backward()
        assert blocker.last is not None
        reference.zero_grad()
        F.cross_entropy(reference(x[blocker.last.indices]), y[blocker.last.indices]).backward()
        assert_same_gradients(model, reference)
        optimizer.step()
        task.update_ema(step)
    assert blocker.stats.steps_replayed == STEPS
    feature(GROUP, "timm.task.ClassificationTask with its EMA", blocker.stats)


def test_a_blocker_of_the_task_itself_says_what_is_wrong() -> None:
    blocker = blocked(classification(small()), "trainable_module.layer1")
    with pytest.raises(TypeError, match="missing a required argument: 'target'"):
        blocker(*soft(*batch(0)))


def _on_two_ranks(rank: int) -> tuple[list[Tensor], list[Tensor], int]:
    """The gradients of the last step, those by hand, and the steps replayed."""
    torch.manual_seed(0)
    model = timm.create_model("convnext_atto", num_classes=CLASSES)
    reference = copy.deepcopy(model)
    task = classification(model)
    task.prepare_distributed()
    blocker = blocked(task.get_trainable_module(), "stages.0")
    for step in range(STEPS):
        x, y = soft(*batch(10 * step + rank))
        x_retained, y_retained = blocker(x, y)
        model.zero_grad()
        reference.zero_grad()
        task(x_retained, y_retained)["loss"].backward()
        assert blocker.last is not None
        F.cross_entropy(reference(x[blocker.last.indices]), y[blocker.last.indices]).backward()
    wanted = [p.grad for p in reference.parameters()]
    for gradient in wanted:
        dist.all_reduce(gradient)
        gradient /= 2
    return [p.grad for p in model.parameters()], wanted, blocker.stats.steps_replayed


def test_a_task_prepared_for_two_processes(feature: Callable[..., None]) -> None:
    (first, wanted, replayed), (second, _, also_replayed) = processes.run(2, _on_two_ranks)
    assert replayed == also_replayed == STEPS
    for a, b, c in zip(first, second, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
        torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-6)
    feature(GROUP, "timm.task.ClassificationTask, prepare_distributed, 2 processes", (replayed, {}))


# ---------------------------------------------------------------- ids and losses


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Images in folders, as timm's ImageFolder data set reads them."""
    image = pytest.importorskip("PIL.Image")
    for label in range(2):
        (tmp_path / f"class{label}").mkdir()
        for i in range(8):
            pixels = np.random.default_rng(10 * label + i).integers(0, 255, (32, 32, 3), dtype=np.uint8)
            image.fromarray(pixels).save(tmp_path / f"class{label}" / f"{i}.png")
    return tmp_path


def test_ids_come_from_the_data_set_and_losses_from_a_criterion_without_reduction(
    folder: Path, feature: Callable[..., None]
) -> None:
    dataset = timm.data.create_dataset("", root=str(folder), is_training=True)
    dataset.transform = timm.data.create_transform((3, 32, 32), is_training=True)
    loader = DataLoader(WithIds(dataset), batch_size=8, shuffle=True)
    model = exact(timm.create_model("resnet10t", num_classes=2))
    blocker = ForwardBlocker(model, "layer1", 0.5, selector=Balanced(num_samples=len(dataset)))
    criterion = BinaryCrossEntropy(0.1, reduction="none")
    last = torch.full((len(dataset),), torch.nan)
    for _ in range(2):
        for x, y, ids in loader:
            x_retained, y_retained = blocker(x, y, ids=ids)
            losses = criterion(model(x_retained), y_retained).mean(1)
            blocker.observe(losses)
            losses.mean().backward()
            assert blocker.last is not None
            last[ids[blocker.last.indices]] = losses.detach()
    remembered = blocker.selector.state_dict()["losses"].squeeze(1)
    torch.testing.assert_close(remembered, last, rtol=0, atol=0, equal_nan=True)
    assert blocker.stats.steps_replayed == 4
    feature(GROUP, "ids of halfway.WithIds, losses of BinaryCrossEntropy", blocker.stats)


def test_the_losses_without_a_reduction_of_their_own_are_cross_entropies() -> None:
    """What docs/integrations/timm.md says to use in their place."""
    logits, (_, y) = torch.randn(N, CLASSES), batch(0)
    soft_y = torch.randn(N, CLASSES).softmax(1)
    smoothed = F.cross_entropy(logits, y, label_smoothing=0.1, reduction="none")
    torch.testing.assert_close(smoothed.mean(), LabelSmoothingCrossEntropy(0.1)(logits, y))
    mixed = F.cross_entropy(logits, soft_y, reduction="none")
    torch.testing.assert_close(mixed.mean(), SoftTargetCrossEntropy()(logits, soft_y))
    single = AsymmetricLossSingleLabel(reduction="none")(logits, y)
    torch.testing.assert_close(single.mean(), AsymmetricLossSingleLabel()(logits, y))
    assert single.shape == (N,)
    summed = BinaryCrossEntropy(0.1, reduction="none")(logits, y).sum(1)
    torch.testing.assert_close(summed.mean(), BinaryCrossEntropy(0.1, sum_classes=True)(logits, y))
