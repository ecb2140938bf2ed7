"""Limits on what one client may send, hold and be sent: `edge.limits`, a part of the router's settings."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class LimitSettings(BaseModel):
    """Bounds that hold before a request reaches the queue."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    max_chars_per_token: int = Field(default=16, ge=1, le=1024)
    """A text longer than this times the served context is refused before it is tokenized. Characters; where the
    vocabulary's longest token is shorter, that counts. English has about 4.5 characters a token."""

    tokenizer_threads: int = Field(default=2, ge=1, le=64)
    """Long texts that are tokenized at the same time; others wait for a thread."""
