"""Archives of data sets as a server offers them, and what is left in the folder they are fetched to."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import pytest

pytest.importorskip("torchvision")
pytest.importorskip("tqdm")
pytest.importorskip("yaml")

from torchvision import datasets

from halfway.lab.data import load
from tests.helpers.file_server import FileServer
from tests.helpers.pictures import settings

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


def offer(server: FileServer, archive: bytes, patch: pytest.MonkeyPatch) -> None:
    server.files[ARCHIVE] = archive
    patch.setattr(datasets.CIFAR10, "tgz_md5", hashlib.md5(archive).hexdigest())


def left(folder: Path) -> list[str]:
    """What lies in a folder, but for the file of the lock."""
    return sorted(p.name for p in folder.iterdir() if p.suffix != ".lock")


def fetched(to: Path) -> bool:
    """Whether there is a data set that can be read, and nothing beside it."""
    return left(to) == [FOLDER] and len(load(settings(), to).train) == 10
