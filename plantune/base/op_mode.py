"""What follows each op that torch runs."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class OpMode(TorchDispatchMode):
    """A mode whose first op imports no compiler: torch would import Dynamo, which takes seconds, to
    tell it that the mode's own code is not to be compiled.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
