"""Losses and scores against slow loops in float64, with classes that are absent and pixels that do not count."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("yaml")
pytest.importorskip("torchmetrics")
pytest.importorskip("tqdm")

from halfway.lab.data import TestSet
from halfway.lab.recipes.reading import load
from halfway.lab.training import tasks

CPU = torch.device("cpu")
CLASSES = 4


def task(name: str = "segmentation", **settings: Any) -> tasks.Task:
    recipe = load("tiny-voc" if name == "segmentation" else "tiny-cifar10")
    changes = {"data.classes": CLASSES, "label_smoothing": 0.0, **settings}
    return tasks.make(recipe.with_settings(changes))


class Pictures(TestSet):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def batches(self, batch_size: int, rank: int = 0, ranks: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(self.x[rank::ranks].split(batch_size), self.y[rank::ranks].split(batch_size), strict=True)


class Fixed(nn.Module):
    """Answers with what the pictures' first pixels ask for: sample i gets `answers[i]`."""

    def __init__(self, answers: Tensor) -> None:
        super().__init__()
        self.answers = answers

    def forward(self, x: Tensor) -> Tensor:
        return self.answers[x.flatten(1)[:, 0].long()]


def numbered(count: int, *size: int) -> Tensor:
    return torch.arange(count).float().view(-1, 1, 1, 1).expand(count, 3, *size)


def slow_miou(predicted: Tensor, y: Tensor) -> float:
    """Pixel by pixel; classes that are neither there nor predicted do not count."""
    overlap, union = [0] * CLASSES, [0] * CLASSES
    for p, t in zip(predicted.flatten().tolist(), y.flatten().tolist(), strict=True):
        if t == 255:
            continue
        for c in range(CLASSES):
            overlap[c] += p == c and t == c
            union[c] += p == c or t == c
    return 100 * math.fsum(o / u for o, u in zip(overlap, union, strict=True) if u) / sum(u > 0 for u in union)


def masks(count: int, height: int, width: int, classes: int = CLASSES, ignored: float = 0.2) -> Tensor:
    y = torch.randint(classes, (count, height, width))
    return y.masked_fill(torch.rand(y.shape) < ignored, 255)


# ------------------------------------------------------------------------ scores


@pytest.mark.parametrize("ignored", [0.0, 0.3])
@pytest.mark.parametrize(("there", "predicted"), [(4, 4), (2, 4), (4, 2), (2, 2)])
def test_miou_is_that_of_a_slow_loop(there: int, predicted: int, ignored: float) -> None:
    """Also with classes that are never there, never predicted, or neither."""
    y = masks(5, 7, 9, there, ignored)
    logits = torch.randn(5, CLASSES, 7, 9)
    logits[:, predicted:] = -100
    score = task(evaluation_batch=2).evaluate(Fixed(logits), Pictures(numbered(5, 7, 9), y), CPU).score
    assert score == pytest.approx(slow_miou(logits.argmax(1), y), abs=1e-4)


def test_miou_is_of_all_pixels_together_not_a_mean_over_images() -> None:
    y = torch.zeros(2, 8, 8, dtype=torch.long)
    y[0, :, :4] = 1
    y[1, 0, 0] = 1
    logits = F.one_hot(torch.zeros_like(y), CLASSES).permute(0, 3, 1, 2).float()
    score = task(evaluation_batch=1).evaluate(Fixed(logits), Pictures(numbered(2, 8, 8), y), CPU).score
    assert score == pytest.approx(100 * (95 / 128 + 0) / 2, abs=1e-4)


def test_what_is_predicted_at_ignored_pixels_does_not_matter() -> None:
    y = masks(3, 8, 8, ignored=0.5)
    logits = torch.randn(3, CLASSES, 8, 8)
    other = torch.where((y == 255).unsqueeze(1), torch.randn_like(logits), logits)
    one, two = (task().evaluate(Fixed(z), Pictures(numbered(3, 8, 8), y), CPU) for z in (logits, other))
    assert one == two, "score and losses"
    perfect = F.one_hot(y.clamp(max=CLASSES - 1), CLASSES).permute(0, 3, 1, 2).float()
    assert task().evaluate(Fixed(perfect), Pictures(numbered(3, 8, 8), y), CPU).score == 100


def test_accuracy_is_the_share_of_right_answers() -> None:
    logits, y = torch.randn(50, CLASSES), torch.randint(CLASSES, (50,))
    right = sum(
        max(range(CLASSES), key=row.__getitem__) == t for row, t in zip(logits.tolist(), y.tolist(), strict=True)
    )
    found = task("classification", evaluation_batch=7).evaluate(Fixed(logits), Pictures(numbered(50, 2, 2), y), CPU)
    assert found.score == pytest.approx(100 * right / 50, abs=1e-4)


@pytest.mark.parametrize("name", ["classification", "segmentation"])
def test_the_score_does_not_depend_on_the_batch_size(name: str) -> None:
    size = (8, 8)
    logits = torch.randn(13, CLASSES, *(size if name == "segmentation" else ()))
    y = masks(13, *size) if name == "segmentation" else torch.randint(CLASSES, (13,))
    pictures = Pictures(numbered(13, *size), y)
    scores = {task(name, evaluation_batch=n).evaluate(Fixed(logits), pictures, CPU).score for n in (1, 4, 13, 500)}
    assert len(scores) == 1


def test_a_limit_stops_after_so_many_batches() -> None:
    logits, y = torch.randn(12, CLASSES), torch.randint(CLASSES, (12,))
    some, few = Pictures(numbered(12, 2, 2), y), Pictures(numbered(12, 2, 2)[:6], y[:6])
    judge = task("classification", evaluation_batch=3)
    assert judge.evaluate(Fixed(logits), some, CPU, limit=2) == judge.evaluate(Fixed(logits), few, CPU)


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_runs_in_eval_mode_without_gradients_and_leaves_the_mode_as_it_was(training: bool) -> None:
    seen = []

    class Watching(Fixed):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((self.training, torch.is_grad_enabled()))
            if len(seen) == 2:
                raise RuntimeError("no more")
            return super().forward(x)

    model = Watching(torch.randn(4, CLASSES)).train(training)
    pictures = Pictures(numbered(4, 2, 2), torch.zeros(4, dtype=torch.long))
    task("classification").evaluate(model, pictures, CPU)
    assert model.training is training
    with pytest.raises(RuntimeError, match="no more"):
        task("classification").evaluate(model, pictures, CPU)
    assert model.training is training, "after a failure, too"
    assert seen == [(False, False)] * 2


def test_mixed_precision_and_channels_last_reach_the_model() -> None:
    seen = []

    class Watching(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            seen.append((out.dtype, x.is_contiguous(memory_format=torch.channels_last)))
            return out

    model, pictures = Watching(3, CLASSES, 1), Pictures(torch.randn(2, 3, 40, 40), masks(2, 40, 40))
    task(precision="amp", channels_last=True).evaluate(model, pictures, CPU)
    task(precision="float32", channels_last=False).evaluate(model, pictures, CPU)
    assert seen == [(torch.bfloat16, True), (torch.float32, False)]


# ------------------------------------------------------------- loss of an evaluation


def slow_losses(logits: Tensor, y: Tensor) -> list[float]:
    """Of each image: the mean over its labelled pixels of -log p, without smoothing; 0 without any."""
    out = []
    for z, target in zip(logits.double(), y, strict=True):
        z, target = z.reshape(CLASSES, -1), target.reshape(-1)
        terms = [
            math.log(sum(math.exp(v - float(z[t, i])) for v in z[:, i].tolist()))
            for i, t in enumerate(target.tolist())
            if t != 255
        ]
        out.append(sum(terms) / max(1, len(terms)))
    return out


@pytest.mark.parametrize("name", ["classification", "segmentation"])
@pytest.mark.parametrize("batch", [4, 11, 500])
def test_the_loss_of_an_evaluation_is_the_mean_plain_loss_of_an_image(name: str, batch: int) -> None:
    size = (3, 5)
    logits = 4 * torch.randn(11, CLASSES, *(size if name == "segmentation" else ()))
    y = masks(11, *size) if name == "segmentation" else torch.randint(CLASSES, (11,))
    right = F.one_hot(y[:3].clamp(max=CLASSES - 1), CLASSES).movedim(-1, 1).float()
    logits[:3] += 20 * right  # some that are as good as learned
    found = task(name, evaluation_batch=batch, label_smoothing=0.1).evaluate(
        Fixed(logits), Pictures(numbered(11, *size), y), CPU
    )
    losses = slow_losses(logits, y)
    assert found.loss == pytest.approx(sum(losses) / 11, rel=1e-5)
    assert found.small == pytest.approx(sum(loss < tasks.SMALL_LOSS for loss in losses) / 11)
    assert 0 < found.small < 1


def test_several_scales_have_a_score_and_no_loss() -> None:
    found = task().evaluate(Coarse(), Pictures(torch.randn(2, 3, 40, 40), masks(2, 40, 40)), CPU, scales=(1.0,))
    assert (found.loss, found.small) == (None, None)


# ------------------------------------------------------------------- multi-scale


class Coarse(nn.Module):
    """Logits at half the size that depend on place and scale, in a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, CLASSES, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"out": self.layer(x), "aux": torch.full_like(self.layer(x), torch.nan)}


def test_multi_scale_is_the_average_of_all_scales_flipped_and_not() -> None:
    x, y = torch.randn(2, 3, 40, 52), masks(2, 40, 52)
    model, scales = Coarse(), (0.5, 1.0, 1.75)
    with torch.no_grad():
        predicted, losses = task().predict(model, x, y, scales)
    assert losses is None, "the average of several scales has no logits"
    average = torch.zeros(2, CLASSES, 40, 52, dtype=torch.float64)
    for scale in scales:
        size = [max(32, round(40 * scale)), max(32, round(52 * scale))]
        for flip in (False, True):
            for i in range(2):
                picture = F.interpolate(x[i : i + 1], size, mode="bilinear", align_corners=False)
                picture = torch.flip(picture, [3]) if flip else picture
                logits = model(picture)["out"].detach()
                logits = torch.flip(logits, [3]) if flip else logits
                logits = F.interpolate(logits.double(), (40, 52), mode="bilinear", align_corners=False)
                average[i] += torch.softmax(logits[0], 0) / 6
    best = average.topk(2, dim=1).values
    sure = best[:, 0] - best[:, 1] > 1e-5
    assert sure.float().mean() > 0.99
    assert torch.equal(predicted[sure], average.argmax(1)[sure])
    with torch.no_grad():
        once, _ = task().predict(model, x, y, ())
        unflipped, _ = task().predict(model, x, y, (1.0,))
    assert not torch.equal(once, predicted)
    assert not torch.equal(once, unflipped), "this model is not the same for a flipped picture"


def test_a_model_that_flips_with_its_pictures_scores_the_same_at_scale_1() -> None:
    model = nn.Conv2d(3, CLASSES, 1).double()
    x, y = torch.randn(2, 3, 36, 36, dtype=torch.float64), masks(2, 36, 36)
    pictures = Pictures(x, y)
    once = task().evaluate(model, pictures, CPU).score
    assert task().evaluate(model, pictures, CPU, scales=(1.0,)).score == pytest.approx(once, abs=0.2)
    with torch.no_grad():
        assert torch.equal(task().predict(model, x, y, (1.0,))[0], task().predict(model, x, y, ())[0])


def test_a_model_that_always_says_the_same_does_so_at_every_scale() -> None:
    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tensor([0.0, 2.0, 1.0, 0.0]).view(1, CLASSES, 1, 1).expand(len(x), CLASSES, *x.shape[-2:])

    y = masks(2, 33, 47)
    pictures = Pictures(torch.randn(2, 3, 33, 47), y)
    once = task().evaluate(Constant(), pictures, CPU).score
    assert once == pytest.approx(slow_miou(torch.ones_like(y), y), abs=1e-4)
    assert task().evaluate(Constant(), pictures, CPU, scales=(0.5, 0.75, 1.0, 1.25)).score == once


def test_predictions_at_another_size_are_brought_to_that_of_the_mask() -> None:
    """The mask has the size of the picture on disk, the model's output its own."""
    small = torch.randn(1, CLASSES, 5, 5)
    y = masks(1, 20, 20)
    predicted, _ = task().predict(Fixed(small), numbered(1, 20, 20), y, ())
    assert torch.equal(predicted, F.interpolate(small, (20, 20), mode="bilinear", align_corners=False).argmax(1))


# ------------------------------------------------------------------------ losses


def slow_loss(logits: Tensor, y: Tensor, smoothing: float) -> float:
    """The mean over labelled pixels of -sum_c q_c log p_c with q = (1 - s) one-hot + s / C."""
    terms = []
    rows = logits.double().movedim(1, -1).reshape(-1, CLASSES).tolist()
    for row, t in zip(rows, y.flatten().tolist(), strict=True):
        if t == 255:
            continue
        norm = math.log(math.fsum(math.exp(v) for v in row))
        target = [(1 - smoothing) * (c == t) + smoothing / CLASSES for c in range(CLASSES)]
        terms.append(-math.fsum(q * (v - norm) for q, v in zip(target, row, strict=True)))
    return math.fsum(terms) / len(terms)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_mean_over_labelled_pixels(smoothing: float) -> None:
    logits, y = torch.randn(3, CLASSES, 6, 5), masks(3, 6, 5)
    y[1] = 255  # a picture without any
    loss = task(label_smoothing=smoothing).loss(logits, y)
    assert float(loss) == pytest.approx(slow_loss(logits, y, smoothing), rel=1e-5)
    theirs = F.cross_entropy(logits, y, ignore_index=255, label_smoothing=smoothing)
    torch.testing.assert_close(loss, theirs)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_classification_is_trained_by_cross_entropy(smoothing: float) -> None:
    logits, y = torch.randn(9, CLASSES), torch.randint(CLASSES, (9,))
    loss = task("classification", label_smoothing=smoothing).loss(logits, y)
    assert float(loss) == pytest.approx(slow_loss(logits, y, smoothing), rel=1e-5)


def test_without_a_labelled_pixel_loss_and_gradient_are_zero() -> None:
    logits = torch.randn(2, CLASSES, 4, 4, requires_grad=True)
    y = torch.full((2, 4, 4), 255)
    loss = task().loss({"out": logits, "aux": logits}, y)
    loss.backward()
    assert loss == 0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_the_auxiliary_head_has_its_weight() -> None:
    out, aux, y = torch.randn(2, CLASSES, 4, 4), torch.randn(2, CLASSES, 4, 4), masks(2, 4, 4)
    for weight in (0.0, 0.4, 1.0):
        judge = task(auxiliary_weight=weight)
        expected = slow_loss(out, y, 0) + weight * slow_loss(aux, y, 0)
        assert float(judge.loss({"out": out, "aux": aux}, y)) == pytest.approx(expected, rel=1e-5)
        assert float(judge.loss({"out": out}, y)) == pytest.approx(slow_loss(out, y, 0), rel=1e-5)


def test_a_training_batch_of_segmentation_has_two_samples_at_least() -> None:
    assert task().smallest_batch == 2
    assert task("classification").smallest_batch == 1
    pytest.importorskip("torchvision")
    from halfway.lab.models import small as nets

    model = nets.small_deeplabv3(CLASSES, width=4, blocks=(1, 1, 1, 1), head_width=4).train()
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(torch.randn(1, 3, 32, 32))
    model(torch.randn(2, 3, 32, 32))
