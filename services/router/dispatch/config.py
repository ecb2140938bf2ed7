"""Limits of the dispatcher, without anything that it is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DispatchConfig:
    """Limits of the core."""

    collocated: bool = False
    queue_limit: int = 1024
    queue_limit_bytes: int = 1 << 30
    queue_timeout_s: float = 60.0
    order: str = "fcfs"
    """One of `ORDERS`."""
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    ttft_target_s: float = 0.0
    """Seconds from arrival within which the first token is due, unless the client sets its own; 0 = no deadline."""
    late_idle_share: float = 0.25
    """See `may_be_late`."""
    late_grace: float = 0.0
    """See `AdmissionController`."""
    max_attempts: int = 3
    """Attempts that may fail one after another without a new token before the request fails."""
    worker_timeout_s: float = 120.0
    """Net beneath the protocol: a worker silent about a request for this long, in seconds, has lost it."""
