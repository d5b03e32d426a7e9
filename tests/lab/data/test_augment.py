"""Augmentation: batches against loops over samples, and masks that follow their images."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("torchvision")
pytest.importorskip("tqdm")

import numpy as np
from PIL import Image

from halfway.lab.data import augment, geometry, load
from tests import ROOT
from tests.helpers.pictures import PURE, agree, generator, mask_folder, settings


@pytest.mark.parametrize("size", [(32, 32), (16, 24), (7, 9)])
def test_crop_flip_is_what_a_loop_over_samples_gives(size: tuple[int, int]) -> None:
    (H, W), B = size, 20
    x = torch.randint(0, 256, (B, 3, H, W), dtype=torch.uint8)
    got = augment.crop_flip(x, generator(3))
    g = generator(3)
    down, right = H // 8, W // 8
    top, left = torch.randint(0, 2 * down + 1, (B,), generator=g), torch.randint(0, 2 * right + 1, (B,), generator=g)
    flip = torch.rand(B, generator=g) < 0.5
    assert 0 < int(flip.sum()) < B
    for i in range(B):
        want = F.pad(x[i], (right, right, down, down))[:, top[i] : top[i] + H, left[i] : left[i] + W]
        assert torch.equal(got[i], want.flip(-1) if flip[i] else want)


def test_every_offset_of_crop_flip_occurs() -> None:
    x = torch.zeros(4000, 3, 32, 32, dtype=torch.uint8)
    x[:, :, 16, 16] = 1
    got = augment.crop_flip(x, generator())
    places = got[:, 0].flatten(1).argmax(1)
    assert set((places // 32).tolist()) == set(range(12, 21))
    # 9 offsets, and their mirror images.
    assert set((places % 32).tolist()) == set(range(11, 21))


@pytest.mark.parametrize("size", [(32, 32), (16, 48), (7, 9)])
def test_shift_flip_is_what_numpy_s_reflection_gives(size: tuple[int, int]) -> None:
    (H, W), B = size, 30
    x = torch.randint(0, 256, (B, 3, H, W), dtype=torch.uint8)
    got = augment.shift_flip(x, generator(3))
    g = generator(3)
    down, right = (torch.randint(-(n // 16), n // 16 + 1, (B,), generator=g) for n in size)
    flip = torch.rand(B, generator=g) < 0.5
    assert 0 < int(flip.sum()) < B
    seen = set()
    for i in range(B):
        around = np.pad(x[i].numpy(), ((0, 0), (H // 16,) * 2, (W // 16,) * 2), mode="reflect")
        top, left = int(down[i]) + H // 16, int(right[i]) + W // 16
        want = torch.from_numpy(around[:, top : top + H, left : left + W].copy())
        assert torch.equal(got[i], want.flip(-1) if flip[i] else want)
        seen.add((top, left))
    assert len(seen) > 10 or size == (7, 9)


def test_shift_flip_does_the_same_to_a_single_picture() -> None:
    pixels = torch.randint(0, 256, (1, 3, 16, 16), dtype=torch.uint8)
    possible = {augment.shift_flip(pixels, generator(i)).numpy().tobytes() for i in range(200)}
    assert len(possible) == 3 * 3 * 2
    policy = augment.POLICIES["shift-flip"].sample((16, 16), (0, 0, 0))
    picture = Image.fromarray(pixels[0].permute(1, 2, 0).numpy())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        assert {policy(picture, 0)[0].numpy().tobytes() for _ in range(200)} == possible


def padding(x: Tensor, y: Tensor) -> Tensor:
    """Pixels (n, 3) of x that are ignored in y, away from edges."""
    far = -F.max_pool2d(-(y == 255).float().unsqueeze(1), 7, 1, 3)
    return x.permute(0, 2, 3, 1)[far.squeeze(1).bool()]


def test_masks_follow_their_images_and_padding_is_ignored(tmp_path: Path) -> None:
    root = mask_folder(tmp_path)
    data = load(settings("segmentation-folder", size=(64, 64)), root)
    batches = [(torch.arange(6), seed) for seed in range(8)]
    out = list(data.train.batches(batches))
    x, y = torch.cat([b[0] for b in out]), torch.cat([b[1] for b in out])
    assert x.shape == (48, 3, 64, 64)
    assert y.shape == (48, 64, 64)
    assert y.dtype == torch.int64
    assert set(y.unique().tolist()) == {0, 1, 2, 3, 255}
    assert agree(x, y) > 10_000
    around = padding(x, y)
    assert len(around) > 1000
    assert around.abs().max() < 0.02


def test_what_is_smaller_than_the_crop_is_padded_with_the_mean_colour_from_disk() -> None:
    policy = augment.POLICIES["segmentation"].sample((64, 64), (10, 20, 30))
    picture, mask = Image.new("RGB", (20, 20), (200, 0, 0)), np.ones((20, 20), np.uint8)
    with torch.random.fork_rng(devices=[]):
        x, y = policy(picture, mask)
    assert x.shape == (3, 64, 64)
    assert x[:, -1, -1].tolist() == [10, 20, 30]
    assert y[-1, -1] == 255
    assert y[0, 0] == 1
    assert torch.equal(
        x[:, y == 255], torch.tensor([10, 20, 30], dtype=torch.uint8)[:, None].expand(3, int((y == 255).sum()))
    )


def test_a_crop_is_varied_if_no_class_has_three_quarters_of_it() -> None:
    mask = torch.zeros(10, 10, dtype=torch.uint8)
    assert not augment.varied(mask)
    mask[:2] = 1
    assert not augment.varied(mask)
    mask[2] = 1
    assert augment.varied(mask)
    mask[:3] = 255  # what is ignored does not make it varied
    assert not augment.varied(mask)
    assert not augment.varied(torch.full((4, 4), 255))


def test_crops_of_nearly_one_class_are_drawn_again() -> None:
    policy = augment.POLICIES["segmentation"].sample((16, 16), (0, 0, 0))
    mask = np.zeros((64, 64), np.uint8)
    mask[:, 28:36] = 1
    picture = Image.fromarray(PURE[mask])
    with torch.random.fork_rng(devices=[]):
        shows = [bool((policy(picture, mask)[1] == 1).any()) for _ in range(60)]
    # One crop in three would show it otherwise.
    assert sum(shows) > 45


def test_covering_and_fitting_keep_proportions() -> None:
    picture = Image.new("RGB", (80, 40), (250, 0, 0))
    assert geometry.cover(picture, (20, 20)).size == (20, 20)
    mask = np.ones((40, 80), np.uint8)
    fitted, labels = geometry.fit(picture, mask, (20, 20), (1, 2, 3))
    assert fitted.size == (20, 20)
    assert (labels[5:15] == 1).all()
    assert (labels[:5] == 255).all()
    assert (labels[15:] == 255).all()
    pixels = np.asarray(fitted)
    assert (pixels[labels == 255] == (1, 2, 3)).all()
    assert (pixels[labels == 1] == (250, 0, 0)).all()


def test_the_page_on_data_says_which_policies_work_in_memory() -> None:
    page = (ROOT / "docs" / "own_data.md").read_text()
    rows = [re.split(r" *\| *", line.strip("| ")) for line in page.splitlines() if line.startswith("| `")]
    said = {row[0].strip("`"): (row[1], row[3]) for row in rows if row[-1] in ("yes", "no")}
    words = {"classification": "classes", "segmentation": "masks"}
    assert said == {
        name: (", ".join(words[task] for task in policy.tasks), "no" if policy.batch is None else "yes")
        for name, policy in augment.POLICIES.items()
    }


@pytest.mark.parametrize("box", [(50, 70), (70, 50), (64, 64), (37, 111)])
def test_test_images_are_resized_and_cropped_as_torchvision_does_it(box: tuple[int, int]) -> None:
    from torchvision.transforms import v2

    pixels = np.random.default_rng(0).integers(0, 256, (*box, 3)).astype(np.uint8)
    picture = Image.fromarray(pixels)
    want = v2.Compose([v2.Resize(64), v2.CenterCrop(56)])(picture)
    got = geometry.centre(geometry.cover(picture, (64, 64)), (56, 56))
    assert np.abs(np.asarray(got, int) - np.asarray(want, int)).max() == 0
