"""Typed reading of the JSON files of a model folder; every error names the file and the field."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from shared.errors import ModelLoadError
from shared.model.config.folder import check_is_content

_MOST = sys.float_info.max
_MOST_INTEGER = 2**31 - 1


def read_json_object(path: Path) -> dict[str, object]:
    """Read a JSON object.

    Raises:
        ModelLoadError: the file is missing, not JSON, too deep, or not an object; `file` names it.
    """
    check_is_content(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path.name} is missing from the model folder {path.parent}", file=path.name) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {error}", file=path.name) from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds {type(value).__name__}, expected a JSON object", file=path.name)
    return value


class JsonFields:
    """One JSON object with typed access. Null counts as absent; without a default, absence is an error."""

    def __init__(
        self, values: Mapping[str, object], source: str, prefix: str = "", spelled: Mapping[str, str] | None = None
    ) -> None:
        """`source` is the file named in errors, `prefix` this object's path in it, such as `rope.`; `spelled`: the
        file's own names of some fields."""
        self._values = values
        self._source = source
        self._prefix = prefix
        self._spelled = spelled or {}

    @property
    def names(self) -> tuple[str, ...]:
        """All fields, in the file's order."""
        return tuple(self._values)

    def __contains__(self, name: str) -> bool:
        """Whether the field is present, also if null."""
        return name in self._values

    def has(self, name: str) -> bool:
        """Whether the field is present and not null."""
        return self._values.get(name) is not None

    def fault(self, name: str, problem: str) -> ModelLoadError:
        """An error about this field, to be raised by the caller."""
        field = f"{self._prefix}{self._spelled.get(name, name)}"
        return ModelLoadError(f"{self._source}: {field} {problem}", field=field, file=self._source)

    def raw(self, name: str) -> object:
        """What the file has, of any type; None where absent."""
        return self._values.get(name)

    def integer(self, name: str, default: int | None = None, minimum: int = 1, maximum: int = _MOST_INTEGER) -> int:
        """An integer of at least `minimum` and at most `maximum`."""
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.fault(name, f"must be an integer, found {value!r}")
        if value < minimum:
            raise self.fault(name, f"must be at least {minimum}, found {value}")
        if value > maximum:
            raise self.fault(name, f"must be at most {maximum}, found {value}")
        return value

    def optional_integer(self, name: str, minimum: int = 1) -> int | None:
        """An integer of at least `minimum`, or None where absent or null."""
        return self.integer(name, minimum=minimum) if self.has(name) else None

    def number(self, name: str, default: float | None = None, maximum: float = _MOST) -> float:
        """A finite number above zero, of at most `maximum`."""
        value = self._get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.fault(name, f"must be a number, found {value!r}")
        if not 0 < value <= _MOST:
            raise self.fault(name, f"must be a finite number above zero, found {value}")
        if value > maximum:
            raise self.fault(name, f"must be at most {maximum:.15g}, found {value}")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """A finite number above zero, or None where absent or null."""
        return self.number(name) if self.has(name) else None

    def boolean(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.fault(name, f"must be true or false, found {value!r}")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.fault(name, f"must be a string, found {value!r}")
        return value

    def optional_text_list(self, name: str) -> list[str] | None:
        """A list of strings, or None where absent or null."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.fault(name, f"must be a list of strings, found {value!r}")
        return list(value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """A token id, a list of them, or nothing (null or absent gives an empty tuple)."""
        value = self._values.get(name)
        if value is None:
            return ()
        items = value if isinstance(value, list) else [value]
        for item in items:
            if not isinstance(item, int) or isinstance(item, bool) or item < 0:
                raise self.fault(name, f"must be a token id or a list of them, found {value!r}")
        return tuple(items)

    def indices(self, name: str) -> tuple[int, ...]:
        """A list of integers of at least zero; nothing where null or absent."""
        value = self._values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
            raise self.fault(name, f"must be a list of integers of at least 0, found {value!r}")
        return tuple(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of finite numbers above zero."""
        value = self._get(name, None)
        if not isinstance(value, list) or not all(type(item) in (int, float) and 0 < item <= _MOST for item in value):
            raise self.fault(name, f"must be a list of finite numbers above zero, found {value!r}")
        return tuple(float(item) for item in value)

    def child(self, name: str) -> JsonFields | None:
        """A nested object, or None where absent or null."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fault(name, f"must be an object, found {value!r}")
        return JsonFields(value, self._source, f"{self._prefix}{name}.")

    def with_defaults(self, other: JsonFields, names: Sequence[str]) -> JsonFields:
        """These fields, and `other`'s of these names where they are absent here."""
        taken = {name: other._values[name] for name in names if not self.has(name) and other.has(name)}
        return JsonFields({**self._values, **taken}, self._source, self._prefix)

    def replaced_by(self, other: JsonFields, names: Sequence[str]) -> JsonFields:
        """These fields, but `other`'s of these names where it has them."""
        taken = {name: other._values[name] for name in names if other.has(name)}
        return JsonFields({**self._values, **taken}, self._source, self._prefix)

    def with_values(self, values: Mapping[str, object]) -> JsonFields:
        """These fields, and `values` where they are absent here, not null."""
        return JsonFields({**values, **self._values}, self._source, self._prefix, self._spelled)

    def respelled(self, names: Mapping[str, Sequence[str]]) -> JsonFields:
        """The same fields, for a file that spells some names in another way: under each name that is asked for, the
        first of the file's spellings that is there, or else that name itself."""
        found = {
            name: self._values[spelling]
            for name, spellings in names.items()
            for spelling in reversed(spellings)
            if self._values.get(spelling) is not None
        }
        spelled = {name: spellings[0] for name, spellings in names.items() if name in found or name not in self._values}
        return JsonFields({**self._values, **found}, self._source, self._prefix, spelled)

    def _get(self, name: str, default: object) -> object:
        value = self._values.get(name)
        if value is not None:
            return value
        if default is None:
            raise self.fault(name, "is missing")
        return default
