"""The API key of an HTTP request."""

from __future__ import annotations

from collections.abc import Mapping


def credentials(headers: Mapping[str, str]) -> str | None:
    """The authorization header, or Anthropic's `x-api-key` as one."""
    key = headers.get("x-api-key")
    return headers.get("authorization") or (None if key is None else f"Bearer {key}")
