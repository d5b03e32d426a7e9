"""Fetching the official data sets: once, on request, from a mirror, by one process at a time."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("torchvision")
pytest.importorskip("tqdm")
pytest.importorskip("yaml")

import numpy as np
from torchvision import datasets
from torchvision.datasets import imagenet, voc

from halfway.lab.cli import main
from halfway.lab.data import DataSettings, load, official
from halfway.lab.recipes import reading
from tests.helpers.file_server import FileServer
from tests.helpers.pictures import settings
from tests.helpers.releases import ARCHIVE, FOLDER, fetched, left, packed
from tests.lab.data.test_data import voc as small_voc


def test_a_data_set_is_fetched_once(cifar: FileServer, to: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "cifar10", "--to", str(to)]) == 0
    said = capsys.readouterr()
    assert said.out == f"cifar10: {to / FOLDER}\n"
    assert "asks to cite Krizhevsky" in said.err
    assert fetched(to)
    assert [p.name for p in to.iterdir()] == [FOLDER]
    assert main(["data", "cifar10", "--to", str(to)]) == 0
    assert cifar.asked == [(ARCHIVE, None)]


@pytest.mark.parametrize("ending", ["", "/", f"/{ARCHIVE}"])
def test_a_mirror_is_a_folder_or_the_file_itself(
    cifar: FileServer, to: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setenv(official.MIRROR, "http://127.0.0.1:9/nothing-here")
    assert main(["data", "cifar10", "--to", str(to), "--url", cifar.address + ending]) == 0
    assert fetched(to)


@pytest.mark.parametrize("command", ["train", "compare"])
def test_training_downloads_on_request(
    cifar: FileServer, to: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    words = [command, "tiny-cifar10", "--data", str(to), "--out", str(to.parent / "run")]
    assert main(words) == 2
    assert f"`halfway data cifar10 --to {to}` downloads it" in capsys.readouterr().err
    assert not to.exists()
    assert main([*words, "--download"]) == 2
    assert "there are 10 training images" in capsys.readouterr().err
    assert fetched(to)


def test_synthetic_pictures_are_not_downloaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "tiny-cifar10", "--data", "synthetic", "--download"]) == 2
    assert "exclude each other" in capsys.readouterr().err


def test_an_archive_that_is_there_is_unpacked_without_a_network_and_kept(
    cifar: FileServer, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to.mkdir()
    (to / ARCHIVE).write_bytes(cifar.files[ARCHIVE])
    official.fetch("cifar10", to)
    assert cifar.asked == []
    assert left(to) == sorted([FOLDER, ARCHIVE])


def test_an_archive_that_is_there_but_damaged_is_named(cifar: FileServer, to: Path) -> None:
    to.mkdir()
    (to / ARCHIVE).write_bytes(cifar.files[ARCHIVE][:-1])
    with pytest.raises(ValueError, match=rf"{ARCHIVE} is not the official file.*delete it"):
        official.fetch("cifar10", to)
    assert left(to) == [ARCHIVE]


# --------------------------------------------------------------------------------------------- several processes

HOLDS_THE_LOCK = """
import shutil, sys
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.readline()
    shutil.copytree(sys.argv[2], sys.argv[3])
"""


@pytest.mark.parametrize("killed", [False, True], ids=["finishes", "is killed"])
def test_a_second_process_waits_for_the_first(
    cifar: FileServer, tmp_path: Path, to: Path, capfd: pytest.CaptureFixture[str], killed: bool
) -> None:
    to.mkdir()
    words = [to / ".cifar10.lock", tmp_path / "original" / FOLDER, to / FOLDER]
    first = subprocess.Popen(
        [sys.executable, "-c", HOLDS_THE_LOCK, *map(str, words)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert first.stdin is not None
    assert first.stdout is not None
    with first:
        assert first.stdout.readline() == b"held\n"
        second = threading.Thread(target=official.fetch, args=("cifar10", to))
        second.start()
        second.join(0.3)
        assert second.is_alive()
        assert cifar.asked == []
        if killed:
            first.kill()
        else:
            first.stdin.write(b"\n")
            first.stdin.flush()
        second.join(10)
        assert not second.is_alive()
    assert "another process is downloading CIFAR-10" in capfd.readouterr().err
    assert fetched(to)
    assert len(cifar.asked) == int(killed)


def test_many_at_once_download_once(cifar: FileServer, to: Path) -> None:
    cifar.halfway = lambda: time.sleep(0.2)
    threads = [threading.Thread(target=official.fetch, args=("cifar10", to)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(cifar.asked) == 1
    assert fetched(to)


# ------------------------------------------------------------------------------------------- the other data sets


@pytest.mark.filterwarnings("ignore:'mode' parameter is deprecated")
def test_voc_gets_the_masks_of_sbd(
    server: FileServer, tmp_path: Path, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scipy.io import savemat

    folder = small_voc(tmp_path / "original")
    server.files["VOCtrainval_11-May-2012.tar"] = packed(folder.parent, "VOCdevkit", "w")
    for name in ("sbd_0", "val_1"):  # as the real one, it has images that VOC validates on
        shutil.copy(folder / "JPEGImages" / "val_0.jpg", folder / "JPEGImages" / f"{name}.jpg")
    server.files["VOCtrainval_11-May-2012.tar"] = packed(folder.parent, "VOCdevkit", "w")
    sbd = tmp_path / "sbd" / "dataset"
    (sbd / "cls").mkdir(parents=True)
    for name, c in (("sbd_0", 7), ("train_0", 1), ("val_1", 2)):
        savemat(sbd / "cls" / f"{name}.mat", {"GTcls": {"Segmentation": np.full((30, 40), c, np.uint8)}})
    (sbd / "train.txt").write_text("sbd_0\nval_1\n")
    (sbd / "val.txt").write_text("train_0\n")
    server.files["benchmark.tgz"] = packed(sbd.parent, "benchmark_RELEASE")
    sums = {name: hashlib.md5(data).hexdigest() for name, data in server.files.items()}
    year = {**voc.DATASET_YEAR_DICT["2012"], "md5": sums["VOCtrainval_11-May-2012.tar"]}
    monkeypatch.setitem(voc.DATASET_YEAR_DICT, "2012", year)
    monkeypatch.setattr(datasets.SBDataset, "md5", sums["benchmark.tgz"])

    official.fetch_for(settings("voc2012"), to)
    assert [name for name, _ in server.asked] == ["VOCtrainval_11-May-2012.tar"]
    assert len(load(settings("voc2012"), to).train) == 3
    official.fetch_for(settings("voc2012", split="trainaug"), to)
    assert left(to) == ["VOCdevkit"]
    data = load(settings("voc2012", split="trainaug", memory=True), to)
    # sbd_0 has SBD's mask; the official ones of train_0 to train_2 stay.
    assert [data.train.label(i) for i in range(4)] == ["car", "tv monitor", "train", "sofa"]


def test_fashion_mnist_comes_as_a_package_or_through_torchvision(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "fashion-mnist", "--to", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"Fashion-MNIST is not in {tmp_path}, and halfway does not download it. What to do:" in said
    assert "apt install dataset-fashion-mnist" in said
    assert f"FashionMNIST as F; F('{tmp_path}', download=True)" in said
    assert "account" not in said
    assert official.name_for(reading.load("ladder-f8").data) == "fashion-mnist"
    (tmp_path / "fashion-mnist").mkdir()
    (tmp_path / "fashion-mnist" / "train-images-idx3-ubyte.gz").touch()
    assert main(["data", "fashion-mnist", "--to", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"fashion-mnist: {tmp_path / 'fashion-mnist'}\n"


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ("imagenet-resnet50", [name for name, _ in imagenet.ARCHIVE_META.values()]),
        ("cityscapes-deeplabv3", ["gtFine_trainvaltest.zip", "leftImg8bit_trainvaltest.zip", "csDownload -d {to}"]),
    ],
)
def test_an_account_is_asked_for_with_every_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recipe: str, says: list[str]
) -> None:
    words = ["--data", str(tmp_path), "--out", str(tmp_path / "run")]
    assert main(["train", recipe, "--download", *words]) == 2
    said = capsys.readouterr().err
    assert "halfway does not download it. What to do:\n1. Make an account" in said
    for words_of_the_step in says:
        assert words_of_the_step.format(to=tmp_path) in said
    assert list(tmp_path.iterdir()) == []


def test_every_recipe_has_data_that_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "val").mkdir()
    assert main(["data", "--to", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    for name in reading.names():
        assert f" {name}" in said
    assert f"imagenet: ImageNet, ILSVRC 2012, 154.6 GB to download\n    there       {tmp_path}\n" in said
    assert f"    not there   halfway data cityscapes --to {tmp_path} prints how to get it" in said
    assert "cifar10: CIFAR-10, 170 MB to download" in said


def test_an_unknown_name_says_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "cifar"]) == 2
    assert "choose from cifar10, cifar100, fashion-mnist, voc2012, sbd, imagenet, cityscapes" in capsys.readouterr().err


def test_data_of_ones_own_are_not_looked_for_elsewhere(tmp_path: Path) -> None:
    official.fetch_for(DataSettings("segmentation-folder", 3, (8, 8)), tmp_path)
    assert list(tmp_path.iterdir()) == []
