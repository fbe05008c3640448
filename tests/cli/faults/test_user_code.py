"""What a network's code does reaches neither the exit code nor stdout."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from plantune.plans.plan import Plan

from ..conftest import ROOT, FakeWorker, Run, object_of, start

CODE = """
import atexit, ctypes, os, sys, threading
from torch import nn

class Odd(BaseException):
    pass

def by_name(name):
    if name == "sys.exit(0)":
        sys.exit(0)
    kinds = (SystemExit, GeneratorExit, Odd, KeyboardInterrupt, EOFError)
    raise {kind.__name__: kind for kind in kinds}[name]("two\\nlines")

class Network(nn.Linear):
    def __init__(self, where="", what=""):
        super().__init__(8, 8)
        self.where, self.what = where, what

    def fail(self, where):
        if self.where == where:
            by_name(self.what)

    def forward(self, x):
        self.fail("forward")
        return super().forward(x)

    def train(self, mode=True):
        self.fail("train")
        return super().train(mode)

def make(where="", what=""):
    if where == "factory":
        by_name(what)
    return Network(where, what)

def write(who):
    print(who, "print")
    print(who, "stdout", file=sys.__stdout__, flush=True)
    os.write(1, f"{who} descriptor\\n".encode())
    ctypes.CDLL(None).puts(f"{who} C".encode())
    os.system(f"echo {who} child")
    thread = threading.Thread(target=print, args=(who, "thread"))
    thread.start()
    thread.join()

class Talking(nn.Linear):
    def forward(self, x):
        write("forward")
        return super().forward(x)

def talking():
    write("factory")
    atexit.register(print, "end print")
    atexit.register(os.write, 1, b"end descriptor\\n")
    return Talking(8, 8)
"""
WAYS = ("print", "stdout", "descriptor", "C", "child", "thread")
COMMANDS = ("search", "bench", "explain", "verify", "profile")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "talking_nets.py"
    file.write_text(CODE)
    return file


def asked(own: Path, where: str, what: str) -> tuple[str, ...]:
    settings = ("--set", f"where={where}", "--set", f"what={what}")
    return ("--model", f"{own}:make", "--input", "4x8", *settings)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("where", ["forward", "train", "factory"])
@pytest.mark.parametrize("what", ["sys.exit(0)", "SystemExit", "GeneratorExit", "Odd"])
def test_code_that_ends_the_program_is_an_error_of_one_line(
    run: Run, own: Path, worker: FakeWorker, command: str, where: str, what: str
) -> None:
    result = run(command, *asked(own, where, what), "--json")
    code = 2 if where == "factory" else 1  # as of any factory that fails
    assert result.exit_code == code, result.stderr
    error = object_of(result)["error"]
    assert error["exit_code"] == code
    *progress, line = result.stderr.splitlines()
    assert line == f"error: {error['message']}"
    assert not any("error" in each or "Traceback" in each for each in progress)
    assert str(own) in line
    assert what.removeprefix("sys.").partition("(")[0].replace("exit", "SystemExit") in line


@pytest.mark.parametrize("where", ["forward", "train", "factory"])
def test_what_is_an_ordinary_error_stays_one(run: Run, own: Path, where: str) -> None:
    """Click itself takes it for the end of what a user types."""
    result = run("explain", *asked(own, where, "EOFError"))
    assert result.exit_code in (1, 2)
    assert "EOFError: two" in result.stderr
    assert result.stderr.count("\n") == 1
    assert "interrupted" not in result.stderr


@pytest.mark.parametrize("where", ["forward", "train", "factory"])
def test_an_interrupt_stays_an_interrupt(run: Run, own: Path, where: str) -> None:
    result = run("explain", *asked(own, where, "KeyboardInterrupt"), "--json")
    assert result.exit_code == 1
    assert object_of(result)["error"]["message"] == "interrupted"


def said(stderr: bytes, *who: str) -> None:
    for each in who:
        for way in WAYS:
            assert f"{each} {way}\n".encode() in stderr


@pytest.mark.parametrize("command", [("search", "--dry-run"), ("explain",)], ids=" ".join)
def test_stdout_holds_the_json_alone(own: Path, command: tuple[str, ...]) -> None:
    network = ("--model", f"{own}:talking", "--input", "4x8")
    with start(*command, *network, "--json") as process:
        stdout, stderr = process.communicate()
    assert stdout.count(b"\n") == 1
    assert isinstance(json.loads(stdout), dict)
    said(stderr, "factory", "forward")
    assert b"end print\n" in stderr
    assert b"end descriptor\n" in stderr


def test_where_stderr_is_closed_stdout_still_holds_results_alone(own: Path) -> None:
    network = ("--model", f"{own}:talking", "--input", "4x8")
    words = [sys.executable, "-m", "plantune", "search", "--dry-run", "--json", *network]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" 2>&-', "sh", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        check=True,
    )
    assert done.stdout.count(b"\n") == 1
    assert isinstance(json.loads(done.stdout), dict)


def test_ctrl_c_amid_a_forward_ends_a_search_as_ever(own: Path) -> None:
    """Nothing is measured yet, so nothing is saved."""
    own.write_text(
        CODE + "import time\n"
        "class Slow(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        print('it runs', file=sys.stderr, flush=True)\n"
        "        time.sleep(600)\n"
        "def slow():\n"
        "    return Slow(8, 8)\n"
    )
    with start("search", "--model", f"{own}:slow", "--input", "4x8", "--json") as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line == b"it runs\n":
                break
        process.send_signal(signal.SIGINT)
        stdout, _ = process.communicate()
    assert process.returncode == 1  # 7 says that something was saved
    assert json.loads(stdout)["error"]["message"].startswith("interrupted")


@pytest.mark.parametrize("arguments", [("--version",), ("--help",), ("search", "--help")])
def test_help_is_a_result(arguments: tuple[str, ...]) -> None:
    with start(*arguments) as process:
        stdout, stderr = process.communicate()
    assert b"plantune" in stdout
    assert stderr == b""


def test_a_second_command_of_a_process_has_its_results_too(tmp_path: Path) -> None:
    script = """
from plantune.cli import main
for command in (["cache", "show", "--json"], ["--version"], ["cache", "show", "--json"]):
    try:
        main(command)
    except SystemExit as error:
        assert error.code == 0
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    first, version, second = done.stdout.splitlines()
    assert json.loads(first) == json.loads(second)
    assert version.startswith("plantune ")


def test_where_a_program_calls_a_command_stdout_stays_the_programs() -> None:
    script = """
import os
from plantune.cli import main
main(["cache", "show", "--json"], standalone_mode=False)
print("its own")
os.write(1, b"its own too\\n")
"""
    done = subprocess.run(
        [sys.executable, "-uc", script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[1:] == ["its own", "its own too"]
    assert done.stderr == ""


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_a_terminal_is_written_to_by_each_of_its_names(
    store: Callable[..., int], plan: Plan, name: str
) -> None:
    id = store(plan)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "plantune", "plans", "export", str(id), name]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=theirs, stderr=subprocess.PIPE) as one:
        os.close(theirs)
        shown = b""
        while b"\n" not in shown:
            shown += os.read(ours, 1 << 16)
        assert one.stderr is not None
        assert one.stderr.read() == b""
    os.close(ours)
    assert one.returncode == 0
    assert shown.startswith(b'{"')
