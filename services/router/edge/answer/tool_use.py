"""What a request says of tools, as far as its answer's text depends on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that an answer may call."""

    names: frozenset[str]
    named: str = ""  # the one that must be called
    required: bool = False  # some must be
    max_calls: int | None = None  # further ones are dropped
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, compare=False)
    """Schemas of the tools' arguments, by name: for formats that do not write JSON."""

    @property
    def is_forced(self) -> bool:
        """A grammar holds the answer to calls."""
        return self.required or bool(self.named)


NO_TOOLS = ToolUse(frozenset(), max_calls=0)
"""For formats that are read without tools too: calls are dropped."""
