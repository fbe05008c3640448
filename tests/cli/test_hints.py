"""--json before a command's name too; what is close to a mistyped name is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from plantune.backend.options import _seconds
from plantune.base.nearest import did_you_mean
from plantune.errors import IllegalCandidate, InvalidSearchSpace
from plantune.graph.fusions import fusions_named
from plantune.kernels.registry import family_named
from plantune.plans.plan import Plan
from plantune.space.arch import load_arch

from .conftest import FakeWorker, Run, object_of
from .test_help import LEAVES


@pytest.mark.parametrize("name", LEAVES)
def test_json_may_stand_before_a_command(run: Run, name: str) -> None:
    """Every command emits an object, if only that of what is missing."""
    first, *second = name.split()
    before = run("--json", *name.split(), "--no-such-option")
    assert object_of(before)["error"]["exit_code"] == 2
    assert before.stderr.count("\n") == 1
    assert run("--json", first, *second, "--help").exit_code == 0


def test_it_means_the_same_there(
    run: Run, store: Callable[..., int], plan: Plan, tmp_path: Path, worker: FakeWorker
) -> None:
    id = store(plan)
    for command in (
        ("cache", "show"),
        ("plans", "list"),
        ("plans", "show", id),
        ("explain", id),
        ("search", "--batch", 1, "--dry-run"),
        ("verify", "--batch", 1),
    ):
        first, *rest = command
        alike = [run("--json", first, *rest), run(first, *rest, "--json")]
        if len(command) > 1 and first in ("plans", "cache"):
            alike.append(run(first, "--json", *rest))
        assert all(result.exit_code == 0 for result in alike), command
        assert len({frozenset(object_of(result)) for result in alike}) == 1
    file = tmp_path / "bench.json"
    assert run("--json", "bench", "--batch", 1, "--json", file).exit_code == 0
    assert file.is_file()


def test_an_error_is_an_object_there_too(run: Run) -> None:
    assert object_of(run("--json", "bench", "--batch", 1))["error"]["type"] == "NoPlan"
    assert object_of(run("--json", "plans", "show", 99))["error"]["exit_code"] == 3


MISTYPED = {
    ("serach",): "search",
    ("Bench",): "bench",
    ("plans", "lsit"): "list",
    ("cache", "claer"): "clear",
    ("search", "--bacth", "8"): "--batch",
    ("search", "--bacth=8"): "--batch",
    ("search", "-batch", "8"): "--batch",
    ("--jsn", "search"): "--json",
    ("plans", "list", "--modle", "x"): "--model",
    ("search", "--model", "resnet81"): "resnet18",
    ("search", "--model", "ResNet50x"): "resnet50",
    ("plans", "list", "--model", "resnet81"): "resnet18",
    ("search", "--arch", "sm_90"): "sm90",
    ("doctor", "--arch", "sm_90"): "sm90",
    ("export", "x.db", "--arch", "cup"): "cpu",
    ("search", "--mode", "trian"): "train",
    ("search", "--mode", "Inference"): "infer",
    ("search", "--dtype", "bfloat61"): "bfloat16",
    ("search", "--dtype", "FLOAT16x"): "float16",
    ("search", "--input", "8x3:unit8"): "uint8",
}


@pytest.mark.parametrize("arguments", MISTYPED, ids=" ".join)
def test_what_was_mistyped_is_answered_with_what_is_close(
    run: Run, arguments: tuple[str, ...]
) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert f"did you mean {MISTYPED[arguments]}" in result.stderr


def test_a_baseline_is_too(run: Run, store: Callable[..., int], plan: Plan) -> None:
    store(plan)
    result = run("bench", "--batch", 1, "--peers", "eagr")
    assert result.exit_code == 2
    assert "did you mean eager?" in result.stderr


@pytest.mark.parametrize(
    "arguments", [("xyzzy",), ("search", "--xyzzy"), ("search", "--mode", "q")]
)
def test_nothing_is_made_up(run: Run, arguments: tuple[str, ...]) -> None:
    assert "did you mean" not in run(*arguments).stderr


def test_python_names_what_is_close_too() -> None:
    with pytest.raises(IllegalCandidate, match="did you mean onednn_conv"):
        family_named("onednn_cnov")
    with pytest.raises(InvalidSearchSpace, match="did you mean sm90"):
        load_arch("sm_90")
    with pytest.raises(InvalidSearchSpace, match="did you mean softmax"):
        fusions_named("softmxa")
    with pytest.raises(ValueError, match="did you mean budget"):
        _seconds({"bugdet": 60})


def test_the_closest_is_the_first() -> None:
    known = ("float32", "float64", "float16", "bfloat16")
    assert did_you_mean("float23", known) == "did you mean float32?"
    assert did_you_mean("loat16", known).startswith("did you mean float16")
    assert did_you_mean("nothing", known) == ""
    assert did_you_mean("x", ()) == ""
