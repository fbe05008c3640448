"""A copy of a Python process does what a fresh one would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from .. import copies

pytestmark = [
    pytest.mark.usefixtures("copied_processes"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="copies would share a GPU's state"),
]
TELL = """
import json, os, sys
from pathlib import Path
told = [sys.argv, os.getcwd(), dict(os.environ), sys.stdin.read(), os.getsid(0) == os.getpid()]
print(json.dumps([*told, os.read(int(sys.argv[1]), 9).decode(), "torch" in sys.modules]))
sys.exit(3)
"""


@pytest.mark.parametrize("session", [False, True])
def test_it_has_what_it_was_given(tmp_path, session):
    reading, writing = os.pipe()
    os.write(writing, b"in a pipe")
    os.close(writing)
    done = subprocess.run(
        [sys.executable, "-c", TELL, str(reading), "b"],
        input="a line",
        cwd=tmp_path,
        env={"ONLY": "this"},
        pass_fds=(reading,),
        start_new_session=session,
        capture_output=True,
        text=True,
        check=False,
    )
    os.close(reading)
    assert (done.returncode, done.stderr) == (3, "")
    arguments, folder, environment, line, leads, passed, copied = json.loads(done.stdout)
    assert arguments == ["-c", str(reading), "b"]
    assert folder == str(tmp_path)
    assert environment["ONLY"] == "this"
    assert "PATH" not in environment
    assert (line, leads, passed) == ("a line", session, "in a pipe")
    assert copied == copies.can_copy()


def test_an_error_ends_it_as_it_ends_any():
    done = subprocess.run([sys.executable, "-c", "raise KeyError(1)"], stderr=-1, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith(b"KeyError: 1\n")


def test_it_is_a_child_that_can_be_killed():
    code = "print(1, flush=True); import time; time.sleep(1000)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout.read(2) == b"1\n"
        assert process.poll() is None
        process.kill()
        assert process.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    "command", [["/bin/echo", "-c"], [sys.executable, "-I", "-c", ""], [sys.executable, "a.py"]]
)
def test_other_commands_are_started_as_usual(command):
    assert copies.parsed(command) is None
