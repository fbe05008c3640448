"""Functions with a backward of their own, which a trace of what they call does not see."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.autograd.function import _SingleLevelFunction

# What `Function.apply` calls, also one that was bound before, as in `flip = Flip.apply`. The class
# has no `apply` of its own: it inherits the core's.
_base: Any = _SingleLevelFunction
# A checkpoint of some versions of torch keeps its inputs in one, of which nothing is computed.
_KEEPS = ("torch.utils.checkpoint", "_NoopSaveInputs")


@contextmanager
def each_application(tell: Callable[[type], None]) -> Iterator[None]:
    """Inside, this thread tells of each torch.autograd.Function before it is applied. Other threads
    apply theirs as ever.
    """
    thread = threading.get_ident()

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread and (cls.__module__, cls.__name__) != _KEEPS:
            tell(cls)
        core: Any = super(_SingleLevelFunction, cls)
        return core.apply(*args, **kwargs)

    _base.apply = classmethod(apply)
    try:
        yield
    finally:
        del _base.apply
