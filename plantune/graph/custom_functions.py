"""Functions with a backward of their own, which a trace of what they call does not see."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.autograd import Function

_Function: Any = Function


@contextmanager
def each_application(tell: Callable[[type], None]) -> Iterator[None]:
    """Inside, this thread tells of each torch.autograd.Function before it is applied. Other threads
    apply theirs as ever.
    """
    thread, before = threading.get_ident(), Function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            tell(cls)
        return before.__func__(cls, *args, **kwargs)

    _Function.apply = classmethod(apply)
    try:
        yield
    finally:
        _Function.apply = before
