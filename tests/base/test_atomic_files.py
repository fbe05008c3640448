"""Files are written whole or not at all, whatever a writer that was killed left."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from plantune.backend import allowance
from plantune.base import atomic_files, build_log
from plantune.base.atomic_files import require_writable, write_cached, write_lasting
from plantune.base.blobs import read_blob, write_blob
from plantune.base.canonical import Attrs
from plantune.base.files import write_whole
from plantune.base.paths import cache_folder
from plantune.devices.machine import Environment
from plantune.kernels.family import Candidate
from plantune.plans.database.proofs import (
    is_known_slower,
    is_proved,
    remember_proof,
    remember_race,
)
from plantune.plans.plan import Choice, Plan
from plantune.plans.problem import Problem

HERE = Environment("cpu", "A CPU", "0" * 16, 2, "2.13.0", "0.1.0", "g++", "Linux x86_64")
CONV = Choice(("conv",), Candidate("framework", Attrs(layout="nhwc")))
PLAN = Plan(Problem("net", "a" * 64, "cpu", 8, "float32", "infer"), (CONV,))
KEY = "b" * 64
DAY_S = 24 * 3600

Write = Callable[[Path, bytes], None]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("PLANTUNE_CACHE_DIR", str(folder))
    atomic_files._tidy.cache_clear()
    return folder


@pytest.fixture(params=[write_whole, write_lasting, write_cached])
def write(request: pytest.FixtureRequest) -> Write:
    found: Write = request.param
    return found


@pytest.fixture
def umask() -> Iterator[Callable[[int], None]]:
    before = os.umask(0o022)

    def set_to(mask: int) -> None:
        os.umask(mask)

    yield set_to
    os.umask(before)


def killed_amid(work: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Does the work in a process that is killed before a file has its name; this process has its
    number afterwards, as each one has in a container.
    """
    if (child := os.fork()) == 0:
        os.replace = lambda *names: os._exit(9)  # type: ignore[assignment]
        work()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    monkeypatch.setattr(os, "getpid", lambda: child)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_is_replaced_whole(tmp_path: Path, write: Write) -> None:
    for content in (b"one", b"two" * 1000, b""):
        write(tmp_path / "file", content)
        assert (tmp_path / "file").read_bytes() == content
        assert os.listdir(tmp_path) == ["file"]


def test_after_a_kill_the_same_process_number_writes_again(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")
    killed_amid(lambda: write(path, b"lost"), monkeypatch)
    assert path.read_bytes() == b"before"
    for content in (b"one", b"two"):
        write(path, content)
        assert path.read_bytes() == content


REMEMBERED: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "proof": (lambda: remember_proof(PLAN, HERE), lambda: is_proved(PLAN, HERE)),
    "race": (
        lambda: remember_race(PLAN, HERE, slower=True),
        lambda: is_known_slower(PLAN, HERE),
    ),
    "budget": (lambda: allowance.remember(KEY, 7.0), lambda: allowance.spent_s(KEY) == 7.0),
    "log": (lambda: build_log.keep_log("what g++ said"), lambda: list_of("logs")),
    "kernel": (
        lambda: write_blob(cache_folder() / "cpu" / KEY, b"code"),
        lambda: read_blob(cache_folder() / "cpu" / KEY),
    ),
}


def list_of(folder: str) -> list[Path]:
    return list((cache_folder() / folder).glob("*.log"))


@pytest.mark.parametrize("what", REMEMBERED)
def test_what_the_cache_remembers_is_remembered_after_a_kill(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember, is_known = REMEMBERED[what]
    killed_amid(remember, monkeypatch)
    assert not is_known()
    remember()
    assert is_known()


@pytest.mark.parametrize("write", [write_whole, write_lasting])
@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_a_file_that_a_user_named_has_the_permissions_of_the_umask(
    tmp_path: Path, umask: Callable[[int], None], write: Write, mask: int, mode: int
) -> None:
    umask(mask)
    write(tmp_path / "file", b"content")
    assert mode_of(tmp_path / "file") == mode


def test_what_is_loaded_as_code_is_its_users_alone(umask: Callable[[int], None]) -> None:
    umask(0)
    place = cache_folder() / "cpu" / KEY
    write_blob(place, b"code")
    assert mode_of(place) == 0o600
    assert read_blob(place) == b"code"


@pytest.mark.parametrize("write", [write_whole, write_lasting])
def test_a_file_that_a_user_named_outlasts_a_loss_of_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Write
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        done.append("folder" if is_folder else f"{os.fstat(descriptor).st_size} bytes")
        fsync(descriptor)

    def replaced(old: Path, new: Path) -> None:
        done.append("moved")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    write(tmp_path / "file", b"content")
    assert done == ["7 bytes", "moved", "folder"]


def left_by_killed_writers(folder: Path, letter: str, age_s: float) -> list[Path]:
    """As this release and earlier ones name them."""
    folder.mkdir(parents=True, exist_ok=True)
    names = (f"{letter * 64}.1.unfinished", f"{letter * 64}.{'0' * 16}.unfinished")
    for name in names:
        (folder / name).write_bytes(b"half")
        os.utime(folder / name, (time.time() - age_s,) * 2)
    return [folder / name for name in names]


@pytest.mark.parametrize("what", REMEMBERED)
def test_what_killed_writers_left_in_the_cache_is_removed_after_a_day(what: str) -> None:
    remember, is_known = REMEMBERED[what]
    remember()
    atomic_files._tidy.cache_clear()  # as in another process
    (folder,) = (path for path in cache_folder().iterdir() if path.is_dir())
    old = left_by_killed_writers(folder, "c", DAY_S + 60)
    young = left_by_killed_writers(folder, "d", DAY_S - 60)
    notes = folder / "notes.unfinished"
    notes.write_text("the user's")
    os.utime(notes, (0, 0))
    remember()
    assert not any(path.exists() for path in old)
    assert all(path.exists() for path in (*young, notes))
    assert is_known()


def test_nothing_of_another_folder_is_removed(tmp_path: Path) -> None:
    left = left_by_killed_writers(tmp_path, "c", 2 * DAY_S)
    write_whole(tmp_path / "plan.json", b"{}")
    write_lasting(tmp_path / "plan.json", b"{}")
    require_writable(tmp_path / "plan.json")
    assert all(path.exists() for path in left)


@pytest.mark.parametrize("name", ["n" * 255, "ä" * 127])
def test_a_name_may_be_as_long_as_the_file_system_allows(
    tmp_path: Path, write: Write, name: str
) -> None:
    write(tmp_path / name, b"content")
    require_writable(tmp_path / name)
    assert (tmp_path / name).read_bytes() == b"content"


def test_a_longer_one_cannot_be_written_which_is_seen_before(tmp_path: Path, write: Write) -> None:
    for attempt in (require_writable, lambda path: write(path, b"content")):
        with pytest.raises(OSError, match="name too long"):
            attempt(tmp_path / ("n" * 256))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("write", [write_whole, write_lasting, write_cached, require_writable])
def test_what_cannot_be_written_is_named_as_its_user_named_it(
    tmp_path: Path, write: Callable[..., None]
) -> None:
    path = tmp_path / "nowhere" / "file"
    with pytest.raises(FileNotFoundError) as caught:
        write(*(path, b"content")[: 1 if write is require_writable else 2])
    assert caught.value.filename == str(path)
    assert "unfinished" not in str(caught.value)


def test_a_full_disk_leaves_what_was_there(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"before")

    def full(*names: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "file", b"after")
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"before"


def test_looking_whether_a_file_can_be_written_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"before")
    require_writable(tmp_path / "file")
    require_writable(tmp_path / "new")
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"before"
