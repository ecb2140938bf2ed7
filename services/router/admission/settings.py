"""Settings of the admission queue, a part of the router's."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Weight = Annotated[float, Field(gt=0, le=1e6)]


class AdmissionSettings(BaseModel):
    """Who waits, how many, and who goes first."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    order: Literal["fcfs", "shortest", "priority", "deadline"] = "fcfs"
    """Who goes first within a tenant: by arrival, uncached prompt tokens, the request's priority, or TTFT deadline."""
    max_bytes: int = Field(default=1 << 30, ge=1 << 20)
    """Most memory that waiting prompts may take, bytes."""
    ttft_target_s: float = Field(default=0.0, ge=0.0, le=86400.0)
    """The first token is due so long after arrival; what is predicted to miss it is refused at once. 0 = no target.
    A client's own target, shorter or longer, wins. Seconds."""
    late_idle_share: float = Field(default=0.25, ge=0.0, le=2.0)
    """A prompt too long to meet the target on any worker is served late while nobody waits and this share of the
    workers is idle, else refused; above 1: always refused. Where the client set the target, it is refused."""
    late_grace: float = Field(default=0.0, ge=0.0, le=100.0)
    """A request that was let in, and against all predictions could not be started in time, is served late, by up to
    this share of its target, and only then refused. Who has waited then gets an answer, but after a sudden rush many
    late ones keep the workers from those that could be in time. Where the client set the target, it is never late."""
    tenant_weights: dict[str, Weight] = Field(default_factory=dict)
    """Tenants' shares where several wait, {"tenant": 2.0}; one that is not named has 1."""
