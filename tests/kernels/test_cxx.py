"""C++ is compiled once for its content, and says why it does not compile."""

from __future__ import annotations

from pathlib import Path

import pytest

from plantune.errors import BuildError
from plantune.kernels import cxx
from plantune.kernels.cxx import load_library

ANSWER = 'extern "C" int answer() {{ return {0}; }}\n'


@pytest.fixture
def compiled(monkeypatch, tmp_path) -> list[str]:
    """Sources in the order of their compiling, in a cache of their own."""
    monkeypatch.setenv("PLANTUNE_CACHE_DIR", str(tmp_path))
    sources: list[str] = []
    plain = cxx._compile

    def counted(source: str, compiler: str, library: Path) -> None:
        sources.append(source)
        plain(source, compiler, library)

    monkeypatch.setattr(cxx, "_compile", counted)
    return sources


def test_equal_sources_compile_once(compiled):
    assert [load_library(ANSWER.format(n)).answer() for n in (1, 2, 1)] == [1, 2, 1]
    assert compiled == [ANSWER.format(1), ANSWER.format(2)]


@pytest.mark.parametrize("part", ["_headers_digest", "cpu_identity"])
def test_another_header_or_cpu_compiles_anew(compiled, monkeypatch, part):
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


def test_a_damaged_library_is_named(compiled, tmp_path):
    compiler = cxx.cxx_compiler()
    assert compiler is not None
    library = tmp_path / "cpu" / f"{cxx._key(ANSWER.format(5), compiler)}.so"
    library.parent.mkdir()
    library.write_bytes(b"no library")
    with pytest.raises(BuildError, match=r"does not load: .*remove it"):
        load_library(ANSWER.format(5))


def test_without_a_compiler(monkeypatch):
    monkeypatch.setattr(cxx, "cxx_compiler", lambda: None)
    with pytest.raises(BuildError, match="no C\\+\\+ compiler was found"):
        load_library(ANSWER.format(6))
