"""Helpers for the benchmarks' and the simulator's command lines, on top of typer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from shared.errors import TandemError

EXIT_REFUSED = 2

Out = Annotated[Path | None, typer.Option(help="file for the results as JSON")]

T = TypeVar("T", int, float)


def integers(text: str, option: str) -> list[int]:
    """The numbers of a list option such as `--workers 1 2 4`; raises typer.BadParameter naming it."""
    return _numbers(int, text, option)


def decimals(text: str, option: str) -> list[float]:
    """The same for decimal numbers."""
    return _numbers(float, text, option)


def names(text: str, option: str, known: Collection[str]) -> list[str]:
    """The names of a list option, each one of `known`; raises typer.BadParameter naming it."""
    return [choice(part, option, known) for part in text.split()]


def choice(text: str, option: str, known: Collection[str]) -> str:
    """The value, which must be one of `known`; raises typer.BadParameter naming the option."""
    if text not in known:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(known)}", param_hint=f"--{option}")
    return text


def call(function: Callable[..., None], arguments: Sequence[str], name: str | None = None) -> None:
    """Calls a command with the options of its command line; it has no positional arguments.

    A list option takes `--workers 1 2 4` as well as `--workers "1 2 4"`. Raises what the command raises, and
    SystemExit for a wrong option.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(function)
    try:
        app(_joined_lists(arguments), prog_name=name)
    except SystemExit as ended:
        if ended.code:
            raise


def run(function: Callable[..., None], arguments: Sequence[str] | None = None, name: str | None = None) -> None:
    """`call` as a process: an error that the user can fix is one line on stderr and status 2."""
    try:
        call(function, sys.argv[1:] if arguments is None else arguments, name)
    except TandemError as error:
        print(f"error: {error.message}", file=sys.stderr)
        sys.exit(EXIT_REFUSED)


def _joined_lists(arguments: Sequence[str]) -> list[str]:
    """Joins all values that follow one option into one value."""
    joined: list[str] = []
    is_value = False  # the last of `joined`
    for argument in arguments:
        if argument.startswith("-") or not is_value:
            joined.append(argument)
        else:
            joined[-1] += f" {argument}"
        is_value = not argument.startswith("-")
    return joined


def _numbers(kind: Callable[[str], T], text: str, option: str) -> list[T]:
    try:
        return [kind(part) for part in text.split()]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers", param_hint=f"--{option}") from None
