"""Settings of the admission queue, a part of the router's."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shared.settings.group import SettingGroup

Weight = Annotated[float, Field(gt=0, le=1e6)]


class QueueSettings(SettingGroup):
    """How long the queue may be, and how often a request is tried: among the router's own settings."""

    queue_limit: int = Field(default=1024, ge=1)
    """Most requests that may wait for a worker."""
    queue_timeout_s: float = Field(default=60.0, gt=0)
    """A request that waited longer than this is refused. Seconds."""
    max_attempts: int = Field(default=3, ge=1, le=16)
    """Attempts at one request that may fail one after another without a new token before the request fails."""


class AdmissionSettings(SettingGroup):
    """Bounds and order of the admission queue: the router's `admission`."""

    order: Literal["fcfs", "shortest", "priority", "deadline"] = "priority"
    """Order within a tenant: by arrival (fcfs), uncached prompt tokens, the request's priority and then arrival, or
    TTFT deadline. Where no request names a priority or a `service_tier`, priority is the order of arrival."""
    max_bytes: int = Field(default=1 << 30, ge=1 << 20)
    """Most memory for waiting prompts, bytes."""
    ttft_target_s: float = Field(default=0.0, ge=0.0, le=86400.0)
    """TTFT target in seconds from arrival; a request predicted to miss it is refused at once. 0 = no target. A client's
    own target, shorter or longer, takes precedence."""
    late_grace: float = Field(default=0.0, ge=0.0, le=100.0)
    """An admitted request that could not be started in time is served late, by up to this share of its target, and is
    refused only beyond that. Clients that have waited then get an answer, but after a sudden burst many late requests
    take workers from those that could be in time. If the client set the target, it is never late."""
    tenant_weights: dict[str, Weight] = Field(default_factory=dict)
    """Shares of tenants when several wait, {"tenant": 2.0}; others have 1."""
