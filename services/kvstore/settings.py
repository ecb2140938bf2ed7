"""Settings of the KV store service."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field, SecretStr
from pydantic_settings import SettingsConfigDict

from shared.config import ServiceSettings


class TenantQuota(BaseModel):
    """Most bytes that one tenant's blocks may take of each tier of this process; 0 = as much as everybody."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    host_bytes: int = Field(default=0, ge=0)
    """Of the host memory. Bytes."""
    disk_bytes: int = Field(default=0, ge=0)
    """Of the disk folder. Bytes."""


class KVStoreSettings(ServiceSettings):
    """One KV store process. Several of them over one Redis are the same store."""

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        **{**ServiceSettings.model_config, "env_prefix": "TANDEM_KVSTORE_"}
    )

    bind: str = "127.0.0.1:50070"
    """host:port to serve on; port 0 = any free one."""
    metrics: str = "127.0.0.1:0"
    """host:port of the Prometheus page, /metrics; port 0 = any free one, empty = no such page."""
    redis_url: SecretStr = SecretStr("redis://127.0.0.1:6379/0")
    """redis://, rediss:// (TLS) or unix:// URL of Redis or Valkey, with ACL user and password
    (redis://user:password@host:port/db, rediss://…?ssl_ca_certs=file). The index has that database to itself.
    Of a cluster it names some of the nodes (redis://host:port,host:port)."""
    redis_cluster: bool = False
    """Whether redis_url is a Redis Cluster."""
    redis_timeout_s: float = Field(default=0.2, gt=0, le=10)
    """Longest wait for one answer of Redis, connecting included. Seconds; below the clients' 0.25 s for a match."""
    probe_interval_s: float = Field(default=0.5, gt=0, le=60)
    """Between two looks whether Redis answers. Seconds."""
    sweep_interval_s: float = Field(default=5.0, gt=0, le=3600)
    """Between two looks whether workers fell silent or left anything to prune. Seconds."""
    lease_s: float = Field(default=60.0, ge=10, le=86_400)
    """A worker that says nothing for so long is forgotten, until it speaks again. Seconds; workers speak every 2."""
    name: str = ""
    """Of this process as a holder of blocks, where it has tiers; empty = made of host and bind."""
    host_bytes: int = Field(default=0, ge=0)
    """Host memory for blocks that the workers computed; 0 = none. Bytes."""
    disk_folder: Path | None = None
    """Where the disk tier keeps its blocks, alone; they outlive the process."""
    disk_bytes: int = Field(default=0, ge=0)
    """Of the disk folder; 0 = no disk tier. Bytes."""
    block_bytes: int = Field(default=0, ge=0, multiple_of=8)
    """Size of the workers' blocks, where it is known: memory is taken, and budgets are checked, at the start and not
    when the first worker comes. 0 = the first worker tells. Bytes."""
    tenant_quota: TenantQuota = TenantQuota()
    """Of each tenant that tenant_quotas does not name. A tenant that has used it up makes room among its own blocks."""
    tenant_quotas: dict[str, TenantQuota] = Field(default_factory=dict)
    """By tenant."""
    pin_share: float = Field(default=0.25, ge=0, le=0.9)
    """Most of each tier's budget that `tandem cache pin` may keep from being evicted."""
    staging_bytes: int = Field(default=64 << 20, ge=1 << 16)
    """Memory for blocks on their way in or out, where there are tiers; a full one makes workers keep blocks. Bytes."""
    send_bytes_per_s: float = Field(default=0.0, ge=0)
    """Most that the tiers send, for a network that others share; 0 = no limit."""
    drain_timeout_s: float = Field(default=1.0, ge=0, le=60)
    """How long running calls may take after SIGTERM. Seconds."""
