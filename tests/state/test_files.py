"""A file is written completely or not at all, by whoever writes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfway.state import files


def test_folders_are_made_and_nothing_but_the_file_is_left(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.bin"
    for content in (b"first", b"second"):
        with files.replacing(path) as file:
            file.write(content)
        assert path.read_bytes() == content
    assert [p.name for p in path.parent.iterdir()] == ["b.bin"]


def test_until_it_is_complete_readers_see_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "b.bin"
    path.write_bytes(b"old")

    def interrupted() -> None:
        with files.replacing(path) as file:
            file.write(b"half")
            file.flush()
            assert path.read_bytes() == b"old"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["b.bin"]


def test_two_processes_do_not_write_into_one_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "b.bin"
    with files.replacing(path) as mine:
        mine.write(b"mine, which is longer")
        with monkeypatch.context() as other:
            other.setattr(files.os, "getpid", lambda: -1)
            with files.replacing(path) as theirs:
                theirs.write(b"theirs")
        assert path.read_bytes() == b"theirs"
    assert path.read_bytes() == b"mine, which is longer"
