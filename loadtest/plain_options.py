"""Command lines by the standard library alone, for benchmarks that run where torch is and little else.

A command is a function whose parameters are `Annotated[type, Option(…)]` with defaults; its docstring is the help.
`loadtest.command_line` does the same with typer, for all others.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from shared.errors import ConfigError, TandemError

EXIT_REFUSED = 2


@dataclass(frozen=True)
class Option:
    """What `--help` says of a parameter."""

    help: str = ""


Out = Annotated[Path | None, Option("file for the results as JSON")]


def integers(text: str, option: str) -> list[int]:
    """The numbers of an option such as `--batch "64 256"`; raises ConfigError naming it."""
    try:
        return [int(part) for part in text.split()]
    except ValueError:
        raise ConfigError(f"--{option}: {text!r} is not a list of whole numbers", field=option) from None


def call(function: Callable[..., None], arguments: Sequence[str], name: str | None = None) -> None:
    """Calls a command with the options of its command line. A list in one string may come unquoted too.

    Raises what the command raises, and SystemExit for a wrong option or `--help`.
    """
    parser = argparse.ArgumentParser(prog=name, description=inspect.getdoc(function))
    hints = get_type_hints(function, include_extras=True)
    for parameter in inspect.signature(function).parameters.values():
        _add(parser, parameter, hints[parameter.name])
    given = vars(parser.parse_args(arguments))
    function(**{key: " ".join(value) if isinstance(value, list) else value for key, value in given.items()})


def run(function: Callable[..., None], arguments: Sequence[str], name: str | None = None) -> None:
    """`call` as a process: an error that the user can fix is one line on stderr and status 2."""
    try:
        call(function, arguments, name)
    except TandemError as error:
        print(f"error: {error.message}", file=sys.stderr)
        sys.exit(EXIT_REFUSED)


def _add(parser: argparse.ArgumentParser, parameter: inspect.Parameter, hint: Any) -> None:
    kind, option = (get_args(hint)[0], get_args(hint)[1]) if get_origin(hint) is Annotated else (hint, Option())
    kind = next((part for part in get_args(kind) if part is not NoneType), kind)  # of `Path | None`
    flag = "--" + parameter.name.replace("_", "-")
    if kind is bool:
        parser.add_argument(flag, action="store_true", help=option.help)
    elif kind is str:
        parser.add_argument(flag, nargs="+", default=parameter.default, help=option.help)
    else:
        parser.add_argument(flag, type=kind, default=parameter.default, help=option.help)
