"""Every error plantune raises on purpose, in one tree.

A message says what happened, where, what was got and what to do. Only the search turns an expected
failure into a rejected candidate; everything else is raised.
"""

from __future__ import annotations


class PlantuneError(Exception):
    """Base of every error raised on purpose. What else it is given travels between processes."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class UnknownNetwork(PlantuneError):
    """A name is not in the registry of reference networks; the message has the names that are. Or
    nothing is where a factory should be.
    """


class UnexpectedExit(PlantuneError):
    """Code that a command ran, such as a network's forward, ended it: by `sys.exit`, or by raising
    what is not an Exception.
    """


class InvalidNetwork(PlantuneError):
    """A factory of a network fails, or what is asked of a network cannot be."""


class UnsupportedModule(PlantuneError):
    """A module holds an operation that the layer graph cannot express."""


class UntracedFunction(UnsupportedModule):
    """A module applies a torch.autograd.Function of which torch cannot trace a pass. `optimize`
    runs such a module as it is.
    """


class NoSecondGradient(PlantuneError, NotImplementedError):
    """A gradient of a gradient was asked for, which no plan has."""


class InvalidGraph(PlantuneError):
    """A layer graph breaks one of its own rules."""


class InvalidSearchSpace(PlantuneError):
    """A search-space file holds something that plantune does not know."""


class InvalidPlan(PlantuneError):
    """A plan does not fit its graph, or its text is not a plan."""


class IllegalCandidate(PlantuneError):
    """A kernel family cannot run this step with this config; the message is the reason."""


class BuildError(PlantuneError):
    """A kernel did not compile: `what` says so in a line, `log` is all that the compiler wrote.

    `path` is the file where the log is kept; see plantune/base/build_log.py. Only the first line
    of what is given as the message is shown, the rest belongs to the log.
    """

    def __init__(self, message: str, log: str = "", path: str | None = None) -> None:
        # All three, so that the error travels between processes.
        super().__init__(message, log, path)
        self.what, _, rest = message.strip().partition("\n")
        self.log = "\n".join(filter(None, (rest, log)))
        self.path = path

    def __str__(self) -> str:
        if not self.path:
            return self.what
        return f"{self.what}; its log is in {self.path}, `plantune doctor` tells what is missing"


class CudaError(PlantuneError, RuntimeError):
    """The CUDA driver refused a call."""


class CaptureError(PlantuneError):
    """A pass could not be captured as a CUDA graph."""


class InputMismatch(PlantuneError, TypeError):
    """An input's device, dtype or rank is not what the module was made for."""


class WeightsChanged(PlantuneError, RuntimeError):
    """A weight was changed in place between a forward pass and its backward pass."""


class UnsupportedDevice(PlantuneError, ValueError):
    """A device on which plantune runs no plan."""


class UnknownArch(UnsupportedDevice):
    """A GPU that works, but of an arch that plantune has no plans for; the framework runs there."""


class UnlikeGpus(PlantuneError):
    """GPUs whose measurements cannot be compared: they are not of one kind."""


class WrongResult(PlantuneError):
    """A kernel's result is not the step's; `error` is relative, `bound` what was allowed."""

    def __init__(self, message: str, error: float, bound: float) -> None:
        # All three, so that the error travels between processes.
        super().__init__(message, error, bound)
        self.error, self.bound = error, bound


class CannotJudge(PlantuneError):
    """Whether a plan is right cannot be told: the framework itself gives no usable result."""


class NoViableCandidate(PlantuneError):
    """Every candidate, or every plan, was rejected."""


class MeasureTimeout(PlantuneError):
    """A measurement took longer than it may; its worker was killed."""


class NotEnoughMemory(PlantuneError):
    """A network needs more memory than is free: `needed` and `free` bytes."""

    def __init__(self, message: str, needed: int, free: int) -> None:
        super().__init__(message, needed, free)
        self.needed, self.free = needed, free


class OutOfTime(PlantuneError):
    """The time that a request was given is over; its worker was killed, which blames nothing."""


class WorkerDied(PlantuneError):
    """A measuring worker ended, or could not start; `how` names the signal or exit code."""

    def __init__(self, message: str, how: str = "") -> None:
        super().__init__(message)
        self.how = how


class ProtocolError(WorkerDied):
    """Something that is not a message came over a worker's pipe."""


class WorkerFailed(PlantuneError):
    """Something unexpected was raised in a worker, a fault of plantune or of a kernel family."""


class DatabaseUnavailable(PlantuneError):
    """The plan database cannot be read or written; a search goes on in memory."""


class DatabaseFull(DatabaseUnavailable):
    """No space is left for the plan database. What was committed before is intact."""


class DatabaseLocked(DatabaseUnavailable):
    """Another process kept the plan database locked for longer than the wait."""


class ReadOnlyDatabase(DatabaseUnavailable):
    """A write to a plan database that is open for reading."""


class DamagedDatabase(DatabaseUnavailable):
    """The plan database's file broke while it was in use; opening it again sets it aside."""


class ForeignFile(PlantuneError):
    """A file that an option names is not plantune's; it was left as it is."""


class InvalidDatabase(ForeignFile):
    """A file is not a plan database that can be used; it was left as it is."""


class StorageLost(PlantuneError):
    """The database that searches share was gone for too long; what was measured is kept."""


class ForeignSearch(PlantuneError):
    """A search that goes on elsewhere, on another machine or software, cannot be joined."""


class NewerSchema(PlantuneError):
    """A database was written by a later plantune; nothing was changed in it."""

    def __init__(self, message: str, expected: int, got: int) -> None:
        super().__init__(message, expected, got)
        self.expected, self.got = expected, got


class NoPlan(PlantuneError):
    """No stored plan has this key."""


class ForeignPlan(PlantuneError):
    """The only plan there is was made for another chip: `expected` is here, `got` in the plan."""

    def __init__(self, message: str, expected: str, got: str) -> None:
        super().__init__(message, expected, got)
        self.expected, self.got = expected, got


class Busy(PlantuneError):
    """Another search holds the lease; `heartbeat` is a text that changes while it lives."""

    def __init__(self, message: str, pid: int, host: str, heartbeat: str) -> None:
        super().__init__(message, pid, host, heartbeat)
        self.pid, self.host, self.heartbeat = pid, host, heartbeat


class RanksDiffer(PlantuneError, RuntimeError):
    """The processes of a group do not train the same, or one of them has failed."""


class PlantuneWarning(UserWarning):
    """Base of every warning of plantune's."""


class NoPlanLeft(PlantuneWarning):
    """A search ended without a plan that was proved and raced: the framework runs the network."""


class DatabaseWarning(PlantuneWarning):
    """The plan database is not as it should be; plantune goes on."""


class DamagedRow(DatabaseWarning):
    """Rows whose checksum does not match, or that hold no valid value; they are not used."""
