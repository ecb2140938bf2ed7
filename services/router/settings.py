"""Settings of the router."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.router.edge.settings import EdgeSettings
from shared.config import ServiceSettings
from shared.errors import ConfigError


class RouterSettings(ServiceSettings):
    """One router replica. The environment prefix is TANDEM_ROUTER_."""

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        **{**ServiceSettings.model_config, "env_prefix": "TANDEM_ROUTER_"}
    )

    name: str = "router-0"
    """Unique among the routers of a cluster."""
    http: str = "127.0.0.1:8000"
    """host:port of the OpenAI API."""
    grpc: str = "127.0.0.1:50051"
    """host:port of the gRPC API."""
    model: Path
    """Model folder; the router reads its tokenizer and chat template."""
    served_model_name: str = ""
    """The name that clients ask for; empty = the folder's name."""
    prefill: str = ""
    """Prefill workers, name=host:port, comma-separated."""
    decode: str
    """Decode workers, name=host:port, comma-separated."""
    kvstore: str = ""
    """host:port of the KV store; empty = place prompts without an index."""
    mode: Literal["disaggregated", "collocated"] = "disaggregated"
    """collocated: the decode workers prefill too, as in an ordinary serving system."""
    queue_limit: int = Field(default=1024, ge=1)
    """Most requests that may wait for a worker."""
    queue_timeout_s: float = Field(default=60.0, gt=0)
    """A request that waited so long is refused. Seconds."""
    max_queued_tokens: int = Field(default=2048, ge=1)
    """A prefill worker gets more work while it has fewer tokens than this to compute."""
    max_attempts: int = Field(default=3, ge=1, le=16)
    """Times a request is tried when workers are lost under it."""
    edge: EdgeSettings = EdgeSettings()
    """What the front doors let in."""


def parse_workers(text: str, field: str) -> dict[str, str]:
    """`a=host:1,b=host:2` as a mapping; raises ConfigError naming the field."""
    workers: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, equals, address = entry.partition("=")
        host, colon, port = address.rpartition(":")
        if not (name and equals and host and colon and port.isdigit()):
            raise ConfigError(f"{field}: {entry!r} is not name=host:port", field=field)
        if name in workers:
            raise ConfigError(f"{field}: worker {name!r} is named twice", field=field)
        workers[name] = address
    return workers
