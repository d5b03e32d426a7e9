"""Downloads from a server that breaks off, lies, or is not there, and archives that are not what they should be."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import shutil
import signal
import tarfile
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchvision")
pytest.importorskip("tqdm")
pytest.importorskip("yaml")


from halfway.lab.cli import main
from halfway.lab.data import download, load, official
from tests.helpers.file_server import FileServer
from tests.helpers.pictures import settings
from tests.helpers.releases import ARCHIVE, FOLDER, PART, fetched, left, members, offer

# ------------------------------------------------------------------------------------------- downloads that fail


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


# --------------------------------------------------------------------- archives that are not what they should be


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
