"""Settings of the KV store service."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field, SecretStr
from pydantic_settings import SettingsConfigDict

from shared.config import ServiceSettings
from shared.rpc.fleet_settings import FleetSettings
from shared.settings.common import EncryptionSettings
from shared.settings.group import SettingGroup
from shared.telemetry.settings import MetricsPageSettings, SpanSettings


class TenantQuota(SettingGroup):
    """Most bytes of one tenant's blocks in each tier of this process; 0 = no limit but the tier's."""

    host_bytes: int = Field(default=0, ge=0)
    """In host memory. Bytes."""
    disk_bytes: int = Field(default=0, ge=0)
    """In the disk folder. Bytes."""


class RecordSettings(SettingGroup):
    """Kept responses and conversations, in Redis beside the index."""

    max_bytes: int = Field(default=256 << 20, ge=1 << 16)
    """Most bytes of all; what was used longest ago makes room. Bytes."""
    tenant_bytes: int = Field(default=64 << 20, ge=1 << 16)
    """Most bytes of one tenant's. Bytes."""


class KVStoreSettings(ServiceSettings, FleetSettings, EncryptionSettings, MetricsPageSettings, SpanSettings):
    """One KV store process. Several of them over one Redis are the same store."""

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        **{**ServiceSettings.model_config, "env_prefix": "TANDEM_KVSTORE_"}
    )

    bind: str = "127.0.0.1:50070"
    """host:port to serve on; port 0 = any free port."""
    redis_url: SecretStr = SecretStr("redis://127.0.0.1:6379/0")
    """redis://, rediss:// (TLS) or unix:// URL of Redis or Valkey, with ACL user and password
    (redis://user:password@host:port/db, rediss://…?ssl_ca_certs=file). No other program may use that database.
    For a cluster, some of its nodes (redis://host:port,host:port)."""
    redis_password: SecretStr = SecretStr("")
    """Password for Redis, where redis_url names none; best given by the environment. Empty = that of redis_url."""
    redis_cluster: bool = False
    """Whether redis_url is a Redis Cluster."""
    redis_timeout_s: float = Field(default=0.2, gt=0, le=10)
    """Longest wait for an answer of Redis, connecting included. Seconds; below the clients' 0.25 s for a match."""
    lease_s: float = Field(default=60.0, ge=10, le=86_400)
    """A worker silent for this long is forgotten until it publishes again. Seconds; workers send every 2 s."""
    name: str = ""
    """Name of this process as a holder of blocks, if it has tiers; empty = derived from host name and bind."""
    host_bytes: int = Field(default=0, ge=0)
    """Size of the host memory tier; 0 = none. Bytes."""
    disk_folder: Path | None = None
    """Folder of the disk tier, used by this process alone unless disk_shared; the blocks outlive the process."""
    disk_bytes: int = Field(default=0, ge=0)
    """Size of the disk tier; 0 = none. Bytes."""
    disk_shared: bool = False
    """Whether disk_folder is on a file system that several store nodes mount. Each then keeps disk_bytes in a folder of
    its own there, which has the node's name, and serves what any of them stored, also of nodes that are gone. Needs a
    file system with locks, such as NFS 4."""
    block_bytes: int = Field(default=0, ge=0, multiple_of=8)
    """Size of the workers' blocks, if known: then memory is allocated and budgets are checked at the start, not when
    the first worker connects. 0 = taken from the first worker. Bytes."""
    tenant_quota: TenantQuota = TenantQuota()
    """Quota of tenants that tenant_quotas does not name. A tenant at its quota evicts its own blocks."""
    tenant_quotas: dict[str, TenantQuota] = Field(default_factory=dict)
    """Quotas by tenant."""
    records: RecordSettings = RecordSettings()
    """Responses and conversations that routers keep."""
    pin_share: float = Field(default=0.25, ge=0, le=0.9)
    """Share of each tier's budget that `tandem cache pin` may protect from eviction."""
    staging_bytes: int = Field(default=64 << 20, ge=1 << 16)
    """Memory for blocks in transfer, if there are tiers. While it is full, offers are declined and fetches wait.
    Bytes."""
    send_bytes_per_s: float = Field(default=0.0, ge=0)
    """Most bytes a second that the tiers send, to spare a shared network; 0 = no limit."""
    drain_timeout_s: float = Field(default=1.0, ge=0, le=60)
    """Time for running calls to end after SIGTERM. Seconds."""
