"""What is in the cache is used only if this user wrote it, whole and under that name."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from plantune.base import blobs
from plantune.base.blobs import read_blob, write_blob

CONTENT = b"a kernel" * 100


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A blob that was written as the product writes it."""
    place = tmp_path / "cpu" / "key.so"
    write_blob(place, CONTENT)
    assert read_blob(place) == CONTENT
    return place


def swap(place: Path) -> None:
    """A valid blob under the name of another."""
    other = place.with_name("other.so")
    write_blob(other, b"another kernel")
    os.replace(other, place)


def truncate(place: Path) -> None:
    os.truncate(place, 300)


def empty(place: Path) -> None:
    os.truncate(place, 0)


def flip_a_bit(place: Path) -> None:
    content = bytearray(place.read_bytes())
    content[17] ^= 1
    place.write_bytes(content)


def let_the_group_write(place: Path) -> None:
    place.chmod(0o620)


def let_all_write(place: Path) -> None:
    place.chmod(0o602)


def let_all_write_the_folder(place: Path) -> None:
    place.parent.chmod(0o777)


def make_a_fifo(place: Path) -> None:
    place.unlink()
    os.mkfifo(place, 0o600)


def make_a_link(place: Path) -> None:
    kept = place.with_name("kept")
    os.replace(place, kept)
    place.symlink_to(kept)


def make_a_folder(place: Path) -> None:
    place.unlink()
    place.mkdir()


def remove(place: Path) -> None:
    place.unlink()


FAULTS = [
    swap,
    truncate,
    empty,
    flip_a_bit,
    let_the_group_write,
    let_all_write,
    let_all_write_the_folder,
    make_a_fifo,
    make_a_link,
    make_a_folder,
    remove,
]


@pytest.mark.parametrize("spoil", FAULTS, ids=lambda fault: fault.__name__)
def test_what_is_not_as_it_was_written_is_not_read(
    spoil: Callable[[Path], None], place: Path
) -> None:
    spoil(place)
    assert read_blob(place) is None


@pytest.mark.parametrize(
    "spoil", [f for f in FAULTS if f is not make_a_folder], ids=lambda fault: fault.__name__
)
def test_writing_again_heals_it(spoil: Callable[[Path], None], place: Path) -> None:
    spoil(place)
    write_blob(place, CONTENT)
    assert read_blob(place) == CONTENT


def test_another_users_file_is_not_read(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs.os, "geteuid", lambda: os.getuid() + 1)
    assert read_blob(place) is None


def test_nothing_is_kept_in_another_users_folder(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said once, with what to do."""
    monkeypatch.setattr(blobs.os, "geteuid", lambda: os.getuid() + 1)
    blobs._warn_once.cache_clear()
    with (
        pytest.warns(UserWarning, match=r"another user .*set PLANTUNE_CACHE_DIR"),
        pytest.raises(PermissionError),
    ):
        write_blob(place, b"other")
    with pytest.raises(PermissionError):  # warnings are errors here
        write_blob(place, b"other")
    assert [path.name for path in place.parent.iterdir()] == ["key.so"]


def test_nobody_else_may_write_what_is_kept(tmp_path: Path) -> None:
    """Whatever the umask allows: many systems let the group write."""
    before = os.umask(0)
    try:
        write_blob(tmp_path / "cpu" / "key.so", CONTENT)
    finally:
        os.umask(before)
    for path in (tmp_path / "cpu", tmp_path / "cpu" / "key.so"):
        assert not path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)
