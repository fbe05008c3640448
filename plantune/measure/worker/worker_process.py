"""The process in which candidates run.

Its command: `python -m plantune.measure.worker.worker_process FD_IN FD_OUT THREADS`.
It answers one request after the other, says at which stage it is, and may be killed at any time.
"""

from __future__ import annotations

import gc
import math
import sys
import traceback
from typing import Any

import torch

from plantune.devices.cuda.flags import set_precisions
from plantune.devices.device import first_line
from plantune.errors import PlantuneError, ProtocolError, WorkerDied
from plantune.measure import limits
from plantune.measure.programs import Say
from plantune.measure.worker.protocol import Channel, Message
from plantune.measure.worker.turns import Turn
from plantune.measure.worker.work import perform


def serve(channel: Channel) -> None:
    """Answers requests until the parent closes its end."""
    channel.send({"ready": True, "threads": torch.get_num_threads()})
    turn = Turn()
    while True:
        try:
            request = channel.receive()
        except (EOFError, ProtocolError):
            return
        number = request["id"]

        def say(stage: str, number: int = number) -> None:
            if stage != "build":  # compilers may run beside others
                turn.begin()
            channel.send({"id": number, "stage": stage})

        answer = _answer(request, say)
        turn.end()
        channel.send({"id": number, **answer})


def _answer(request: Message, say: Say) -> Message:
    try:
        set_precisions(tuple(request["precisions"]))
        with limits.memory_limit(request.get("memory_bytes")):
            return {"answer": perform(request, say)}
    except limits.GPU_FAULTS as error:  # The CUDA context is lost.
        return {"error": _described(WorkerDied(first_line(error)))}
    except Exception as error:  # The parent raises it.
        return {"error": _described(error)}
    except BaseException as error:  # As `sys.exit` in code that is not plantune's does.
        return {"error": _described(WorkerDied(f"{type(error).__name__}: {error}"))}


def _described(error: Exception) -> Message:
    """An error of plantune's own with what it was made of, any other one with its trace."""
    plain = isinstance(error, PlantuneError) and all(
        isinstance(value, (str, int, float)) for value in error.args
    )
    args: list[Any] = [_plain(value) for value in error.args] if plain else []
    return {"type": type(error).__name__, "args": args, "trace": traceback.format_exc()[-8000:]}


def _plain(value: str | float) -> str | float:
    """JSON has no infinity and no NaN: an error as large as that is the largest number."""
    lost = isinstance(value, float) and not math.isfinite(value)
    return sys.float_info.max if lost else value


def main() -> None:
    limits.die_with_parent()
    limits.leave_interrupts_to_parent()
    limits.leave_no_core()
    incoming, outgoing, threads = map(int, sys.argv[1:])
    torch.set_num_threads(threads)
    gc.collect()
    gc.freeze()  # what was imported stays: looking at it again would take 0.05 s at each timing
    try:
        serve(Channel(incoming, outgoing))
    except BrokenPipeError:
        return


if __name__ == "__main__":
    main()
