"""One worker process: started, asked, killed; what it printed and how it died."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from plantune import errors
from plantune.base.paths import PACKAGE_FOLDER
from plantune.devices.cuda.flags import float32_precisions
from plantune.devices.host import process_fields
from plantune.errors import (
    MeasureTimeout,
    OutOfTime,
    PlantuneError,
    ProtocolError,
    WorkerDied,
    WorkerFailed,
)
from plantune.measure.worker.protocol import Channel, Message

# How much of what a worker prints is kept, from its beginning and from its end.
HEAD_BYTES = 2000
TAIL_BYTES = 2000
JOIN_S = 2.0


class Child:
    """A fresh process, ready for its first request; raises WorkerDied if it does not start.

    It is spawned, never forked: a copy of this process could not use the libraries that run here.
    """

    def __init__(self, threads: int, start_s: float, environment: Mapping[str, str]) -> None:
        incoming, their_outgoing = os.pipe()
        their_incoming, outgoing = os.pipe()
        self._channel = Channel(incoming, outgoing)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._reaped = False
        self._printed = bytearray()
        self.on_stage: Callable[[str], object] = lambda stage: None
        self._asked = 0
        spawned: Future[subprocess.Popen[bytes]] = Future()
        theirs = (their_incoming, their_outgoing)
        spawn = partial(_spawn, theirs, threads, environment)
        # The child dies with the thread that starts it, so that thread stays with it.
        self._keeper = threading.Thread(target=self._keep, args=(spawn, spawned), daemon=True)
        self._keeper.start()
        try:
            self._process = process = spawned.result()
            self.pid = process.pid
            self._await_ready(time.monotonic() + start_s)
        except BaseException:
            self.end()
            raise

    def _keep(
        self,
        spawn: Callable[[], subprocess.Popen[bytes]],
        spawned: Future[subprocess.Popen[bytes]],
    ) -> None:
        try:
            process = spawn()
        except BaseException as error:
            spawned.set_exception(WorkerDied(f"the measuring worker did not start: {error}"))
            return
        reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        reader.start()
        spawned.set_result(process)
        # Not reaped before the rest of its group is gone: until then the number is its own.
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            _signal_group(process, signal.SIGKILL)
            process.wait()
            self._reaped = True
        reader.join(JOIN_S)

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as pipe:
            while chunk := os.read(pipe.fileno(), 1 << 16):
                self._printed += chunk
                del self._printed[HEAD_BYTES:-TAIL_BYTES]

    def _await_ready(self, deadline: float) -> None:
        try:
            self._channel.receive(deadline)
        except (EOFError, ProtocolError, TimeoutError) as error:
            how = "took too long" if isinstance(error, TimeoutError) else self._how()
            text = f"the measuring worker did not start: {how}{self._said()}"
            raise WorkerDied(text, how) from error

    @property
    def alive(self) -> bool:
        """Whether the process runs; it may have died since."""
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        with self._lock, contextlib.suppress(ChildProcessError):
            return not self._reaped and os.waitid(os.P_PID, self.pid, how) is None
        return False

    def ask(
        self, request: Message, limits_s: Mapping[str, float], cut_at: float | None = None
    ) -> Any:
        """The answer to one request, with float32 as this process has it set. `limits_s` holds the
        time allowed for each stage, and `cut_at` is when the time for all of them is over.

        Raises what the worker raised, MeasureTimeout, OutOfTime, or WorkerDied. After any of them
        it must be ended: what it still does is not known.
        """
        last = math.inf if cut_at is None else cut_at
        self._asked += 1
        self._printed.clear()
        stage = "start"
        deadline = min(time.monotonic() + limits_s[stage], last)
        try:
            settings = {"precisions": [*float32_precisions()]}
            self._channel.send({"id": self._asked, **settings, **request}, deadline)
            while True:
                message = self._channel.receive(deadline)
                if message.get("id") != self._asked:
                    raise ProtocolError("it answered a request that was not made")
                if message.get("stage") not in limits_s:
                    return _answer(message)
                stage = message["stage"]
                self.on_stage(stage)
                deadline = min(time.monotonic() + limits_s[stage], last)
        except TimeoutError as error:
            if deadline == last:
                raise OutOfTime(f"{stage} was cut off: the time for it was over") from error
            if self._is_stopped():
                text = f"the worker was stopped by somebody during {stage}, and killed"
                raise WorkerDied(text, "SIGSTOP") from error
            text = f"{stage} took over {limits_s[stage]:g} s; the worker was killed"
            raise MeasureTimeout(text) from error
        except ProtocolError as error:
            text = f"the worker sent garbage during {stage}: {error}{self._said()}"
            raise ProtocolError(text, "garbage") from error
        except (EOFError, ConnectionError) as error:
            how = self._how()
            raise WorkerDied(f"the worker died during {stage}: {how}{self._said()}", how) from error

    def stop(self, stopped: bool) -> None:
        """Stops the process and all that it started, or lets them go on."""
        self._signal(signal.SIGSTOP if stopped else signal.SIGCONT)

    def kill(self) -> None:
        """Kills the process and the compilers that it started; whoever asks it gets WorkerDied."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with self._lock:
            if not self._reaped and self._process is not None:
                _signal_group(self._process, number)

    def _is_stopped(self) -> bool:
        """Whether a signal holds the process."""
        return process_fields(self.pid)[:1] == ["T"]

    def end(self) -> None:
        """Kills it: it has nothing to save. No request may be under way."""
        self.kill()
        self._keeper.join(JOIN_S)
        self._channel.close()

    def _how(self) -> str:
        """How it died: the signal's name, or the exit code."""
        self._keeper.join(JOIN_S)
        code = None if self._process is None else self._process.returncode
        if code is None:
            return "it closed its pipe"
        if code >= 0:
            return f"exit code {code}"
        name = signal.Signals(-code).name
        return f"{name}, as when memory runs out" if -code == signal.SIGKILL else name

    def _said(self) -> str:
        text = bytes(self._printed).decode(errors="replace").strip()
        return f"; it printed:\n{text}" if text else ""


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _answer(message: Message) -> Any:
    """The answer in a message; raises the error that is in its place."""
    if "answer" in message:
        return message["answer"]
    if "error" not in message:
        raise ProtocolError("its answer holds neither an answer nor an error")
    error = message["error"]
    kind = getattr(errors, error["type"], None)
    if error["args"] and isinstance(kind, type) and issubclass(kind, PlantuneError):
        raise kind(*error["args"])
    raise WorkerFailed(f"the measuring worker failed:\n{error['trace']}")


def _spawn(
    theirs: tuple[int, int], threads: int, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Starts the process; its ends of the pipes are its alone afterwards."""
    variables = {**os.environ, **environment}
    paths = [str(PACKAGE_FOLDER.parent), variables.get("PYTHONPATH", "")]
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    variables["OMP_NUM_THREADS"] = variables["MKL_NUM_THREADS"] = str(threads)
    # -P: nothing is imported from the working folder, whatever the user keeps there.
    options = ["-P", "-W", "ignore", "-X", "faulthandler"]
    module = "plantune.measure.worker.worker_process"
    try:
        return subprocess.Popen(
            [sys.executable, *options, "-m", module, *map(str, theirs), str(threads)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=theirs,
            env=variables,
            start_new_session=True,
        )
    finally:
        for descriptor in theirs:
            os.close(descriptor)
