"""What each exit code means, and which error leads to it. Nothing else maps errors to codes."""

from __future__ import annotations

from collections.abc import Mapping

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
CODES: Mapping[int, tuple[type[BaseException], ...]] = {
    USAGE: (click.UsageError, errors.UnknownNetwork, errors.InvalidNetwork),
    NO_PLAN: (errors.NoPlan,),
    BAD_PLAN: (
        *(errors.InvalidPlan, errors.ForeignPlan, errors.NewerSchema, errors.ForeignFile),
        *(errors.UnlikeGpus, errors.ForeignSearch),
    ),
    WRONG_NUMBERS: (errors.WrongResult,),
    NO_DEVICE: (errors.UnsupportedDevice, errors.NotEnoughMemory, NoUsableDevice),
    BUSY: (errors.Busy,),
    FAILED: (PlantuneError, click.ClickException, OSError, click.Abort),
}
EXPECTED = tuple(kind for kinds in CODES.values() for kind in kinds)


def exit_code(error: BaseException) -> int:
    """The code of an error; what is not in the table is a fault of plantune."""
    return next((code for code, kinds in CODES.items() if isinstance(error, kinds)), FAILED)
