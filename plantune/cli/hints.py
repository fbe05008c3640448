"""Commands, options and values that are close to what was mistyped; whole numbers as digits."""

from __future__ import annotations

import re
from typing import Any

import click

from plantune.base.nearest import hint

DIGITS = re.compile(r"-?[0-9]{1,18}")
JSON_BEFORE = "plantune.json_before"
STDOUT = "-"  # as Console.json has it


class Commands(click.Group):
    """Takes --json before the name of a command too, and names the command that is close."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.params.append(
            click.Option(
                ["--json"], is_flag=True, expose_value=False, callback=_note_json,
                help="As after the command's name.",
            )
        )  # fmt: skip

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        if args[0] in known or args[0].startswith("-"):
            return super().resolve_command(ctx, args)
        raise click.UsageError(f"No such command {args[0]!r}{hint(args[0], known)}", ctx)


class Choice(click.Choice):  # type: ignore[type-arg] # generic in later versions of click only
    """Names the choice that is close to what was given."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value not in self.choices:
            known = ", ".join(map(repr, self.choices))
            close = hint(value, map(str, self.choices))
            self.fail(f"{value!r} is not one of {known}{close}", param, ctx)
        return super().convert(value, param, ctx)


class Whole(click.IntRange):
    """A whole number in digits: Python also reads 1_0, and the digits of other scripts."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and DIGITS.fullmatch(value) is None:
            self.fail(f"{value!r:.80} is not a whole number of up to 18 digits", param, ctx)
        return super().convert(value, param, ctx)


def option_hint(error: click.UsageError, arguments: list[str]) -> str:
    """What to put after click's message on an option that there is not."""
    if not isinstance(error, click.NoSuchOption) or error.ctx is None:
        return ""
    name = error.option_name
    if not name.startswith("--"):  # click tells -batch as -b
        name = next((each for each in arguments if each.startswith(name)), name)
    known = [text for param in error.ctx.command.get_params(error.ctx) for text in param.opts]
    return hint(f"--{name.lstrip('-').partition('=')[0]}", known)


def _note_json(ctx: click.Context, param: click.Parameter, given: bool) -> None:
    if given:
        ctx.meta[JSON_BEFORE] = STDOUT
