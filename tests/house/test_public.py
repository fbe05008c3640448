"""What is public: `__all__`, docs/python.md, README and the docstrings name the same things."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from torch import nn

import plantune
from plantune import errors

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
TEXTS = [path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *ROOT.glob("docs/*.md"))]
PUBLIC = sorted(set(plantune.__all__) - {"__version__"})
# Modules that users may name: of errors, of the pieces of a compiled module, of layers that torch
# has not, and of networks that are there to be tried.
MODULES = {"backend", "errors", "layers", "models"}


def named_in(text: str) -> set[str]:
    """The names that Python code takes from plantune."""
    dotted = re.findall(r"(?<![\w/.])plantune\.(\w+)(?!\.(?:py|db))", text)
    return {*dotted, *re.findall(r"from plantune import (\w+)", text)}


def test_the_page_has_exactly_the_public_names() -> None:
    rows = set(re.findall(r"^\| `plantune\.(\w+)", PAGE, flags=re.MULTILINE))
    assert rows == set(plantune.__all__)


@pytest.mark.parametrize("name", PUBLIC)
def test_each_has_a_docstring_of_its_own(name: str) -> None:
    found = getattr(plantune, name)
    assert found.__doc__
    assert not any(found.__doc__ == base.__doc__ for base in getattr(found, "__mro__", ())[1:])


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text.splitlines()[0])
def test_texts_for_users_name_only_these(text: str) -> None:
    assert named_in(text) <= {*plantune.__all__, *MODULES, "families"}


def test_a_private_name_in_a_text_is_found() -> None:
    assert named_in("`plantune.runtime.program.program` and plantune.db") == {"runtime", "db"}


def test_the_page_has_what_a_tuned_module_adds() -> None:
    named = set(re.findall(r"^\| `tuned\.(\w+)", PAGE, flags=re.MULTILINE))
    assert named <= {*dir(plantune.TunedModule)} - {*dir(nn.Module)}
    for name in named:
        assert inspect.getdoc(getattr(plantune.TunedModule, name))


def test_errors_that_the_page_names_are_errors() -> None:
    table = PAGE.partition("## Errors")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([A-Z]\w+)`", table))
    assert {"NoPlan", "UnsupportedModule", "WrongResult"} <= named
    for name in named:
        assert issubclass(getattr(errors, name), plantune.PlantuneError)
        assert getattr(errors, name).__doc__


def test_dir_lists_the_public_names() -> None:
    assert set(plantune.__all__) <= set(dir(plantune))
