"""The `plantune` command itself: its subcommands, and what becomes of their errors."""

from __future__ import annotations

import errno
import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import click

from plantune import __version__
from plantune.base.canonical import words
from plantune.base.storage_urls import VARIABLE, urls_in
from plantune.cli.console import (
    STDOUT,
    Console,
    any_locale,
    close_quietly,
    hidden,
    note,
    shown_warnings,
    without_urls,
)
from plantune.cli.exit_codes import EXPECTED, FAILED, MEANINGS, USAGE, exit_code
from plantune.cli.hints import Commands, option_hint
from plantune.cli.stdout import own_stdout
from plantune.errors import UnexpectedExit, WorkerDied, WorkerFailed

# In the order of a user's way; each is a module of its own, or one of these.
COMMANDS = words("doctor search export import plans explain verify bench profile cache")
MODULES = {"export": "exports", "import": "exports"}
# Later versions of click raise it with the help as its message; earlier ones show the help.
NO_ARGUMENTS: tuple[type[click.UsageError], ...] = tuple(
    filter(None, [getattr(click.exceptions, "NoArgsIsHelpError", None)])
)
TRACE = "Traceback (most recent call last)"
BEGAN = "plantune.began"
EXIT_CODES = ", ".join(f"{code} {meaning}" for code, meaning in MEANINGS.items())


class Root(Commands):
    """Imports a command's file when the command is asked for, and turns errors into exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"plantune.cli.{MODULES.get(cmd_name, cmd_name)}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Raises UnexpectedExit where a network's code ended the command."""
        try:
            return super().invoke(ctx)
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise UnexpectedExit(_ended(error)) from error

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Notes when the command began: what it imports counts in a search's budget."""
        began = time.monotonic()
        context = super().make_context(*args, **extra)
        context.meta[BEGAN] = began
        return context

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        given = list(sys.argv[1:] if args is None else args)
        run = super().main
        if not standalone_mode:
            return run(given, prog_name, complete_var, standalone_mode=False, **extra)

        def parsed() -> Any:
            name = prog_name or "plantune"
            return run(given, name, complete_var, standalone_mode=False, **extra)

        urls = urls_in(given, os.environ.get(VARIABLE))
        with own_stdout(), any_locale(), shown_warnings(), without_urls(urls):
            code = _Told(given, bool(urls)).code_of(parsed)
        sys.exit(code)


class _Told:
    """What becomes of the errors of a command with these arguments."""

    def __init__(self, arguments: list[str], has_urls: bool) -> None:
        self._arguments, self._has_urls = arguments, has_urls
        self._as_json = any(each == "--json" or each.startswith("--json=") for each in arguments)

    def code_of(self, command: Callable[[], Any]) -> int:
        """Runs a command; every expected error becomes one line and its exit code."""
        try:
            code = command()
            return code if isinstance(code, int) else 0
        except NO_ARGUMENTS as error:
            error.show()
            return USAGE
        except EXPECTED as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                close_quietly()
                return FAILED
            return self._reported(error)
        except Exception as error:
            # A fault of plantune: the trace is needed, and so is the object.
            self._emit(type(error).__name__, str(error), FAILED)
            if not self._has_urls:
                raise
            note("".join(traceback.format_exception(error)).rstrip())  # Python hides no password
            return FAILED

    def _reported(self, error: BaseException) -> int:
        code, message = exit_code(error), self._message(error)
        note(f"{click.style('error:', fg='red')} {message}")
        self._emit(type(error).__name__, message, code)
        return code

    def _emit(self, kind: str, message: str, code: int) -> None:
        if not self._as_json:
            return
        fault = {"type": kind, "message": hidden(message), "exit_code": code}
        try:
            Console(STDOUT).emit({"error": fault})
        except OSError:
            close_quietly()

    def _message(self, error: BaseException) -> str:
        """One line; a usage error also says where help is."""
        if isinstance(error, click.Abort):
            return "interrupted"
        text = error.format_message() if isinstance(error, click.ClickException) else str(error)
        if isinstance(error, (WorkerDied, WorkerFailed)) and "\n" in text:
            return _reported_by_worker(text)
        if isinstance(error, click.NoSuchOption):
            text = error.message.rstrip(".") + option_hint(error, self._arguments)
        if isinstance(error, click.UsageError) and error.ctx is not None:
            text = f"{text.rstrip('.')}; see {error.ctx.command_path} --help"
        return " ".join(text.split()) if isinstance(error, click.ClickException) else text


def _ended(error: BaseException) -> str:
    """What was raised, and the last line of the code that led to it."""
    said = str(error).strip().partition("\n")[0]
    *_, last = traceback.extract_tb(error.__traceback__)
    return (
        f"the network's code, or what it calls, ended the command: {type(error).__name__}"
        f"{f': {said}' if said else ''} ({last.filename}:{last.lineno})"
    )


def _reported_by_worker(text: str) -> str:
    """How a worker ended, without the trace that it left; that goes to a file."""
    from plantune.base.build_log import keep_log

    lines = text.strip().splitlines()
    # Python's last line names the error; other traces end anywhere.
    cause = f" {lines[-1].strip()}" if TRACE in text else ""
    path = keep_log(text)
    log = "" if path is None else f"; all that it said is in {path}"
    return f"{lines[0].removesuffix('; it printed:')}{cause}{log}"


@click.group(
    cls=Root,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
    epilog=f"Exit codes: {EXIT_CODES}.",
)
@click.version_option(__version__, message="plantune %(version)s")
def main() -> None:
    """Finds the fastest kernels and fusions for a small network on this machine.

    \b
    Example:
      plantune search --batch 8
      plantune bench --batch 8
    """
