"""Fetching data sets from a server on this machine, which breaks off, lies, or is not there."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchvision")
pytest.importorskip("tqdm")
pytest.importorskip("yaml")

import numpy as np
from torchvision import datasets
from torchvision.datasets import imagenet, voc

from halfway.lab.cli import main
from halfway.lab.data import DataSettings, download, load, official
from halfway.lab.recipes import schema as recipes
from tests.helpers.file_server import FileServer, file_server
from tests.helpers.pictures import settings
from tests.lab.data.test_cifar import python_release
from tests.lab.data.test_data import voc as small_voc

ARCHIVE = "cifar-10-python.tar.gz"
FOLDER = "cifar-10-batches-py"
PART = f"{ARCHIVE}.part"


def packed(folder: Path, name: str, kind: str = "w:gz") -> bytes:
    """A folder as an archive."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=kind) as tar:  # type: ignore[call-overload]
        tar.add(folder, name)
    return out.getvalue()


def members(**content: bytes | tarfile.TarInfo) -> bytes:
    """An archive of files, and of members that are no files."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, what in content.items():
            if isinstance(what, tarfile.TarInfo):
                tar.addfile(what)
            else:
                member = tarfile.TarInfo(name)
                member.size = len(what)
                tar.addfile(member, io.BytesIO(what))
    return out.getvalue()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setattr(download, "PAUSE", 0.0)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with file_server() as started:
        monkeypatch.setenv(official.MIRROR, started.address)
        yield started


@pytest.fixture
def cifar(server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FileServer:
    """A server with a small CIFAR-10, whose checksums are the official ones from now on."""
    python_release(tmp_path / "original", monkeypatch)
    offer(server, packed(tmp_path / "original" / FOLDER, FOLDER), monkeypatch)
    return server


def offer(server: FileServer, archive: bytes, patch: pytest.MonkeyPatch) -> None:
    server.files[ARCHIVE] = archive
    patch.setattr(datasets.CIFAR10, "tgz_md5", hashlib.md5(archive).hexdigest())


@pytest.fixture
def to(tmp_path: Path) -> Path:
    return tmp_path / "data"


def left(folder: Path) -> list[str]:
    """What lies in a folder, but for the file of the lock."""
    return sorted(p.name for p in folder.iterdir() if p.suffix != ".lock")


def fetched(to: Path) -> bool:
    """Whether there is a data set that can be read, and nothing beside it."""
    return left(to) == [FOLDER] and len(load(settings(), to).train) == 10


# The good case -----------------------------------------------------------------------------------------------------


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


# Downloads that fail -----------------------------------------------------------------------------------------------


def test_a_broken_connection_is_resumed(cifar: FileServer, to: Path) -> None:
    cifar.breaks = [100, -1, 50]
    official.fetch("cifar10", to)
    assert fetched(to)
    assert [asked for _, asked in cifar.asked] == [None, "bytes=100-", "bytes=100-", "bytes=150-"]


def test_a_connection_that_keeps_breaking_leaves_a_part_that_the_next_call_completes(
    cifar: FileServer, to: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cifar.breaks = [100] + [0] * download.ATTEMPTS
    assert main(["data", "cifar10", "--to", str(to)]) == 2
    said = capsys.readouterr().err
    assert "closed early" in said
    assert f"100 bytes are kept in {to / PART}" in said
    assert left(to) == [PART]
    official.fetch("cifar10", to)
    assert fetched(to)
    assert cifar.asked[-1] == (ARCHIVE, "bytes=100-")


def test_a_server_that_cannot_resume_begins_again(
    cifar: FileServer, to: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cifar.ranges, cifar.breaks = False, [100]
    official.fetch("cifar10", to)
    assert fetched(to)
    assert f"cannot resume a download: {PART} begins again" in capsys.readouterr().err


def test_what_is_not_the_official_file_is_deleted(
    cifar: FileServer, to: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = hashlib.md5(cifar.files[ARCHIVE]).hexdigest()
    cifar.files[ARCHIVE] = b"<html>Please log in</html>"
    wrong = hashlib.md5(cifar.files[ARCHIVE]).hexdigest()
    assert main(["data", "cifar10", "--to", str(to)]) == 2
    said = capsys.readouterr().err
    assert f"its MD5 is {wrong}, not {right}" in said
    assert "wrong mirror" in said
    assert left(to) == []


def test_a_part_of_something_else_is_not_continued(cifar: FileServer, to: Path) -> None:
    to.mkdir()
    (to / PART).write_bytes(b"another file")
    official.fetch("cifar10", to)
    assert fetched(to)
    assert [asked for _, asked in cifar.asked] == ["bytes=12-", None]


@pytest.mark.parametrize("more", [b"", b"?"], ids=["complete", "too long"])
def test_a_part_that_lacks_nothing_is_checked(cifar: FileServer, to: Path, more: bytes) -> None:
    to.mkdir()
    (to / PART).write_bytes(cifar.files[ARCHIVE] + more)
    official.fetch("cifar10", to)
    assert fetched(to)


def test_a_file_that_has_moved_is_not_asked_for_again(cifar: FileServer, to: Path) -> None:
    cifar.files.clear()
    with pytest.raises(ValueError, match=rf"404.*name a mirror.*other means to {to / ARCHIVE}$"):
        official.fetch("cifar10", to)
    assert len(cifar.asked) == 1


def test_without_a_network_the_ways_out_are_named(
    server: FileServer, to: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "cifar10", "--to", str(to), "--url", "http://127.0.0.1:9"]) == 2
    said = capsys.readouterr().err
    assert "refused" in said
    assert "Check the network" in said
    assert "https_proxy" in said
    assert f"by other means to {to / ARCHIVE}" in said
    assert left(to) == []


def test_only_web_addresses_are_downloaded(cifar: FileServer, to: Path) -> None:
    with pytest.raises(ValueError, match="not an http:// or https:// address"):
        official.fetch("cifar10", to, "file:///etc")


def test_a_full_disk_is_noticed_before_anything_is_downloaded(
    cifar: FileServer, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 5_000_000))
    with pytest.raises(ValueError, match=r"needs about 341 MB in .* but 5 MB are free.*another disk"):
        official.fetch("cifar10", to)
    assert cifar.asked == []


def test_a_disk_that_fills_up_keeps_what_has_come(cifar: FileServer, to: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.FileIO):
        def write(self, data: Any) -> int:
            super().write(data[:100])
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(download, "open", lambda path, mode: Full(path, mode), raising=False)
        with pytest.raises(ValueError, match=rf"disk is full.*{PART}.*same command goes on where it stopped"):
            official.fetch("cifar10", to)
    assert left(to) == [PART]
    official.fetch("cifar10", to)
    assert fetched(to)
    assert cifar.asked[-1] == (ARCHIVE, "bytes=100-")


def test_ctrl_c_leaves_the_part_and_nothing_else(
    cifar: FileServer, to: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    # As in a process of its own: whatever runs the tests may have another handler.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    cifar.files[ARCHIVE] += bytes(1 << 20)  # more than the buffers in between
    cifar.halfway = lambda: (time.sleep(0.2), os.kill(os.getpid(), signal.SIGINT), time.sleep(0.2))[0]
    assert main(["data", "cifar10", "--to", str(to)]) == 130
    assert "same command goes on from there" in capsys.readouterr().err
    assert left(to) == [PART]
    assert 0 < (to / PART).stat().st_size < len(cifar.files[ARCHIVE])


def test_ctrl_c_while_unpacking_leaves_the_archive_and_nothing_else(
    cifar: FileServer, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", interrupted)
        with pytest.raises(KeyboardInterrupt):
            official.fetch("cifar10", to)
    assert left(to) == [ARCHIVE]
    official.fetch("cifar10", to)
    assert len(cifar.asked) == 1
    assert len(load(settings(), to).train) == 10


def test_what_a_killed_process_left_behind_is_removed(cifar: FileServer, to: Path) -> None:
    (to / ".cifar10.unpacking" / FOLDER).mkdir(parents=True)
    (to / ".cifar10.unpacking" / FOLDER / "half").touch()
    official.fetch("cifar10", to)
    assert fetched(to)


# Archives that are not what they should be -------------------------------------------------------------------------


def link(target: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(f"{FOLDER}/link")
    member.type, member.linkname = tarfile.SYMTYPE, target
    return member


UNSAFE = {
    "a path that leads out": {"../evil": b"!"},
    "a link that leads out": {"link": link("../../../evil")},
    "an absolute link": {"link": link("/etc")},
    "a device": {"device": tarfile.TarInfo("device")},
}
UNSAFE["a device"]["device"].type = tarfile.CHRTYPE  # type: ignore[union-attr]


@pytest.mark.parametrize("how", UNSAFE)
def test_an_archive_that_is_not_safe_is_not_unpacked(
    server: FileServer, tmp_path: Path, to: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    offer(server, members(**{f"{FOLDER}/data_batch_1": b"?", **UNSAFE[how]}), monkeypatch)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not safe"):
        official.fetch("cifar10", to)
    assert left(to) == [ARCHIVE]
    assert [p.name for p in tmp_path.iterdir()] == ["data"]


@pytest.mark.parametrize(
    ("archive", "says"),
    [(b"no archive", "cannot be unpacked.*delete it"), (members(other=b"?"), f"no folder {FOLDER}")],
    ids=["no archive", "another one"],
)
def test_an_archive_of_something_else_leaves_no_data_set(
    server: FileServer, to: Path, monkeypatch: pytest.MonkeyPatch, archive: bytes, says: str
) -> None:
    offer(server, archive, monkeypatch)
    with pytest.raises(ValueError, match=says):
        official.fetch("cifar10", to)
    assert left(to) == [ARCHIVE]


# Several processes -------------------------------------------------------------------------------------------------

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


# The other data sets -----------------------------------------------------------------------------------------------


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
    assert "cannot be downloaded without an account" in said
    for words_of_the_step in says:
        assert words_of_the_step.format(to=tmp_path) in said
    assert list(tmp_path.iterdir()) == []


def test_every_recipe_has_data_that_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "val").mkdir()
    assert main(["data", "--to", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    for name in recipes.names():
        assert f" {name}" in said
    assert f"imagenet: ImageNet, ILSVRC 2012, 154.6 GB to download\n    there       {tmp_path}\n" in said
    assert f"    not there   halfway data cityscapes --to {tmp_path} prints how to get it" in said
    assert "cifar10: CIFAR-10, 170 MB to download" in said


def test_an_unknown_name_says_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "cifar"]) == 2
    assert "choose from cifar10, cifar100, voc2012, sbd, imagenet, cityscapes" in capsys.readouterr().err


def test_data_of_ones_own_are_not_looked_for_elsewhere(tmp_path: Path) -> None:
    official.fetch_for(DataSettings("segmentation-folder", 3, (8, 8)), tmp_path)
    assert list(tmp_path.iterdir()) == []
