"""The caller's settings round a training step, of which a captured one keeps what they were."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from plantune.devices.cuda.flags import precisions_of_calls
from plantune.graph.tracing.autocast import Autocast, state_on
from plantune.runtime.watched.torch_internals import asks_for_determinism, without_autocast


@dataclass
class CallerSettings:
    """As the last call found them: `autocast` is that of the model and the loss."""

    autocast: Autocast | None = None

    @contextmanager
    def noted(self, kind: str, own: torch.dtype | None) -> Iterator[None]:
        """Inside, nothing but the model and the loss runs under the caller's autocast, whose kept
        casts of weights would outlive the optimizer's step. The step's `own` takes its place.
        """
        self.autocast = state_on(kind) if own is None else (kind, own)
        with without_autocast(kind):
            yield

    def now(self) -> Hashable:
        return self.autocast, precisions_of_calls(), asks_for_determinism()
