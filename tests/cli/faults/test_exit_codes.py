"""Which error leads to which exit code, in one line, as JSON where that was asked for."""

from __future__ import annotations

from typing import Any

import click
import pytest

from plantune import errors
from plantune.cli.exit_codes import EXPECTED, MEANINGS, NoUsableDevice, VerifyFailed, exit_code
from plantune.errors import PlantuneError

from ..conftest import Run, object_of


def test_the_codes_are_those_of_the_design() -> None:
    assert sorted(MEANINGS) == [0, 1, 2, 3, 4, 5, 6, 7, 75]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (click.UsageError("x"), 2),
        (click.BadParameter("x"), 2),
        (errors.UnknownNetwork("x"), 2),
        (errors.NoPlan("x"), 3),
        (errors.InvalidPlan("x"), 4),
        (errors.ForeignPlan("x", "a", "b"), 4),
        (errors.NewerSchema("x", 1, 2), 4),
        (errors.InvalidDatabase("x"), 4),
        (errors.WrongResult("x", 1.0, 0.5), 5),
        (errors.UnsupportedDevice("x"), 6),
        (NoUsableDevice("x"), 6),
        (errors.Busy("x", 1, "host", "now"), 75),
        (VerifyFailed("x"), 1),
        (errors.NoViableCandidate("x"), 1),
        (errors.WorkerDied("x"), 1),
        (errors.DatabaseFull("x"), 1),
        (PermissionError("x"), 1),
        (click.Abort(), 1),
        (ZeroDivisionError(), 1),
    ],
)
def test_each_error_has_its_code(error: BaseException, code: int) -> None:
    assert exit_code(error) == code


def test_every_error_of_plantune_is_expected() -> None:
    own = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, PlantuneError)]
    assert own
    assert all(issubclass(kind, EXPECTED) for kind in own)


WRONG = [
    ("--budget", "nan"),
    ("--budget", "inf"),
    ("--budget", "0"),
    ("--budget", "-3"),
    ("--budget", "soon"),
    ("--batch", "0"),
    ("--batch", "-1"),
    ("--batch", "1.5"),
    ("--batch", "99999999999"),
    ("--in-channels", "0"),
    ("--model", "se_resnet"),
    ("--arch", "sm_90"),
    ("--mode", "eval"),
    ("--dtype", "int64"),
    ("--seed", "-1"),
    ("--no-such-option", "1"),
    # Digits of other scripts, and what else Python takes for a number.
    *[(option, "\uff18") for option in ("--batch", "--image-size", "--seed", "--budget", "--gpus")],
    *[(option, "1_0") for option in ("--batch", "--heartbeat", "--budget", "--gpus")],
    ("--batch", "9" * 5000),
    ("--gpus", "9" * 5000),
]


IDS = [f"{option} {value[:20]}" for option, value in WRONG]


@pytest.mark.parametrize(("option", "value"), WRONG, ids=IDS)
def test_a_wrong_option_is_told_in_one_line(run: Run, option: str, value: str) -> None:
    result = run("search", option, value)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert len(result.stderr) < 400
    assert result.stderr.startswith("error: ")
    assert option in result.stderr
    assert "plantune search --help" in result.stderr


@pytest.mark.parametrize(("option", "value"), WRONG, ids=IDS)
def test_a_wrong_option_is_json_where_that_was_asked_for(run: Run, option: str, value: str) -> None:
    result = run("search", "--json", option, value)
    assert result.exit_code == 2
    error: dict[str, Any] = object_of(result)["error"]
    assert error["exit_code"] == 2
    assert option in error["message"]


def test_an_image_beyond_any_memory_is_wrong_usage(run: Run) -> None:
    most = ("--batch", 1 << 24, "--in-channels", 4096, "--image-size", 1 << 16)
    result = run("explain", *most)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "elements" in result.stderr


def test_an_unknown_model_is_answered_with_close_ones(run: Run) -> None:
    assert "did you mean resnet18" in run("search", "--model", "resnet19").stderr


@pytest.mark.parametrize(
    "arguments", [["serach"], ["plans", "drop"], ["plans", "show"], ["export"]]
)
def test_a_wrong_command_or_a_missing_argument_is_wrong_usage(
    run: Run, arguments: list[str]
) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["bench", "explain", "verify", "profile"])
def test_without_a_plan_the_code_is_3_and_the_search_is_named(run: Run, command: str) -> None:
    result = run(command, "--batch", 1, "--json")
    assert result.exit_code == 3
    assert "plantune search --batch 1" in result.stderr
    assert object_of(result)["error"]["type"] == "NoPlan"


def test_a_fault_of_plantune_keeps_its_trace_and_gives_an_object(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr("plantune.cli.plans.database", fail)
    result = run("plans", "list", "--json")
    assert isinstance(result.exception, ZeroDivisionError)
    assert object_of(result)["error"]["type"] == "ZeroDivisionError"
