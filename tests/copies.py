"""Python processes that are copies of one which has imported torch and plantune already.

Importing them takes a core more than a second. `Copy` stands in for `subprocess.Popen` where a
command is `python [-P] [-W ...] [-X faulthandler] (-m MODULE | -c CODE) ...`; any other is started
as usual. A copy has the command's arguments, environment, folder and files, and is this process's
own child: it can be killed and waited for. What it cannot show is what a fresh interpreter imports,
what it reads from the environment while it starts, and its command line.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import inspect
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

SET_CHILD_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of linux/prctl.h
MESSAGE_BYTES, FILES_MOST = 1 << 17, 16
FREE_FROM = 100  # descriptors from here on are nobody's
# Libraries start threads for more as soon as they are imported.
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
IMPORTED = (
    "plantune.measure.worker.worker_process",
    "plantune.plans.database.plan_database",
    "plantune.search.search",
    "plantune.cli.root",
)
Popen = subprocess.Popen  # before it is replaced
_lock = threading.Lock()


class Copy(Popen):  # type: ignore[type-arg]
    """As `subprocess.Popen`, with a copy for a command that a copy can run."""

    def _execute_child(self, *arguments: Any) -> None:
        given = inspect.signature(Popen._execute_child).bind(self, *arguments).arguments
        run = parsed(given["args"])
        if run is None or given["executable"] is not None or not can_copy():
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        standard = (given["p2cread"], given["c2pwrite"], given["errwrite"])
        files = [number if file == -1 else file for number, file in enumerate(standard)]
        environment = os.environ if given["env"] is None else given["env"]
        request = {
            **run,
            "folder": os.fspath(given["cwd"] or Path.cwd()),
            "environment": {os.fsdecode(k): os.fsdecode(v) for k, v in environment.items()},
            "passed": list(given["pass_fds"]),
            "session": bool(given["start_new_session"]),
        }
        self.pid = _copied(request, [*files, *given["pass_fds"]])
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[end] for end in ends))  # type: ignore[attr-defined]


def can_copy() -> bool:
    """Whether there is something to copy: a process with threads of its own cannot be."""
    return _original() is not None


def parsed(command: Sequence[Any] | str) -> dict[str, Any] | None:
    """What a copy is asked to run, or None if it cannot."""
    if isinstance(command, (str, bytes)) or command[0] != sys.executable:
        return None
    words = [os.fsdecode(word) for word in command[1:]]
    filters, safe = [], False
    while words and words[0] in ("-P", "-W", "-X"):
        option = words.pop(0)
        safe |= option == "-P"
        if option == "-W":
            filters.append(words.pop(0))
        elif option == "-X" and words.pop(0) != "faulthandler":
            return None
    if len(words) < 2 or words[0] not in ("-c", "-m"):
        return None
    how, what, *rest = words
    return {"how": how, "what": what, "arguments": rest, "filters": filters, "safe": safe}


def _copied(request: dict[str, Any], files: list[int]) -> int:
    """The number of a process that does what is asked."""
    message = json.dumps(request).encode()
    assert len(message) < MESSAGE_BYTES
    original = _original()
    assert original is not None
    with _lock:
        socket.send_fds(original, [message], files)
        return int(original.recv(64))


@cache
def _original() -> socket.socket | None:
    """What leads to the process that is copied, and ends with this one; None if it cannot be."""
    # A copy's parent dies at once, and the copy becomes this process's.
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-P", __file__, str(theirs.fileno())]
    process = Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=(theirs.fileno(),),
        start_new_session=True,
        env={**os.environ, **dict.fromkeys(THREADS, "1")},
    )
    theirs.close()
    is_ready = ours.recv(64) == b"ready"

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours if is_ready else None


def main() -> None:
    """Imports, then waits for requests; returns in copies only, once they did what was asked."""
    for name in IMPORTED:
        importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) > 1:  # which a copy would not have
        return
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        requests.send(b"ready")
        while True:
            message, files, _, _ = socket.recv_fds(requests, MESSAGE_BYTES, FILES_MOST)
            if not message:
                return
            if (number := _fork()) is None:
                break
            requests.send(str(number).encode())
            for file in files:
                os.close(file)
    _exit(_code_of(json.loads(message), files))


def _fork() -> int | None:
    """The number of a copy, None in the copy itself."""
    reading, writing = os.pipe()
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        number = os.read(reading, 64)
        os.close(reading)
        os.close(writing)
        return int(number)
    between = os.getpid()
    if number := os.fork():
        os.write(writing, str(number).encode())
        os._exit(0)
    while os.getppid() == between:  # not yet a child of whoever asked
        time.sleep(0.0005)
    os.close(reading)
    os.close(writing)
    return None


def _run(request: dict[str, Any], files: list[int]) -> None:
    """Does what a fresh interpreter would."""
    _place(files, [0, 1, 2, *request["passed"]])
    if request["session"]:
        os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    first = [] if request["safe"] else ["" if request["how"] == "-c" else os.getcwd()]
    sys.path[:0] = [*first, *filter(None, paths)]
    for text in request["filters"]:
        warnings._processoptions([text])  # type: ignore[attr-defined]
    what, arguments = request["what"], request["arguments"]
    sys.argv[:] = [request["how"], *arguments]
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    if request["how"] == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.modules["__main__"] = module = types.ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), module.__dict__)


def _code_of(request: dict[str, Any], files: list[int]) -> int:
    """The exit code of what is asked."""
    try:
        _run(request, files)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0


def _exit(code: int) -> NoReturn:
    """Ends as an interpreter does, but takes no memory apart."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def _place(files: list[int], numbers: list[int]) -> None:
    """Gives files their numbers."""
    apart = [fcntl.fcntl(file, fcntl.F_DUPFD, FREE_FROM) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(apart, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


if __name__ == "__main__":
    main()
