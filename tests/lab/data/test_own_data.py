"""The worked examples of docs/own_data.md, on made-up folders: the commands of the page, with fewer steps."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchvision")
pytest.importorskip("torchmetrics")
pytest.importorskip("tensorboard")
pytest.importorskip("timm")

from halfway.lab.cli import main
from halfway.lab.training.run_result import RunResult
from tests import ROOT

PAGE = ROOT / "docs" / "own_data.md"


def commands(beginning: str) -> list[str]:
    """The page's command that begins so, as words."""
    text = PAGE.read_text().replace("\\\n", " ")
    found = [line for line in re.findall(r"^halfway .*$", text, re.MULTILINE) if line.startswith(beginning)]
    assert len(found) == 1, f"the page has {len(found)} commands that begin with {beginning!r}"
    return shlex.split(found[0])[1:]


def replaced(words: list[str], **values: str) -> list[str]:
    """With other values after some options."""
    out = list(words)
    for option, value in values.items():
        out[out.index(f"--{option}") + 1] = value
    return out


@pytest.fixture
def flowers(tmp_path: Path) -> Path:
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 8), ("val", 2)):
        for label, name in enumerate(("daisy", "dandelion", "rose", "sunflower", "tulip")):
            folder = tmp_path / "flowers" / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                noise = torch.randint(0, 60, (40, 48, 3), generator=generator, dtype=torch.uint8)
                noise[..., label % 3] += 30 * label
                Image.fromarray(noise.numpy()).save(folder / f"{i}.jpg")
    return tmp_path / "flowers"


@pytest.fixture
def roofs(tmp_path: Path) -> Path:
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 8), ("val", 2)):
        for kind in ("images", "masks"):
            (tmp_path / "roofs" / split / kind).mkdir(parents=True)
        for i in range(count):
            picture = torch.randint(0, 256, (70, 90, 3), generator=generator, dtype=torch.uint8)
            mask = torch.full((70, 90), i % 4, dtype=torch.uint8)
            mask[:5] = 255
            Image.fromarray(picture.numpy()).save(tmp_path / "roofs" / split / "images" / f"{i:04}.jpg")
            Image.fromarray(mask.numpy()).save(tmp_path / "roofs" / split / "masks" / f"{i:04}.png")
    return tmp_path / "roofs"


def test_images_in_folders_with_a_timm_model(flowers: Path, tmp_path: Path) -> None:
    import timm

    out = tmp_path / "run"
    words = replaced(commands("halfway train imagenet"), data=str(flowers), out=str(out), epochs="3")
    smaller = ["data.size=[32, 32]", "batch_size=16", "data.workers=0", "log_every=3"]
    assert main([*words, *smaller]) == 0
    result = RunResult.read(out)
    assert result.finished
    assert result.metrics[-1]["replayed"] == result.metrics[-1]["pruned_steps"] > 0
    model = timm.create_model("resnet26d", num_classes=5)
    model.load_state_dict(torch.load(out / "last.pt", weights_only=True)["model"])


def test_comparing_on_images_in_folders(flowers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "compared"
    words = commands("halfway compare imagenet")
    words = replaced(words, data=str(flowers), out=str(out), epochs="3", seeds="0", ratios="0.5")
    smaller = ["model.name=test_resnet", "data.size=[32, 32]", "batch_size=16", "data.workers=0", "log_every=3"]
    assert main([*words, "--rounds", "2", *smaller]) == 0
    assert "pfb, p = 0.5" in capsys.readouterr().out
    assert main(["report", str(out), "--data", str(flowers)]) == 0
    assert (out / "report.html").exists()


def test_a_segmentation_set(roofs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "compared"
    words = commands("halfway compare voc2012")
    words = replaced(words, data=str(roofs), out=str(out), epochs="3", seeds="0", ratios="0.5")
    words = [word for word in words if not word.startswith("model.weights")]
    smaller = [
        "data.size=[64, 64]",
        "batch_size=4",
        "data.workers=0",
        "window=[1, 3]",
        "log_every=3",
        "multi_scale=[1.0]",
    ]
    assert main([*words, "--methods", "pfb", "--rounds", "0", *smaller]) == 0
    result = RunResult.read(out / "pfb-0.5-s0")
    assert result.metrics[-1]["replayed"] == 2
    refused = main([*words, "--methods", "pfb", *smaller, "prune_ratio=0.7", "--ratios", "0.7"])
    assert refused == 2
    assert "1 of 4 samples" in capsys.readouterr().err
