"""Commands that take a whole dataclass: each of its fields is an option."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, get_type_hints

_BY_NAME = inspect.Parameter.KEYWORD_ONLY


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """The command with a parameter for each field of its parameters that are dataclasses, in their place.

    A field's annotation is that of the option (`Annotated` with a typer.Option), its default the option's. The command
    gets the dataclass, made of the options' values.
    """
    hints = get_type_hints(command, include_extras=True)
    parts: dict[str, type] = {
        name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)
    }
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if (part := parts.get(parameter.name)) is None:
            parameters.append(parameter.replace(kind=_BY_NAME, annotation=hints[parameter.name]))
            continue
        of_fields = get_type_hints(part, include_extras=True)
        parameters += [_parameter(field, of_fields[field.name]) for field in fields(part) if field.init]

    @functools.wraps(command)
    def spread_out(**values: Any) -> None:
        for name, part in parts.items():
            values[name] = part(**{field.name: values.pop(field.name) for field in fields(part) if field.init})
        command(**values)

    spread_out.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spread_out.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return spread_out


def _parameter(field: Field[Any], annotation: object) -> inspect.Parameter:
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    return inspect.Parameter(field.name, _BY_NAME, default=default, annotation=annotation)
