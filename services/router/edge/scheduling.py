"""Scheduling hints of a client: the same names as HTTP headers and as gRPC metadata.

    x-tenant            whose share it counts against; prefixes are shared between tenants only where the settings
                        say so. Default: the tenant that the API key speaks for, else "default"
    x-priority          -100..100, higher first where the queue is ordered by priority. Default 0
    x-session-id        the turns of one conversation share it
    x-cache-retention   5m, 1h or 24h: how long its prefix is kept after each use, where there is room for that.
                        Default in-memory: as long as nothing newer takes its place
    x-next-turn-ms      with a retention: the session's next request comes so long after this one's answer, so that what
                        is retained for sessions that come back later is evicted first. Default: as its earlier pauses
    x-ttft-timeout-ms   the first token is due so soon; 429 at once where that cannot be. Default: the router's target

A tenant's own API key determines the tenant; without one, a trusted proxy sets `x-tenant` and drops what came from
outside.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shared.errors import InvalidRequest, Unauthenticated

MAX_NAME_LEN = 128
MAX_PRIORITY = 100
TIERS = {"flex": -50, "priority": 50}
"""Priority of OpenAI's `service_tier`; the others are 0."""
BATCH_PRIORITY = -100
"""Priority of a batch's requests."""
MAX_NEXT_TURN_S = 86_400.0
RETENTIONS = {"in-memory": 0.0, "in_memory": 0.0, "5m": 300.0, "1h": 3600.0, "24h": 86_400.0}
"""Seconds of OpenAI's `prompt_cache_retention` and Anthropic's `cache_control.ttl`."""


@dataclass(frozen=True, slots=True)
class SchedulingHints:
    """The scheduling headers of a call, parsed."""

    tenant: str = "default"
    priority: int = 0
    session: str = ""
    ttft_timeout_s: float = 0.0  # 0 = the router's target
    retain_s: float = 0.0
    next_turn_s: float | None = None  # None: not said


def scheduling_hints(headers: Mapping[str, str], tenant: str = "") -> SchedulingHints:
    """Reads them; raises InvalidRequest naming the header, Unauthenticated for a tenant that is not `tenant`, where the
    key speaks for that one."""
    named = _name(headers, "x-tenant")
    if tenant and named and named != tenant:
        raise Unauthenticated(f"the API key does not speak for tenant {named!r}", field="x-tenant")
    return SchedulingHints(
        tenant=tenant or named or "default",
        priority=_priority(headers.get("x-priority", "0")),
        session=_name(headers, "x-session-id"),
        ttft_timeout_s=_timeout_s(headers.get("x-ttft-timeout-ms", "")),
        retain_s=_retention_s(headers.get("x-cache-retention", "in-memory")),
        next_turn_s=_next_turn_s(headers.get("x-next-turn-ms", "")),
    )


def is_visible_ascii(text: str) -> bool:
    """Whether all characters are printable ASCII and none is a space."""
    return text.isascii() and text.isprintable() and " " not in text


def _name(headers: Mapping[str, str], header: str) -> str:
    value = headers.get(header, "")
    if len(value) > MAX_NAME_LEN or not is_visible_ascii(value):
        raise InvalidRequest(
            f"{header} must be at most {MAX_NAME_LEN} printable ASCII characters without spaces",
            field=header,
            limit=MAX_NAME_LEN,
        )
    return value


def _priority(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = MAX_PRIORITY + 1
    if abs(value) > MAX_PRIORITY:
        raise InvalidRequest(
            f"x-priority must be a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}, got {text[:32]!r}",
            field="x-priority",
            limit=MAX_PRIORITY,
        )
    return value


def _retention_s(text: str) -> float:
    if text not in RETENTIONS:
        raise InvalidRequest(
            f"x-cache-retention must be one of {', '.join(RETENTIONS)}, got {text[:32]!r}", field="x-cache-retention"
        )
    return RETENTIONS[text]


def check_next_turn(field: str, value: float, unit_s: float) -> None:
    """Raises InvalidRequest naming the field unless it is from 0 to a day; `unit_s`: 1 for seconds."""
    limit = MAX_NEXT_TURN_S / unit_s
    if not 0 <= value <= limit:
        raise InvalidRequest(
            f"{field} must be a time from now, at most a day ({limit:.0f}), got {value:g}", field=field, limit=limit
        )


def _next_turn_s(text: str) -> float | None:
    if not text:
        return None
    value = number_of(text)
    check_next_turn("x-next-turn-ms", value, 1e-3)
    return value / 1e3


def number_of(text: str) -> float:
    """The number that a header or a parameter gives; NaN, which no bound admits, where it gives none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _timeout_s(text: str) -> float:
    if not text:
        return 0.0
    value = number_of(text)
    if not 0 < value <= 86_400_000:
        raise InvalidRequest(
            f"x-ttft-timeout-ms must be milliseconds above 0, at most a day, got {text[:32]!r}",
            field="x-ttft-timeout-ms",
            limit=86_400_000,
        )
    return value / 1e3
