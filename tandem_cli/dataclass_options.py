"""Commands that take a whole group of options: each field of a dataclass, or of settings, is an option."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer
from pydantic.fields import FieldInfo

from shared.settings.group import SettingGroup, option_names

_BY_NAME = inspect.Parameter.KEYWORD_ONLY


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """The command with a parameter for each field of its parameters that are groups, in their place.

    A dataclass's field has the option as its annotation (`Annotated` with a typer.Option); of settings the docstring is
    the help, and bounds are checked where the settings are built. The default is the option's. The command gets the
    groups, made of the options' values; where it takes the `context`, settings whose option was not given are left out.
    """
    hints = get_type_hints(command, include_extras=True)
    parts = {name: hint for name, hint in hints.items() if isinstance(hint, type) and _is_group(hint)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if (part := parts.get(parameter.name)) is None:
            parameters.append(parameter.replace(kind=_BY_NAME, annotation=hints[parameter.name]))
        else:
            parameters += _options_of(part)

    @functools.wraps(command)
    def spread_out(**values: Any) -> None:
        for name, part in parts.items():
            given = {option.name: values.pop(option.name) for option in _options_of(part)}
            if issubclass(part, SettingGroup) and (context := values.get("context")) is not None:
                given = {option: value for option, value in given.items() if _is_given(context, option)}
            values[name] = part(**{option: value for option, value in given.items() if value is not None})
        command(**values)

    spread_out.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spread_out.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return spread_out


def _is_given(context: typer.Context, option: str) -> bool:
    source = context.get_parameter_source(option)
    return source is None or source.name != "DEFAULT"


def _is_group(hint: type) -> bool:
    return is_dataclass(hint) or issubclass(hint, SettingGroup)


def _options_of(group: Any) -> list[inspect.Parameter]:
    if issubclass(group, SettingGroup):
        return [_setting(option, group.model_fields[name]) for option, name in option_names(group).items()]
    hints = get_type_hints(group, include_extras=True)
    return [_field(field, hints[field.name]) for field in fields(group) if field.init]


def _field(field: Field[Any], annotation: object) -> inspect.Parameter:
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    return inspect.Parameter(field.name, _BY_NAME, default=default, annotation=annotation)


def _setting(option: str, field: FieldInfo) -> inspect.Parameter:
    """A default that other settings decide is none of the option's: its function's docstring says what it is."""
    annotation: Any = field.annotation
    default = field.default
    shown: bool | str = True
    if field.default_factory is not None:
        annotation, default = annotation | None, None
        shown = inspect.getdoc(field.default_factory) or True
    # What is off by default needs no flag that says so.
    flags = [f"--{option.replace('_', '-')}"] if default is False else []
    help_text = " ".join((field.description or "").split())
    annotated = Annotated[annotation, typer.Option(*flags, help=help_text, show_default=shown)]
    return inspect.Parameter(option, _BY_NAME, default=default, annotation=annotated)
