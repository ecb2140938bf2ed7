"""Command lines of load tests, benchmarks, simulator and fault trials, by the standard library alone.

A command is a function whose parameters are `Annotated[type, Option(…)]`, or dataclasses with such fields, for options
that several commands have; its docstring is the help. The benchmarks of a GPU run where torch is and little else, so
nothing here needs another package.
"""

from __future__ import annotations

import argparse
import inspect
import math
import os
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from shared.errors import ConfigError, TandemError

EXIT_REFUSED = 2

T = TypeVar("T", int, float)


@dataclass(frozen=True)
class Option:
    """What `--help` says of a parameter, and its flag where that is not the parameter's name."""

    help: str = ""
    name: str = ""
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    writes: Literal["", "file", "folder"] = ""
    """What is written there in the end, if anything: where it cannot be, the option is refused before the run."""

    def check_place(self, name: str, value: object) -> None:
        """Raises ConfigError for a place that the command cannot write to. Makes no folder."""
        if self.writes and isinstance(value, Path):
            _check_writable(name, value, is_folder=self.writes == "folder")

    def check_number(self, name: str, value: float) -> None:
        """Raises ConfigError for a number out of bounds, and for what is no number."""
        low = -math.inf if self.at_least is None else self.at_least
        high = math.inf if self.at_most is None else self.at_most
        # An integer of more digits than a float holds is no number that anything here can use.
        value = math.inf if abs(value) > 1e300 else value
        if math.isfinite(value) and low <= value <= high and (self.above is None or value > self.above):
            return
        bounds = {"above": self.above, "at least": self.at_least, "at most": self.at_most}
        expected = " and ".join(f"{bound} {limit:g}" for bound, limit in bounds.items() if limit is not None)
        raise ConfigError(f"{name} must be {expected or 'a number'}, got {value:g}", field=name)


Out = Annotated[Path | None, Option("file for the results as JSON", writes="file")]


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


class Command(NamedTuple):
    """A command that is found by its name."""

    place: str
    """package.module:function; the module is imported only to run it."""
    help: str


def run_one_of(commands: Mapping[str, Command], arguments: Sequence[str], program: str) -> None:
    """Runs the command that the first argument names; without one, lists all. See `run`."""
    name, *rest = arguments or ["--help"]
    if name not in commands:
        lines = [f"  {known:12} {command.help}" for known, command in commands.items()]
        wrong = [] if name in ("--help", "-h") else [f"error: {name!r} is no command of {program}"]
        out = sys.stderr if wrong else sys.stdout
        print(f"usage: {program} NAME …\n", *lines, *wrong, sep="\n", file=out)
        sys.exit(EXIT_REFUSED if wrong else 0)
    module, _, function = commands[name].place.partition(":")
    run(getattr(import_module(module), function), rest, f"{program} {name}")


def run(function: Callable[..., int | None], arguments: Sequence[str] | None = None, name: str | None = None) -> None:
    """`call` as a process, with the command's number as its status: an error that the user can fix is one line on
    stderr and status 2."""
    try:
        status = call(function, sys.argv[1:] if arguments is None else arguments, name)
    except TandemError as error:
        print(f"error: {error.message}", file=sys.stderr)
        sys.exit(EXIT_REFUSED)
    if status is not None:
        sys.exit(status)


def call(function: Callable[..., int | None], arguments: Sequence[str], name: str | None = None) -> int | None:
    """Calls a command with the options of its command line. A list takes `--workers 1 2 4` and `--workers "1 2 4"`.

    Raises what the command raises, and SystemExit for a wrong option or `--help`.
    """
    parser = argparse.ArgumentParser(prog=name, description=inspect.getdoc(function))
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {parameter: kind for parameter, kind in hints.items() if is_dataclass(kind)}
    options = [
        _add(parser, parameter.name, hints[parameter.name], parameter.default)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name not in groups
    ]
    for kind in groups.values():
        options += _add_fields(parser, kind)
    given = {
        key: " ".join(value) if isinstance(value, list) else value
        for key, value in vars(parser.parse_args(arguments)).items()
    }
    for name, option in options:
        option.check_place(_flag(name, option), given[name])
    made = {
        parameter: kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        for parameter, kind in groups.items()
    }
    return function(**given, **made)


def _add_fields(parser: argparse.ArgumentParser, kind: Any) -> list[tuple[str, Option]]:
    hints = get_type_hints(kind, include_extras=True)
    return [
        _add(
            parser,
            field.name,
            hints[field.name],
            inspect.Parameter.empty if field.default is MISSING else field.default,
        )
        for field in fields(kind)
    ]


def _add(parser: argparse.ArgumentParser, name: str, hint: Any, default: object) -> tuple[str, Option]:
    """Adds the parameter to the parser; returns its name and its option."""
    kind, option = (get_args(hint)[0], get_args(hint)[1]) if get_origin(hint) is Annotated else (hint, Option())
    kind = next((part for part in get_args(kind) if part is not NoneType), kind)  # of `Path | None`
    flag = f"--{_flag(name, option)}"
    required = default is inspect.Parameter.empty
    settings: dict[str, Any] = {"dest": name, "required": required, "help": option.help.replace("%", "%%")}
    if not required:
        settings["default"] = default
    if kind is not bool:
        settings["metavar"] = flag.removeprefix("--").replace("-", "_").upper()
    if kind is bool:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, **settings)
    elif kind is str:
        parser.add_argument(flag, nargs="+", **settings)
    else:
        parser.add_argument(flag, type=_checked(kind, option, flag.removeprefix("--")), **settings)
    return name, option


def _flag(name: str, option: Option) -> str:
    """The parameter's flag, without its dashes."""
    return option.name or name.replace("_", "-")


def _checked(kind: Callable[[str], Any], option: Option, name: str) -> Callable[[str], Any]:
    """Reads a value and checks it; raises ConfigError, which is no error of argparse's and passes through it."""

    def read(text: str) -> Any:
        value = kind(text)
        if isinstance(value, int | float):
            option.check_number(name, value)
        return value

    read.__name__ = kind.__name__  # in argparse's message of what is no number
    return read


def _check_writable(name: str, path: Path, *, is_folder: bool) -> None:
    """Raises ConfigError where the file or folder cannot be made, or replaced where it exists."""
    try:
        if not is_folder and path.is_dir():
            raise IsADirectoryError("it is a folder")
        if not is_folder and path.exists() and not (path.stat().st_mode & 0o222 and os.access(path, os.W_OK)):
            raise PermissionError("it is read-only")  # for root too, which the system would let write
        folder = path if is_folder else path.parent
        existing = next(each for each in (folder, *folder.absolute().parents) if each.exists())
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ConfigError(f"{name}: {path} cannot be written: {error}", field=name) from error


def _numbers(kind: Callable[[str], T], text: str, option: str) -> list[T]:
    try:
        found = [kind(part) for part in text.split()]
    except ValueError:
        raise ConfigError(f"--{option}: {text!r} is not a list of numbers", field=option) from None
    if not all(map(math.isfinite, found)):
        raise ConfigError(f"--{option}: {text!r} has what is no finite number", field=option)
    return found
