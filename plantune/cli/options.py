"""Options that commands share, and the values that they become."""

from __future__ import annotations

import ast
import functools
import math
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from plantune.base.nearest import hint
from plantune.cli.console import STDOUT, Console
from plantune.cli.hints import JSON_BEFORE, Choice, Whole
from plantune.cli.stdout import take_stdout
from plantune.errors import UnknownNetwork
from plantune.models.factory import is_factory
from plantune.models.registry import network, network_names
from plantune.plans.workload import BATCH_MAX, ELEMENTS_MAX, Workload
from plantune.space.arch import ARCH_NAMES

Command = Callable[..., None]
Decorator = Callable[[Command], Command]
F = TypeVar("F", bound=Callable[..., Any])
# Those of plantune.graph.types that a network can have; that file imports torch.
DTYPES = ("float32", "float64", "float16", "bfloat16")
ALL_DTYPES = (*DTYPES, "int64", "int32", "int16", "int8", "uint8", "bool")
PLANS = "PLANTUNE_PLANS"
# Digits of other scripts are digits to Python too.
SIZE, NUMBER = re.compile(r"0*[1-9][0-9]{0,17}"), re.compile(r"[0-9]{1,9}")
SECONDS_TEXT = re.compile(r"[0-9.eE+-]+")
WEEK_S = 7 * 24 * 3600
SEED_MAX = (1 << 31) - 2


# What follows from the arch, in the words of the help.
ARCH_DEFAULT = "that of the first GPU here, else cpu"
DTYPE_DEFAULT = "float16 on a GPU, else float32"


class Parsed(click.ParamType):  # type: ignore[type-arg] # generic in later versions of click only
    """What `parse` makes of an option's text, or of its default; it raises ValueError with what is
    wrong.
    """

    def __init__(self, name: str, parse: Callable[[Any], Any]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class ModelName(Parsed):
    """A name of the registry, or where a factory is; a wrong name is answered with those that are
    close.
    """

    def __init__(self) -> None:
        super().__init__("model", _model_name)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(name) for name in network_names() if name.startswith(incomplete)]


def _model_name(value: str) -> str:
    try:
        return value if is_factory(value) else network(value).name
    except UnknownNetwork as error:
        own = "a network of your own is package.module:factory or file.py:factory"
        raise ValueError(f"{error}; {own}") from error


def _seconds(value: Any) -> float:
    """More than 0 and at most a week; no NaN, no infinity."""
    with suppress(ValueError):
        if SECONDS_TEXT.fullmatch(str(value)) and 0 < float(value) <= WEEK_S:
            return float(value)
    raise ValueError(f"{value!r:.80} must be a number of seconds in (0, {WEEK_S}]")


def _input_text(value: str) -> str:
    """An input's sizes and, after a colon, its dtype."""
    shape, colon, dtype = value.partition(":")
    sizes = shape.split("x")
    if not all(SIZE.fullmatch(size) for size in sizes):
        raise ValueError(f"{value!r:.80}: sizes are numbers with x between, 8x3x64x64")
    if math.prod(map(int, sizes)) > ELEMENTS_MAX:
        raise ValueError(f"{value!r:.80}: has more than {ELEMENTS_MAX} elements")
    if colon and dtype not in ALL_DTYPES:
        known = f"{', '.join(ALL_DTYPES)}{hint(dtype, ALL_DTYPES)}"
        raise ValueError(f"{value!r:.80}: a dtype is one of {known}")
    return value


def _setting(value: Any) -> tuple[str, Any]:
    """A keyword argument: a value as Python writes it, else a text."""
    if isinstance(value, tuple):
        return value
    name, equals, text = value.partition("=")
    if not equals or not name.isidentifier():
        raise ValueError(f"{value!r:.80}: give a keyword argument of the factory, width=2")
    try:
        return name, ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return name, text


def _gpus(value: Any) -> tuple[int, ...]:
    """Numbers of GPUs, each once; none of them stands for all."""
    if isinstance(value, tuple) or value == "all":
        return value if isinstance(value, tuple) else ()
    parts = value.split(",")
    numbers = [int(part) for part in parts if NUMBER.fullmatch(part)]
    if len({*numbers}) < len(parts):
        raise ValueError(f"{value!r:.80}: give all, or numbers of GPUs with commas between")
    return tuple(numbers)


SECONDS = Parsed("seconds", _seconds)
INPUT = Parsed("input", _input_text)
SETTING = Parsed("name=value", _setting)
GPUS = Parsed("all|0,1,...", _gpus)
PATH = click.Path(path_type=Path)
ID = Whole(min=1)
FILE = click.Path(dir_okay=False, path_type=Path)


def bundled(
    type_: type[Any], name: str, make: Callable[..., Any] | None = None
) -> Callable[[F], Command]:
    """The options that are fields of a dataclass reach a command as one value, that of `make`."""
    names = [field.name for field in fields(type_)]

    def decorate(function: F) -> Command:
        @functools.wraps(function)
        def command(**given: Any) -> None:
            given[name] = (make or type_)(**{each: given.pop(each) for each in names})
            function(**given)

        return command

    return decorate


def _applied(options: Sequence[Decorator], command: Command) -> Command:
    for option in reversed(options):
        command = option(command)
    return command


def budget_option(seconds: float, help: str) -> Decorator:
    """--budget, with so many seconds unless it is given."""
    return click.option("--budget", type=SECONDS, default=seconds, help=help)


def seed_option(help: str) -> Decorator:
    return click.option("--seed", type=Whole(0, SEED_MAX), default=0, help=help)


def _share(ctx: click.Context, param: click.Parameter, files: tuple[Path, ...]) -> None:
    """For this command, also in the processes that it starts, the files count as named by
    PLANTUNE_PLANS before those that it names.
    """
    if not files:
        return
    before = os.environ.get(PLANS)
    os.environ[PLANS] = os.pathsep.join([*map(str, files), *filter(None, [before])])

    def restore() -> None:
        if before is None:
            os.environ.pop(PLANS, None)
        else:
            os.environ[PLANS] = before

    ctx.call_on_close(restore)


def from_option(command: Command) -> Command:
    """--from, which names plan files of others."""
    return click.option(
        "--from", type=click.Path(exists=True, path_type=Path), multiple=True, metavar="FILE",
        callback=_share, expose_value=False,
        help="Plans of others, used where there is none of your own; as PLANTUNE_PLANS.",
    )(command)  # fmt: skip


def plan_options(command: Command) -> Command:
    """The options of a workload, or an ID in their place."""
    return workload_options(click.argument("id", type=ID, required=False)(command))


def workload_options(command: Command) -> Command:
    """--model and all else that decides which plan is meant; the command gets it as `workload`."""
    options: list[Decorator] = [
        click.option("--model", "network", type=ModelName(), default=Workload.network,
                     help=f"Reference network: {', '.join(network_names())}. Or your own, as "
                     "package.module:factory or file.py:factory."),
        click.option("--arch", type=Choice(ARCH_NAMES), show_default=ARCH_DEFAULT,
                     help="Kind of processor."),
        click.option("--batch", type=Whole(1, BATCH_MAX), show_default=str(Workload.batch),
                     help="Images in one call."),
        click.option("--in-channels", type=Whole(1, 4096),
                     default=Workload.in_channels, help="Channels of an image."),
        click.option("--image-size", type=Whole(1, 1 << 16),
                     show_default="that of the reference network",
                     help="Height and width of an image."),
        click.option("--input", "inputs", type=INPUT, multiple=True, metavar="SIZES[:DTYPE]",
                     help="An input instead of the image: 8x3x64x64:uint8; once for each."),
        click.option("--set", "settings", type=SETTING, multiple=True, metavar="NAME=VALUE",
                     help="A keyword argument of the factory."),
        click.option("--mode", type=Choice(("infer", "train")), default=Workload.mode,
                     help="Train is forward and backward."),
        click.option("--dtype", type=Choice(DTYPES), show_default=DTYPE_DEFAULT,
                     help="Of weights and images."),
        from_option,
    ]  # fmt: skip
    return _applied(options, bundled(Workload, "workload", Workload.on)(command))


def common_options(*, json_file: bool = False) -> Decorator:
    """--db, which the command gets as `place`, and --json, which is in its `console`."""
    if json_file:
        json_option = click.option(
            "--json", "json", is_flag=False, flag_value=STDOUT, metavar="[FILE]",
            help="Write one JSON object to stdout, or to FILE.",
        )  # fmt: skip
    else:
        json_option = click.option(
            "--json", "json", is_flag=True, flag_value=STDOUT, default=None,
            help="Write one JSON object to stdout, nothing else.",
        )  # fmt: skip
    db = click.option(
        "--db", "place", type=FILE, metavar="PATH",
        help="Plan database to use instead of the one in the cache folder.",
    )  # fmt: skip

    def decorate(command: Command) -> Command:
        return _applied([db, json_option], bundled(Console, "console", _console)(command))

    return decorate


def _console(json: str | None) -> Console:
    """The first that a command does: what its work prints from then on is no result."""
    take_stdout()
    return Console(json or click.get_current_context().meta.get(JSON_BEFORE))


def example(*lines: str) -> str:
    """The end of a command's help."""
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)
