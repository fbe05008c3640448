"""C++ is compiled once for its content, and says why it does not compile."""

from __future__ import annotations

import os
import subprocess
import warnings
from pathlib import Path

import pytest

from plantune.base import blobs
from plantune.base.blobs import read_blob
from plantune.errors import BuildError
from plantune.kernels.cpu import cxx
from plantune.kernels.cpu.cxx import function, load_library

ANSWER = 'extern "C" int answer() {{ return {0}; }}\n'


@pytest.fixture
def compiled(monkeypatch, tmp_path) -> list[str]:
    """Sources in the order of their compiling, in a cache of their own."""
    if cxx.cxx_compiler() is None:
        pytest.skip("it compiles C++")
    monkeypatch.setenv("PLANTUNE_CACHE_DIR", str(tmp_path))
    sources: list[str] = []
    plain = cxx._compiled

    def counted(source: str, compiler: str) -> bytes:
        sources.append(source)
        return plain(source, compiler)

    monkeypatch.setattr(cxx, "_compiled", counted)
    return sources


def test_equal_sources_compile_once(compiled):
    assert [load_library(ANSWER.format(n)).answer() for n in (1, 2, 1)] == [1, 2, 1]
    assert compiled == [ANSWER.format(1), ANSWER.format(2)]


@pytest.mark.parametrize("part", ["_headers_digest", "cpu_identity"])
def test_another_header_or_cpu_compiles_again(compiled, monkeypatch, part):
    load_library(ANSWER.format(3))
    monkeypatch.setattr(cxx, part, lambda: "another")
    load_library(ANSWER.format(3))
    assert len(compiled) == 2


def test_the_message_is_a_line_and_the_log_is_in_a_file(compiled):
    with pytest.raises(BuildError, match=r"did not compile a kernel: .*nonsense") as caught:
        load_library("nonsense\n")
    assert "\n" not in str(caught.value)
    kept = Path(str(caught.value.path)).read_text()
    for part in ("-O3", "error: ", "\nnonsense\n"):
        assert part in kept


def test_a_warning_is_an_error(compiled):
    with pytest.raises(BuildError, match="unused variable"):
        load_library('extern "C" void f() { int nothing; }\n')


def test_a_compiler_that_takes_too_long(compiled, monkeypatch):
    monkeypatch.setattr(cxx, "TIME_LIMIT_S", 0.01)
    with pytest.raises(BuildError, match=r"took over 0\.01 s"):
        load_library(ANSWER.format(4))


class TestTheCacheIsNotTrusted:
    """What was spoilt is compiled anew. Each load reads the file anew."""

    @pytest.fixture
    def cached(self, compiled, tmp_path) -> Path:
        load_library(ANSWER.format(5))
        (place,) = (tmp_path / "cpu").glob("*.so")
        return place

    def truncate(self, place: Path) -> None:
        os.truncate(place, place.stat().st_size // 2)

    def make_a_fifo(self, place: Path) -> None:
        place.unlink()
        os.mkfifo(place)

    def swap(self, place: Path) -> None:
        load_library(ANSWER.format(6))
        (other,) = set(place.parent.glob("*.so")) - {place}
        os.replace(other, place)

    def replace_by_one_without_its_functions(self, place: Path) -> None:
        source, built = place.with_suffix(".cpp"), place.with_suffix(".other")
        source.write_text('extern "C" int nothing() { return 0; }')
        subprocess.run([cxx.cxx_compiler(), "-shared", "-fPIC", source, "-o", built], check=True)
        os.replace(built, place)

    def let_all_write(self, place: Path) -> None:
        place.chmod(0o666)

    @pytest.mark.parametrize(
        "spoil",
        [truncate, make_a_fifo, swap, replace_by_one_without_its_functions, let_all_write],
        ids=lambda spoil: spoil.__name__,
    )
    def test_it_is_healed(self, spoil, cached, compiled):
        spoil(self, cached)
        blobs._warn_once.cache_clear()
        with warnings.catch_warnings(record=True):
            assert load_library(ANSWER.format(5)).answer() == 5
        assert compiled.count(ANSWER.format(5)) == 2
        assert read_blob(cached) is not None

    def test_another_users_library_is_not_loaded(self, cached, compiled, monkeypatch):
        monkeypatch.setattr(blobs.os, "geteuid", lambda: os.getuid() + 1)
        blobs._warn_once.cache_clear()
        with pytest.warns(UserWarning, match="belongs to another user"):
            assert load_library(ANSWER.format(5)).answer() == 5
        assert len(compiled) == 2

    def test_the_checked_bytes_are_loaded_whatever_the_file_is_then(self, cached, monkeypatch):
        def swapped(place):
            content = read_blob(place)
            place.write_bytes(b"no library")
            return content

        monkeypatch.setattr(cxx, "read_blob", swapped)
        assert load_library(ANSWER.format(5)).answer() == 5


def test_a_full_disk_costs_time_alone(compiled, monkeypatch):
    def full(*_):
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(cxx, "write_blob", full)
    assert [load_library(ANSWER.format(7)).answer() for _ in range(2)] == [7, 7]
    assert len(compiled) == 2


def test_libraries_are_told_apart_in_one_process(compiled):
    """The loader takes one path for one library."""
    assert [load_library(ANSWER.format(n)).answer() for n in range(20, 25)] == [20, 21, 22, 23, 24]


def test_a_missing_function_is_a_build_error(compiled):
    with pytest.raises(BuildError, match="has no function question"):
        function(load_library(ANSWER.format(8)), "question", [])


def test_without_a_compiler(monkeypatch):
    monkeypatch.setattr(cxx, "cxx_compiler", lambda: None)
    with pytest.raises(BuildError, match="no C\\+\\+ compiler was found"):
        load_library(ANSWER.format(6))
