"""Command lines of the benchmarks, the simulator and the fault trials, by the standard library alone.

A command is a function whose parameters are `Annotated[type, Option(…)]`; its docstring is the help. The benchmarks of
a GPU run where torch is and little else, so nothing here needs another package.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from shared.errors import ConfigError, TandemError

EXIT_REFUSED = 2

T = TypeVar("T", int, float)


@dataclass(frozen=True)
class Option:
    """What `--help` says of a parameter, and its flag where that is not the parameter's name."""

    help: str = ""
    name: str = ""


Out = Annotated[Path | None, Option("file for the results as JSON")]


def integers(text: str, option: str) -> list[int]:
    """The numbers of a list option such as `--workers 1 2 4`; raises ConfigError naming it."""
    return _numbers(int, text, option)


def decimals(text: str, option: str) -> list[float]:
    """The same for decimal numbers."""
    return _numbers(float, text, option)


def names(text: str, option: str, known: Collection[str]) -> list[str]:
    """The names of a list option, each one of `known`; raises ConfigError naming it."""
    return [choice(part, option, known) for part in text.split()]


def choice(text: str, option: str, known: Collection[str]) -> str:
    """The value, which must be one of `known`; raises ConfigError naming the option."""
    if text not in known:
        raise ConfigError(f"--{option}: {text!r} is not one of {', '.join(known)}", field=option)
    return text


def call(function: Callable[..., None], arguments: Sequence[str], name: str | None = None) -> None:
    """Calls a command with the options of its command line. A list takes `--workers 1 2 4` and `--workers "1 2 4"`.

    Raises what the command raises, and SystemExit for a wrong option or `--help`.
    """
    parser = argparse.ArgumentParser(prog=name, description=inspect.getdoc(function))
    hints = get_type_hints(function, include_extras=True)
    for parameter in inspect.signature(function).parameters.values():
        _add(parser, parameter, hints[parameter.name])
    given = vars(parser.parse_args(arguments))
    function(**{key: " ".join(value) if isinstance(value, list) else value for key, value in given.items()})


def run(function: Callable[..., None], arguments: Sequence[str] | None = None, name: str | None = None) -> None:
    """`call` as a process: an error that the user can fix is one line on stderr and status 2."""
    try:
        call(function, sys.argv[1:] if arguments is None else arguments, name)
    except TandemError as error:
        print(f"error: {error.message}", file=sys.stderr)
        sys.exit(EXIT_REFUSED)


def _add(parser: argparse.ArgumentParser, parameter: inspect.Parameter, hint: Any) -> None:
    kind, option = (get_args(hint)[0], get_args(hint)[1]) if get_origin(hint) is Annotated else (hint, Option())
    kind = next((part for part in get_args(kind) if part is not NoneType), kind)  # of `Path | None`
    flag = "--" + (option.name or parameter.name.replace("_", "-"))
    required = parameter.default is parameter.empty
    settings: dict[str, Any] = {"dest": parameter.name, "required": required, "help": option.help.replace("%", "%%")}
    if not required:
        settings["default"] = parameter.default
    if kind is bool:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, **settings)
    elif kind is str:
        parser.add_argument(flag, nargs="+", **settings)
    else:
        parser.add_argument(flag, type=kind, **settings)


def _numbers(kind: Callable[[str], T], text: str, option: str) -> list[T]:
    try:
        return [kind(part) for part in text.split()]
    except ValueError:
        raise ConfigError(f"--{option}: {text!r} is not a list of numbers", field=option) from None
