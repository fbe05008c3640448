"""No option makes a command move or overwrite a file that is not plantune's."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from plantune.plans.plan import Plan

from ..conftest import FakeWorker, Run, object_of

NOTES = b"notes that I need\n" * 100


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """A file of the user's, in a folder with nothing else."""
    (tmp_path / "mine").mkdir()
    path = tmp_path / "mine" / "notes.txt"
    path.write_bytes(NOTES)
    return path


def assert_untouched(notes: Path) -> None:
    assert notes.read_bytes() == NOTES
    assert os.listdir(notes.parent) == ["notes.txt"]


COMMANDS = [
    ("plans", "list"),
    ("plans", "show", 1),
    ("plans", "diff", 1, 2),
    ("plans", "rm", 1),
    ("search", "--batch", 1),
    ("search", "--batch", 1, "--arch", "sm80", "--predict"),
    ("search", "--batch", 1, "--dry-run"),
    ("explain", "--batch", 1),
    ("verify", "--batch", 1),
    ("bench", "--batch", 1),
    ("profile", "--batch", 1),
    ("export", "{folder}/cpu.db"),
    ("import", "{shipped}"),
]


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: " ".join(map(str, words)))
def test_a_file_given_as_db_is_refused_with_4(
    run: Run, notes: Path, tmp_path: Path, command: tuple[object, ...]
) -> None:
    shipped = Path(__file__).resolve().parents[3] / "plans" / "sm90.db"
    words = [str(word).format(folder=tmp_path, shipped=shipped) for word in command]
    result = run(*words, "--db", notes, "--json")
    assert result.exit_code == 4, result.stderr
    message = object_of(result)["error"]["message"]
    assert message.startswith(f"{notes}: is not a usable plan database")
    assert "was left as it is; give another path" in message
    assert_untouched(notes)


@pytest.mark.usefixtures("worker")
def test_a_file_given_as_storage_is_refused_with_4(run: Run, notes: Path) -> None:
    result = run("search", "--batch", 1, "--storage", f"sqlite:///{notes}")
    assert result.exit_code == 4, result.stderr
    assert_untouched(notes)


class TestBench:
    """What a bench writes replaces what an earlier one wrote, and nothing else."""

    @pytest.fixture(autouse=True)
    def stored(self, store: Callable[..., int], plan: Plan, worker: FakeWorker) -> FakeWorker:
        store(plan)
        return worker

    @pytest.mark.parametrize("option", ["--json", "--output", "--plot"])
    @pytest.mark.parametrize("content", [NOTES, b'{"mine": 1}', b"\x89PNG\r\n\x1a\nmine"])
    def test_other_files_are_refused_before_anything_runs(
        self, run: Run, stored: FakeWorker, tmp_path: Path, option: str, content: bytes
    ) -> None:
        pytest.importorskip("matplotlib")
        stored.failure = AssertionError("it must not run")
        path = tmp_path / "mine.png"
        path.write_bytes(content)
        result = run("bench", "--batch", 1, option, path)
        assert result.exit_code == 4
        assert "was not overwritten; give another path" in result.stderr
        assert path.read_bytes() == content

    @pytest.mark.parametrize("option", ["--json", "--output", "--plot"])
    def test_links_pipes_and_folders_are_refused(
        self, run: Run, notes: Path, tmp_path: Path, option: str
    ) -> None:
        pytest.importorskip("matplotlib")
        (tmp_path / "link.png").symlink_to(notes)
        (tmp_path / "dangling.png").symlink_to(tmp_path / "nowhere")
        os.mkfifo(tmp_path / "pipe.png")
        (tmp_path / "folder.png").mkdir()
        for name in ("link.png", "dangling.png", "pipe.png", "folder.png"):
            assert run("bench", "--batch", 1, option, tmp_path / name).exit_code in (2, 4)
        assert_untouched(notes)
        assert not (tmp_path / "nowhere").exists()

    @pytest.mark.parametrize(
        ("option", "name"),
        [
            ("--json", "bench.json"),
            ("--output", "bench.json"),
            ("--plot", "bench.png"),
            ("--plot", "bench.svg"),
            ("--plot", "bench.pdf"),
        ],
    )
    def test_an_earlier_one_is_replaced(
        self, run: Run, tmp_path: Path, option: str, name: str
    ) -> None:
        pytest.importorskip("matplotlib")
        (tmp_path / name).touch()
        for _ in range(2):
            result = run("bench", "--batch", 1, option, tmp_path / name)
            assert result.exit_code == 0, result.stderr
        assert (tmp_path / name).stat().st_size > 500
        assert not list(tmp_path.glob("*.unfinished"))

    def test_a_device_is_written_to(self, run: Run) -> None:
        assert run("bench", "--batch", 1, "--output", "/dev/null").exit_code == 0


def test_an_export_does_not_replace_another_file(
    run: Run, store: Callable[..., int], plan: Plan, notes: Path
) -> None:
    store(plan)
    assert run("export", notes, "--arch", "cpu").exit_code == 4
    assert_untouched(notes)


def test_clearing_a_folder_of_the_users_removes_nothing_of_theirs(run: Run, cache: Path) -> None:
    (cache / "cpu").mkdir(parents=True)
    (cache / "cpu" / "libmine.so").write_bytes(NOTES)
    assert run("cache", "clear").exit_code == 0
    assert (cache / "cpu" / "libmine.so").read_bytes() == NOTES


def test_a_file_in_the_place_of_the_cache_folder_stays(
    run: Run, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTUNE_CACHE_DIR", str(notes))
    assert run("plans", "list").exit_code == 0
    assert run("cache", "clear").exit_code == 0
    assert_untouched(notes)
