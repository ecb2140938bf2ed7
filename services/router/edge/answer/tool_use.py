"""What a request says of tools, as far as its answer's text depends on it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that an answer may call."""

    names: frozenset[str]
    named: str = ""  # the one that must be called
    required: bool = False  # some must be
    max_calls: int | None = None  # further ones are dropped

    @property
    def is_forced(self) -> bool:
        """A grammar holds the answer to calls."""
        return self.required or bool(self.named)


NO_TOOLS = ToolUse(frozenset(), max_calls=0)
"""For formats that are read without tools too: calls are dropped."""
