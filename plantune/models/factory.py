"""A network of the user's own, by its factory: package.module:factory or file.py:factory."""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from plantune.base.nearest import hint
from plantune.errors import InvalidNetwork, UnknownNetwork

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from torch import nn


def is_factory(network: str) -> bool:
    """Whether a network is named by its factory, and is none of the reference networks."""
    return ":" in network


@dataclass(frozen=True)
class Factory:
    """A function, a class or a module, with the keyword arguments to call it with."""

    spec: str
    arguments: tuple[tuple[str, Any], ...] = ()

    def build(self) -> nn.Module:
        """Raises UnknownNetwork if there is no such factory, InvalidNetwork if it fails."""
        from torch import nn

        place, _, name = self.spec.rpartition(":")
        with prints_aside():
            home = _imported(place)
            made = _attribute(home, place, name)
            if not isinstance(made, nn.Module) or self.arguments:
                made = self._called(made, str(home.__file__))
        if not isinstance(made, nn.Module):
            raise InvalidNetwork(f"{self} gives a {type(made).__name__}, not an nn.Module")
        self._require_values(made)
        return made

    def _require_values(self, made: nn.Module) -> None:
        from torch.nn.parameter import is_lazy

        for name, tensor in (*made.named_parameters(), *made.named_buffers()):
            if is_lazy(tensor):
                raise InvalidNetwork(
                    f"{self}: {name} of a lazy layer has no shape yet; call the module once in the "
                    "factory"
                )
            if tensor.is_meta:
                raise InvalidNetwork(f"{self}: {name} has no values: it is on the meta device")

    def _called(self, factory: Any, file: str) -> Any:
        if not callable(factory):
            raise InvalidNetwork(f"{self.spec} is a {type(factory).__name__}, not a function")
        with _telling(f"{self} failed", file):
            return factory(**dict(self.arguments))

    def __str__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.arguments)
        return f"{self.spec}({given})"


def prints_aside() -> redirect_stdout[TextIO]:
    """Inside, what the user's code prints goes to stderr: stdout is for results."""
    return redirect_stdout(sys.stderr)


def _imported(place: str) -> ModuleType:
    """A module by its name, in this folder too as with python -m, or by its file."""
    if not place.endswith(".py"):
        _search_in(os.getcwd())
        try:
            with _telling(f"{place} cannot be imported", place):
                return importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise UnknownNetwork(
                f"there is no module {error.name!r}; it was looked for in {os.getcwd()} and where "
                f"Python finds packages. A file is named by its path: path/to/{place}.py:factory"
            ) from error
    path = Path(place).absolute()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise UnknownNetwork(f"there is no file {path}")
    _search_in(str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # for pickles; not in the place of another module
    with _telling(f"{place} cannot be imported", str(path)):
        spec.loader.exec_module(module)
    return module


def _search_in(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _attribute(home: ModuleType, place: str, name: str) -> Any:
    try:
        return reduce(getattr, name.split("."), home)
    except AttributeError as error:
        raise UnknownNetwork(f"{place} has no {name!r}{hint(name, vars(home))}") from error


@contextmanager
def _telling(what: str, file: str) -> Iterator[None]:
    """Says which line of the user's failed. A missing module is for the caller to tell of."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError) and file.startswith(str(error.name)):
            raise
        said = str(error).strip().partition("\n")[0]
        raise InvalidNetwork(
            f"{what}: {type(error).__name__}{f': {said}' if said else ''}{_line(error, file)}"
        ) from error


def _line(error: BaseException, file: str) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == file] or frames[1:]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
