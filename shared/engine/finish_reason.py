"""Why a request ended."""

from __future__ import annotations

from enum import Enum


class FinishReason(Enum):
    """The values are those of OpenAI's `finish_reason`; `cancelled` is Tandem's own."""

    STOP = "stop"
    """An end token, a stop token id or a stop string."""
    LENGTH = "length"
    """`max_tokens` or the end of the context."""
    CANCELLED = "cancelled"

    __hash__ = object.__hash__  # a key of tables that are read for each token: Enum's own is written in Python
