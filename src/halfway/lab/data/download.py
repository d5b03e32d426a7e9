"""Downloading and unpacking archives, so that nothing incomplete is ever mistaken for complete.

A download goes to `NAME.part`, which stays after a failure and is resumed; with the right checksum it becomes `NAME`.
An archive is unpacked into a hidden folder, from which complete folders are renamed into place.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import shutil
import sys
import tarfile
import time
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ... import __version__
from ..files import naming_a_full_disk
from ..progress import Bar

# Seconds without a byte after which a connection counts as broken.
TIMEOUT = 30.0
# Attempts in a row that may bring nothing new, and seconds before the second one; pauses grow.
ATTEMPTS = 4
PAUSE = 1.0
_BLOCK = 1 << 16
# Status codes of a server that is only busy.
_BUSY = {408, 429, 500, 502, 503, 504}
_NETWORK = (urllib.error.URLError, ConnectionError, TimeoutError, http.client.HTTPException)


def download(url: str, to: Path, md5: str) -> None:
    """Download a file, or the rest of it, and verify its checksum.

    Raises:
        ConnectionError: the server could not be reached, or the connection kept breaking. What has arrived is kept.
        ValueError: the server refused, or the checksum is wrong. Nothing is kept.
    """
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise ValueError(f"{url} is not an http:// or https:// address")
    part = part_of(to)
    resumed = _size(part) > 0
    _receive_all(url, part)
    found = md5_of(part)
    if found != md5 and resumed:
        # The part may be of another version of the file, or from another mirror.
        print(f"{part.name} does not continue what was there before: downloading it from the start", file=sys.stderr)
        part.unlink()
        _receive_all(url, part)
        found = md5_of(part)
    if found != md5:
        part.unlink()
        raise ValueError(
            f"{url} is not the official file: its MD5 is {found}, not {md5}. The transfer was damaged, or the address "
            "leads elsewhere (a wrong mirror, the login page of a network); what came was deleted. Try again, or name "
            "a mirror (`halfway data --help` says how)"
        )
    part.replace(to)


def part_of(to: Path) -> Path:
    """Where a download is kept until it is complete."""
    return to.with_name(f"{to.name}.part")


def md5_of(path: Path) -> str:
    """The checksum that the official sites publish. It detects damage, not malice."""
    md5 = hashlib.md5(usedforsecurity=False)
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            md5.update(block)
    return md5.hexdigest()


def _receive_all(url: str, part: Path) -> None:
    """Reconnect until the file is complete, as long as each attempt brings something."""
    in_vain = 0
    while True:
        had = _size(part)
        try:
            if _receive(url, part, had):
                return
            reason = "the connection was closed early"
        except urllib.error.HTTPError as error:
            if error.code == 416 and had:  # the server has no more bytes; the checksum decides
                return
            if error.code not in _BUSY:
                raise ValueError(
                    f"{url} cannot be downloaded: the server says {error.code} {error.reason}. If the file has moved, "
                    "name a mirror (`halfway data --help` says how), or download it by other means to "
                    f"{part.with_suffix('')}"
                ) from error
            reason = f"the server says {error.code} {error.reason}"
        except _NETWORK as error:
            reason = str(getattr(error, "reason", error)) or type(error).__name__
        in_vain = 0 if _size(part) > had else in_vain + 1
        if in_vain == ATTEMPTS:
            kept = f" {_size(part):,} bytes are kept in {part}: the same command goes on from there." if had else ""
            raise ConnectionError(
                f"{url} cannot be downloaded ({reason}).{kept} Check the network and, behind a proxy, https_proxy; or "
                "name a mirror (`halfway data --help` says how); or download the file by other means to "
                f"{part.with_suffix('')}, where the same command will find it"
            )
        time.sleep(PAUSE * max(1, in_vain))


def _receive(url: str, part: Path, had: int) -> bool:
    """One connection: append to the part what it lacks. Returns whether the file is complete."""
    headers = {"User-Agent": f"halfway/{__version__}", "Accept-Encoding": "identity"}
    if had:
        headers["Range"] = f"bytes={had}-"
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT) as response:
        begin = had if response.status == 206 else 0
        if begin and not response.headers.get("Content-Range", "").startswith(f"bytes {had}-"):
            part.unlink()  # it sent the wrong range; without a part the next attempt asks for none
            return False
        if had and not begin:
            print(f"{_host(url)} cannot resume a download: {part.name} begins again", file=sys.stderr)
        length = response.headers.get("Content-Length")
        total = None if length is None else begin + int(length)
        with (
            Bar(total, part.with_suffix("").name, "B", done=begin, scale=True) as bar,
            naming_a_full_disk(part),
            open(part, "ab" if begin else "wb") as file,
        ):
            while block := response.read(_BLOCK):
                file.write(block)
                bar.update(len(block))
    return total is None or _size(part) >= total


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _host(url: str) -> str:
    return urllib.parse.urlsplit(url).netloc


@contextlib.contextmanager
def one_at_a_time(path: Path, busy: Callable[[], Any]) -> Iterator[None]:
    """Wait until no other process holds the lock file, then hold it. A killed process loses its lock.

    busy: called once if it has to wait.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        busy()
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def unpacked(archive: Path, aside: Path, wanted: Callable[[str], bool]) -> Iterator[Path]:
    """An archive's files in a temporary folder `aside`, deleted afterwards. wanted: which members, by name.

    Members that would land outside the folder, links that leave it, devices and the like are errors.
    """
    shutil.rmtree(aside, ignore_errors=True)  # of a process that was killed
    try:
        with naming_a_full_disk(aside):
            aside.mkdir(parents=True)
            try:
                with tarfile.open(archive) as tar, Bar(None, f"unpacking {archive.name}", " files", delay=1.0) as bar:
                    tar.extractall(aside, _counted(tar, wanted, bar), filter="data")
            except tarfile.FilterError as error:
                raise ValueError(f"{archive} was not unpacked, because it is not safe: {error}") from error
            except (tarfile.TarError, EOFError, zlib.error) as error:
                reason = str(error).partition("\n")[0]
                raise ValueError(f"{archive} cannot be unpacked ({reason}): delete it and download it again") from error
            yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _counted(tar: tarfile.TarFile, wanted: Callable[[str], bool], bar: Bar) -> Iterator[tarfile.TarInfo]:
    for member in tar:
        if wanted(member.name):
            yield member
            bar.update()


def move(unpacked: Path, to: Path) -> None:
    """Rename a complete folder to its place, which must be free."""
    if not unpacked.is_dir():
        raise ValueError(f"the archive has no folder {unpacked.name}: it is not the official one")
    to.parent.mkdir(parents=True, exist_ok=True)
    if to.exists():
        raise ValueError(f"{to} is in the way, and is not complete: move it elsewhere, then the same command goes on")
    unpacked.rename(to)
