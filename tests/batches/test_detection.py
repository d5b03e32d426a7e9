"""Lists of images: a detector takes one argument with an entry per sample, beside targets with an entry per sample."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfway import ForwardBlocker

# Padding and stacking a list is another program for another number of images.
pytestmark = pytest.mark.filterwarnings("ignore:halfway computes the shallow layers twice")


class Detector(nn.Module):
    """Pads and stacks its images, as detectors do, and has losses of its own if it is given targets."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, stride=2)
        self.body = nn.Sequential(nn.ReLU(), nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(4, 4)

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        size = max(max(image.shape[1:]) for image in images)
        x = torch.stack([F.pad(i, (0, size - i.shape[2], 0, size - i.shape[1])) for i in images])
        boxes = self.head(self.body(self.stem(x)))
        if targets is None:
            return boxes
        return {"boxes": torch.stack([(b - t["boxes"]).abs().mean() for b, t in zip(boxes, targets, strict=True)])}


class Taking(nn.Module):
    """A detector whose forward has as many parameters as one likes."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.net = Detector()
        self.forward = forward.__get__(self)  # type: ignore[method-assign]


def images_and_targets(size: int, boxes: int = 2, channels: int = 3, same: bool = False) -> tuple[Any, Any]:
    images = [torch.randn(channels, 16 + (0 if same else i % 3), 18) for i in range(size)]
    return images, [{"boxes": torch.rand(boxes, 4) + i, "labels": torch.arange(boxes)} for i in range(size)]


def assert_retained(blocker: ForwardBlocker, cut: Any, whole: Any) -> None:
    assert blocker.last is not None
    assert type(cut) is type(whole)
    rows = blocker.last.indices.tolist()
    assert len(cut) == len(rows)
    assert all(found is whole[i] for found, i in zip(cut, rows, strict=True))


# ------------------------------------------------------------------------------------------------- which reading


@pytest.mark.parametrize("selector", ["density", "random"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_images_in_a_list_are_one_argument_and_cut_by_sample(size: int, selector: str) -> None:
    """Also two of them, which would fit forward(images, targets), and three, as many as they have channels."""
    model = Detector()
    blocker = ForwardBlocker(model, "stem", 0.5, selector=selector)
    for boxes in (size, 1, 5):
        images, targets = images_and_targets(size, boxes, same=True)
        kept, kept_targets = blocker(images, targets)
        if size > 1:
            assert_retained(blocker, kept, images)
            assert_retained(blocker, kept_targets, targets)
        model(kept).sum().backward()
    stats = blocker.stats
    assert (stats.samples_seen, stats.pruned_steps) == (3 * size, 0 if size == 1 else 3)
    assert not any("called" in reason for reason in stats.recompute_reasons)


@pytest.mark.parametrize("call", ["by name", "by position", "as tuples"])
@pytest.mark.parametrize("size", [2, 3, 6])
def test_a_model_with_losses_of_its_own_gets_images_and_targets(size: int, call: str) -> None:
    model = Detector()
    blocker = ForwardBlocker(model, "stem", 0.5)
    for _ in range(3):
        images, targets = images_and_targets(size, size, same=True)
        if call == "by name":
            batch = blocker(images=images, targets=targets)
            kept = batch["images"], batch["targets"]
            losses = model(**batch)
        else:
            kind = tuple if call == "as tuples" else list
            kept = blocker(kind(images), kind(targets), inputs=(0, 1))
            losses = model(*kept)
        assert_retained(blocker, list(kept[0]), images)
        assert_retained(blocker, list(kept[1]), targets)
        assert blocker.last is not None
        assert len(losses["boxes"]) == len(blocker.last.indices)
        losses["boxes"].mean().backward()
    assert blocker.stats.pruned_steps == 3
    assert not any("called" in reason for reason in blocker.stats.recompute_reasons)


def test_training_on_lists_is_training_on_the_retained_images() -> None:
    model = Detector()
    plain = copy.deepcopy(model)
    blocker = ForwardBlocker(model, "stem", 0.5)
    for size in (6, 4, 2, 5):
        images, targets = images_and_targets(size)
        images, targets = blocker(images=images, targets=targets).values()
        for net in (model, plain):
            net.zero_grad()
            net(images, targets)["boxes"].mean().backward()
        for mine, reference in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, reference.grad, rtol=1e-4, atol=1e-6)


def two(self: Any, a: Tensor, b: Tensor) -> Tensor:
    return self.net.stem(a) + self.net.stem(b).detach()


def many(self: Any, a: Tensor, b: Any = None, c: Any = None, d: Any = None) -> Tensor:
    return self.net(a)


def rest(self: Any, *images: Tensor) -> Tensor:
    return self.net(list(images))


def levels(self: Any, features: list[Tensor]) -> Tensor:
    return sum(map(self.net.stem, features))  # type: ignore[return-value]


def test_a_list_of_tensors_with_all_samples_holds_the_models_positionals() -> None:
    """Also in a last batch of two, with two targets in dicts: what a list is does not change on the way."""
    blocker = ForwardBlocker(Taking(two), None, 0.5, selector="random")
    for size in (6, 2, 3, 2):
        parts = [torch.randn(size, 3, 8, 8), torch.randn(size, 3, 8, 8)]
        kept, targets = blocker(parts, [{"y": torch.rand(2)} for _ in range(size)])
        assert blocker.last is not None
        assert len(targets) == len(blocker.last.indices)
        assert all(torch.equal(a, b[blocker.last.indices]) for a, b in zip(kept, parts, strict=True))


def test_a_list_that_was_one_argument_stays_one_when_it_gets_short_enough_for_positionals() -> None:
    blocker = ForwardBlocker(Taking(many), None, 0.5, selector="random")
    for size in (8, 4, 3, 2, 1):
        images, y = [torch.randn(size, 12, 12) for _ in range(size)], torch.arange(size)
        kept, kept_y = blocker(images, y)
        if blocker.last is not None:
            assert_retained(blocker, kept, images)
            assert kept_y.tolist() == blocker.last.indices.tolist()


@pytest.mark.parametrize("size", [2, 4, 5, 8])
def test_stacked_targets_tell_that_a_list_holds_samples(size: int) -> None:
    """Three channels, but as many targets as images."""
    blocker = ForwardBlocker(Taking(many), None, 0.5, selector="random")
    images, _ = images_and_targets(size)
    kept, y = blocker(images, torch.arange(size))
    assert_retained(blocker, kept, images)
    assert blocker.last is not None
    assert torch.equal(y, blocker.last.indices)


def test_a_list_of_levels_is_one_argument_whose_tensors_hold_all_samples() -> None:
    for inputs in (None, 0, [0]):
        model = Taking(levels)
        blocker = ForwardBlocker(model, None, 0.5, selector="random")
        features = [torch.randn(8, 3, 9, 9) for _ in range(3)]
        kept, y = blocker(features, torch.arange(8), inputs=inputs)
        assert blocker.last is not None
        assert len(kept) == 3
        assert all(torch.equal(a, b[y]) for a, b in zip(kept, features, strict=True))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_with_inputs_a_list_is_one_argument_also_where_forward_takes_any_number(size: int) -> None:
    blocker = ForwardBlocker(Taking(rest), None, 0.5, selector="random")
    images, targets = images_and_targets(size)
    kept, kept_targets = blocker(images, targets, inputs=0)
    if size > 1:
        assert_retained(blocker, kept, images)
        assert_retained(blocker, kept_targets, targets)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_images_alone_are_counted(size: int) -> None:
    for inputs in (None, 0):
        blocker = ForwardBlocker(Taking(levels), None, 0.5, selector="random")
        images, _ = images_and_targets(size)
        assert_retained(blocker, blocker(images, inputs=inputs), images)


def test_inputs_of_different_kinds_in_one_batch() -> None:
    """A list of images beside a tensor, and a mapping that holds lists."""
    images, targets = images_and_targets(4)
    sizes = torch.tensor([[16, 18]] * 4)
    blocker = ForwardBlocker(Detector(), None, 0.5, selector="random")
    kept, kept_sizes, _ = blocker(images, sizes, targets, inputs=(0, 1))
    assert_retained(blocker, kept, images)
    assert len(kept_sizes) == 2
    batch = blocker({"images": images, "targets": targets})
    assert_retained(blocker, batch["images"], images)
    assert_retained(blocker, batch["targets"], targets)


# --------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("size", [2, 4])
def test_an_error_about_a_tuple_of_images_says_how_it_was_read_and_what_to_do(size: int) -> None:
    images, targets = images_and_targets(size)
    blocker = ForwardBlocker(Taking(many), "net.stem", 0.5)
    words = (
        rf"batch\[1\] has {size} entries.*tuple in first place goes to the model as its arguments.*has 3 rows.*inputs=0"
    )
    with pytest.raises(ValueError, match=words):
        blocker(tuple(images), targets)
    kept, _ = blocker(tuple(images), targets, inputs=0)
    assert_retained(blocker, kept, tuple(images))


def test_an_error_about_a_list_of_positionals_says_how_it_was_read() -> None:
    blocker = ForwardBlocker(Taking(two), None, 0.5, selector="random")
    with pytest.raises(ValueError, match=r"batch\[1\] has 5 entries.*list in first place.*has 4 rows"):
        blocker([torch.randn(4, 3, 8, 8)] * 2, torch.arange(5))


def test_too_many_images_in_a_tuple_are_an_error_that_says_how_to_pass_them() -> None:
    images, targets = images_and_targets(5)
    with pytest.raises(TypeError, match=r"forward\(images, targets\).*too many.*tuple as positionals.*inputs="):
        ForwardBlocker(Detector(), "stem", 0.5)(tuple(images), targets)


def test_fewer_targets_than_images_are_refused() -> None:
    images, targets = images_and_targets(5)
    for call in ({"inputs": None}, {"inputs": 0}, {"inputs": (0, 1)}):
        with pytest.raises(ValueError, match=r"batch\[.\].* has . entries"):
            ForwardBlocker(Detector(), None, 0.5, selector="random")(images, targets[:4], **call)


def test_an_empty_list_is_an_empty_batch() -> None:
    with pytest.raises(ValueError, match="the batch is empty"):
        ForwardBlocker(Detector(), None, 0.5, selector="random")([], [])


def test_a_model_that_takes_a_tensor_is_an_error_that_says_to_stack() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    blocker = ForwardBlocker(model, "0", 0.5)
    with pytest.raises(TypeError, match=r"went to the model's forward\(input\) as one argument.*torch.stack"):
        blocker(list(torch.randn(8, 4)), torch.arange(8))
    assert len(model(blocker(torch.randn(8, 4)))) == 4


# ------------------------------------------------------------------------------------------------- real detectors


def ssdlite() -> tuple[nn.Module, str]:
    from torchvision.models.detection import ssdlite320_mobilenet_v3_large

    return ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=3), "backbone.features.0.1"


def retinanet() -> tuple[nn.Module, str]:
    from torchvision.models.detection import retinanet_resnet50_fpn

    sizes = {"min_size": 64, "max_size": 64}
    model = retinanet_resnet50_fpn(
        weights=None, weights_backbone=None, num_classes=3, trainable_backbone_layers=5, **sizes
    )
    return model, "backbone.body.layer1"


@pytest.mark.parametrize("make", [ssdlite, retinanet], ids=lambda f: f.__name__)
def test_torchvisions_detectors_train_on_the_retained_images(make: Any) -> None:
    pytest.importorskip("torchvision")
    model, at = make()
    plain = copy.deepcopy(model)
    blocker = ForwardBlocker(model, at, 0.5, reuse="recompute")
    for size in (4, 6):
        images = [torch.rand(3, 40, 48 + i) for i in range(size)]
        boxes = torch.tensor([[4.0, 4.0, 30.0, 30.0], [10.0, 8.0, 40.0, 36.0]])
        targets = [{"boxes": boxes.clone(), "labels": torch.tensor([1, 2])} for _ in range(size)]
        kept, kept_targets = blocker(images, targets, inputs=(0, 1))
        assert_retained(blocker, kept, images)
        assert_retained(blocker, kept_targets, targets)
        losses, reference = model(kept, kept_targets), plain(kept, kept_targets)
        assert losses.keys() == reference.keys()
        for name, loss in losses.items():
            assert torch.equal(loss, reference[name])
    assert blocker.stats.effective_ratio == 0.5
