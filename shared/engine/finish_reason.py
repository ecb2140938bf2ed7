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
