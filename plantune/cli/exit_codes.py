"""What each exit code means, and which error leads to it. Nothing else maps errors to codes."""

from __future__ import annotations

import click

from plantune import errors
from plantune.errors import PlantuneError

DONE, FAILED, USAGE, NO_PLAN, BAD_PLAN = 0, 1, 2, 3, 4
WRONG_NUMBERS, NO_DEVICE, INTERRUPTED, BUSY = 5, 6, 7, 75

MEANINGS = {
    DONE: "done",
    FAILED: "failed at run time",
    USAGE: "wrong usage",
    NO_PLAN: "no plan for this key",
    BAD_PLAN: "plan or file invalid or foreign",
    WRONG_NUMBERS: "numerics failed",
    NO_DEVICE: "no usable device",
    INTERRUPTED: "interrupted, partial result saved",
    BUSY: "busy",
}


class NoUsableDevice(PlantuneError):
    """What is asked for needs a device that is not here, or that this release cannot use."""


class VerifyFailed(PlantuneError):
    """A stored plan does not run here, for another reason than its numbers."""


# The first class that an error belongs to decides.
CODES: tuple[tuple[type[BaseException], int], ...] = (
    (click.UsageError, USAGE),
    (errors.UnknownNetwork, USAGE),
    (errors.InvalidNetwork, USAGE),
    (errors.NoPlan, NO_PLAN),
    (errors.InvalidPlan, BAD_PLAN),
    (errors.ForeignPlan, BAD_PLAN),
    (errors.NewerSchema, BAD_PLAN),
    (errors.ForeignFile, BAD_PLAN),
    (errors.UnlikeGpus, BAD_PLAN),
    (errors.ForeignSearch, BAD_PLAN),
    (errors.WrongResult, WRONG_NUMBERS),
    (errors.UnsupportedDevice, NO_DEVICE),
    (errors.NotEnoughMemory, NO_DEVICE),
    (NoUsableDevice, NO_DEVICE),
    (errors.Busy, BUSY),
    (PlantuneError, FAILED),
    (click.ClickException, FAILED),
    (OSError, FAILED),
    (click.Abort, FAILED),
)
EXPECTED = tuple(kind for kind, _ in CODES)


def exit_code(error: BaseException) -> int:
    """The code of an error; what is not in the table is a fault of plantune."""
    return next((code for kind, code in CODES if isinstance(error, kind)), FAILED)
