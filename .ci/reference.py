"""Writes docs/reference.md: every setting, every command and flag of `tandem`, every target of the Makefile.

    python .ci/reference.py           write the page
    python .ci/reference.py --check   fail where the page is stale (part of `make lint`)

The page is made from the code alone: a setting's text is its docstring, a flag's its help, a target's its `##` comment.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference.md"
sys.path.insert(0, str(ROOT))

import typer  # noqa: E402 - the project's folder stands on the path only now
from pydantic import BaseModel, SecretStr  # noqa: E402
from pydantic.fields import FieldInfo  # noqa: E402
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption  # noqa: E402

from services.kvstore.settings import KVStoreSettings  # noqa: E402
from services.planner.settings import PlannerSettings  # noqa: E402
from services.router.settings import RouterSettings  # noqa: E402
from services.worker.settings import WorkerSettings  # noqa: E402
from shared.config import ServiceSettings  # noqa: E402
from tandem_cli.main import build_app  # noqa: E402

INTRODUCTION = """\
# Reference

Made by `python .ci/reference.py` from the code; `make lint` fails where it is stale. Do not edit it by hand.

- [Router](#router), [worker](#worker), [KV store](#kv-store), [planner](#planner): the settings of each service
- [The `tandem` command](#the-tandem-command)
- [`make` targets](#make-targets)

## How settings are read

Each service is a process with settings of its own. A flag goes before the environment, that before a YAML file given
with `--config FILE`, that before the default. In the file a dot in a setting's name is a level: `admission.order` is
`order` under `admission`. A setting that is a mapping takes JSON as flag and in the environment. A value out of bounds
stops the start with the setting's name; so does a flag or a name in the file that does not exist, and a `TANDEM_*`
variable that is none, with the nearest name that is one.

`tandem serve` and `make run` start all services, which inherit the environment:
`TANDEM_ROUTER_QUEUE_LIMIT=64 make run`.
"""

SERVICES: tuple[tuple[str, str, type[ServiceSettings]], ...] = (
    ("Router", "python -m services.router", RouterSettings),
    ("Worker", "python -m services.prefill` and `python -m services.decode", WorkerSettings),
    ("KV store", "python -m services.kvstore", KVStoreSettings),
    ("Planner", "python -m services.planner", PlannerSettings),
)

BOUNDS = {
    "ge": "≥",
    "gt": ">",
    "le": "≤",
    "lt": "<",
    "multiple_of": "multiple of",
    "min_length": "length ≥",
    "max_length": "length ≤",
}
"""How pydantic's bounds are shown."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting, as the page shows it."""

    name: str
    flag: str
    """Empty where only the environment and the file can set it."""
    variable: str
    """Empty where only a mapping's JSON can hold it."""
    default: str
    bounds: str
    text: str


def settings_of(cls: type[ServiceSettings]) -> list[Setting]:
    """All settings of a service, those of nested objects where they stand."""
    prefix = str(cls.model_config.get("env_prefix", ""))
    return [_setting(prefix, path, field, value) for path, field, value in _fields(cls, None, ())]


def _fields(
    cls: type[BaseModel], defaults: BaseModel | None, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], FieldInfo, Any]]:
    """(path, field, default) of every setting. A mapping of objects is followed by their fields, under NAME."""
    for name, field in cls.model_fields.items():
        default = getattr(defaults, name) if defaults is not None else field.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):
            yield from _fields(type(default), default, (*path, name))
            continue
        yield (*path, name), field, default
        values = get_args(field.annotation)[1:] if get_origin(field.annotation) is dict else ()
        for value in values:
            if isinstance(value, type) and issubclass(value, BaseModel):
                yield from _fields(value, None, (*path, name, "NAME"))


def _setting(prefix: str, path: tuple[str, ...], field: FieldInfo, default: object) -> Setting:
    inside = "NAME" in path
    name = ".".join(path)
    return Setting(
        name,
        "" if inside else "--" + name.replace("_", "-"),
        "" if inside else prefix + "__".join(path).upper(),
        "required" if field.is_required() else _default(default),
        _bounds(field),
        field.description or "",
    )


def _default(value: object) -> str:
    """As one would write it."""
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    return "none" if value is None or value in ("", (), {}) else code(_value(value))


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.12g}"
    if isinstance(value, int) and value >= 1 << 16:
        for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
            if value % (1 << shift) == 0:
                return f"{value} ({value >> shift} {unit})"
    return str(value)


def _bounds(field: FieldInfo) -> str:
    if get_origin(field.annotation) is Literal:
        return ", ".join(str(choice) for choice in get_args(field.annotation))
    if field.annotation is bool:
        return "true, false"
    found = []
    for constraint in field.metadata:
        found += [
            f"{sign} {_value(getattr(constraint, key))}"
            for key, sign in BOUNDS.items()
            if getattr(constraint, key, None) is not None
        ]
    return ", ".join(found)


def commands_of(command: TyperGroup | TyperCommand, name: str) -> Iterator[tuple[str, TyperCommand]]:
    """The commands under `command` that do something, with their full names."""
    if isinstance(command, TyperCommand):
        yield name, command
        return
    for child, below in command.commands.items():
        if getattr(below, "hidden", False):
            continue
        assert isinstance(below, TyperGroup | TyperCommand)
        yield from commands_of(below, f"{name} {child}")


def _command(name: str, command: TyperCommand) -> Iterator[str]:
    names = [argument_name(param) for param in command.params if isinstance(param, TyperArgument)]
    yield f"### `{' '.join([name, *names])}`"
    yield ""
    yield (command.help or "").strip()
    yield ""
    heads = ("argument or flag", "default", "environment variable", "what it is")
    yield from table(heads, (_parameter(param) for param in command.params))
    yield ""


def _parameter(param: object) -> tuple[str, ...]:
    assert isinstance(param, TyperArgument | TyperOption)
    flags = ", ".join([*param.opts, *param.secondary_opts]) if isinstance(param, TyperOption) else argument_name(param)
    variable = param.envvar if isinstance(param.envvar, str) else ""
    default = "required" if param.required else _default(param.default)
    if isinstance(param, TyperOption) and isinstance(param.show_default, str):
        default = param.show_default  # it depends on other options
    return code(flags), default, code(variable), param.help or ""


def argument_name(argument: TyperArgument) -> str:
    """PREFIX; in brackets where it may be left out."""
    return argument.metavar or str(argument.name).upper()


def targets(makefile: str) -> list[tuple[str, str]]:
    """(target, what it does) of every target with a `##` comment, in the file's order."""
    return re.findall(r"^([a-z][a-z-]*):.*?## (.*)$", makefile, re.MULTILINE)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """A Markdown table, line by line."""
    yield f"| {' | '.join(heads)} |"
    yield "|" + " --- |" * len(heads)
    for row in rows:
        yield f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in row)} |"


def code(text: str) -> str:
    """As code, or nothing."""
    return f"`{text}`" if text else ""


def page() -> str:
    """The whole page."""
    lines = [INTRODUCTION]
    for title, command, cls in SERVICES:
        lines += [f"## {title}", "", f"`{command}`", ""]
        rows = (
            (code(item.name), code(item.flag), code(item.variable), item.default, item.bounds, item.text)
            for item in settings_of(cls)
        )
        lines += table(("setting", "flag", "environment variable", "default", "bounds", "what it is"), rows)
        lines.append("")
    lines += ["## The `tandem` command", "", "Every command takes `--help`.", ""]
    app = typer.main.get_command(build_app())
    assert isinstance(app, TyperGroup)
    for name, below in commands_of(app, "tandem"):
        lines += _command(name, below)
    lines += ["## `make` targets", "", 'Further flags go through `ARGS`, such as `make test ARGS="-k transfer"`.', ""]
    lines += table(("target", "what it does"), ((code(name), text) for name, text in targets(_makefile())))
    return "\n".join(lines) + "\n"


def _makefile() -> str:
    return (ROOT / "Makefile").read_text(encoding="utf-8")


def main(arguments: Sequence[str] | None = None, path: Path = PAGE) -> int:
    """Exit status: 0, or 1 where the page at `path` is stale."""
    parser = argparse.ArgumentParser(description="Write or check docs/reference.md.")
    parser.add_argument("--check", action="store_true", help="only compare the page with the code")
    if not parser.parse_args(arguments).check:
        path.write_text(page(), encoding="utf-8")
        return 0
    if path.is_file() and path.read_text(encoding="utf-8") == page():
        return 0
    print(f"{path} is stale: run `python .ci/reference.py`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
