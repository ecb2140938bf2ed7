"""A group of settings: frozen values, of which a field's annotation has the bounds and its docstring the meaning.

A setting that several services have is a field of one group that their settings inherit, so that its unit, bounds,
default and help are written once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self, get_args

from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from shared.errors import ConfigError


class SettingGroup(BaseModel):
    """A part of a service's settings, read and checked with the whole."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    def values_of(self, group: type[BaseModel]) -> dict[str, Any]:
        """The values of the fields that `group` has too, by name."""
        return {name: getattr(self, name) for name in group.model_fields}


class CheckedGroup(SettingGroup):
    """Settings that code builds itself: a bad value is a ConfigError that names the field, as one of a service is."""

    def __init__(self, **values: Any) -> None:
        """Values by the fields' names, or by those that users have for them. Raises ConfigError."""
        users = {name: option for option, name in option_names(type(self)).items()}
        try:
            super().__init__(**{users.get(name, name): value for name, value in values.items()})
        except ValidationError as error:
            raise setting_error(type(self), error) from None

    def replace(self, **changes: Any) -> Self:
        """A copy with these values in place of its own, checked as a new one. Raises ConfigError."""
        return type(self)(**self.values_for(type(self)) | changes)

    def values_for(self, other: type[BaseModel]) -> dict[str, Any]:
        """The values, by name, that make one of `other` with the fields that both have. Left out is what was not given
        and is the default there too, so that it counts as not given there either."""
        shared = type(self).model_fields.keys() & other.model_fields.keys()
        values = {name: getattr(self, name) for name in other.model_fields if name in shared}
        given = self.model_fields_set
        return {name: v for name, v in values.items() if name in given or v != other.model_fields[name].default}


def option_names(group: type[BaseModel]) -> dict[str, str]:
    """What users call each field, which differs from its name in code where that counts something; and that name."""
    return {str(field.validation_alias or name): name for name, field in group.model_fields.items()}


def setting_error(cls: type[BaseModel], error: ValidationError) -> ConfigError:
    """The first error as one that names the setting, with its value where that is no secret."""
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"]) or cls.__name__
    value = first.get("input")
    shown = f" (got {value!r})" if _may_show(cls, first["loc"], value) else ""
    return ConfigError(f"setting {name}: {first['msg']}{shown}", field=name)


def values_in_common(values: BaseModel, other: type[BaseModel]) -> dict[str, Any]:
    """The values that were given, of the fields that `other` inherits from the same groups."""
    groups = set(type(values).__mro__) & set(other.__mro__)
    names = {name for group in groups if issubclass(group, SettingGroup) for name in group.model_fields}
    fields = type(values).model_fields
    return {name: getattr(values, name) for name in fields if name in names & values.model_fields_set}


def _may_show(cls: type[BaseModel], loc: Sequence[int | str], value: object) -> bool:
    """Whether an error may quote the value at `loc`: not where it is secret or may hold what is.

    Secret are fields of type SecretStr and those with `repr=False`. Quoted are plain values of known fields alone.
    """
    if isinstance(value, Mapping | Sequence) and not isinstance(value, str):
        return False
    model: type[BaseModel] | None = cls
    field: FieldInfo | None = None
    for part in loc:
        if model is None:  # an entry of a list or mapping of plain values, or a member of a union
            continue
        field = _field(model, str(part))
        if field is None:
            return False
        if not field.repr or SecretStr in (field.annotation, *get_args(field.annotation)):
            return False
        annotation: object = field.annotation
        model = annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
        if any(map(_is_model, get_args(field.annotation))):  # a mapping of objects
            return False
    return field is not None and model is None


def _field(model: type[BaseModel], name: str) -> FieldInfo | None:
    """By the name that an error has, which is a field's alias where it has one."""
    fields = model.model_fields
    return fields.get(name) or next((field for field in fields.values() if field.validation_alias == name), None)


def _is_model(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
