"""Settings of the planner."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import ClassVar

from pydantic import Field, SecretStr
from pydantic_settings import SettingsConfigDict

from services.planner.policy.config import PlannerConfig, PolicySettings, PoolLimits
from shared.config import ServiceSettings
from shared.errors import ConfigError
from shared.kubernetes.settings import ApiServerSettings
from shared.settings.group import SettingGroup
from shared.telemetry.settings import MetricsPageSettings
from tandem import ClientTls


class PoolSettings(PoolLimits):
    """One pool that the planner sizes."""

    name: str = ""
    """The pool's name in the chart: the planner scales the Deployment RELEASE-NAME. Empty = `prefill` or `decode`; of
    `auto` there is then none."""


class RouterTlsSettings(SettingGroup):
    """TLS to the routers."""

    ca: Path | None = None
    """Authority in PEM that signed the certificate of the routers' APIs (their edge.tls); none = they have no TLS."""
    server_name: str = ""
    """Name that this certificate has, expected in place of a router's address, which is its Pod's. Empty = the
    address."""

    def client(self) -> ClientTls | None:
        """The TLS context for connections; None without TLS. Raises ConfigError where the file is no authority's
        certificate."""
        if self.ca is None:
            return None
        try:
            ssl.create_default_context(cafile=str(self.ca))
        except OSError as error:
            raise ConfigError(f"setting router_tls.ca: {self.ca}: {error}", field="router_tls.ca") from error
        return ClientTls(ca=self.ca, server_name=self.server_name)


class PlannerSettings(ServiceSettings, ApiServerSettings, MetricsPageSettings, PolicySettings):
    """The planner of one release. The environment prefix is TANDEM_PLANNER_."""

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        **{**ServiceSettings.model_config, "env_prefix": "TANDEM_PLANNER_"}
    )

    release: str = Field(min_length=1, max_length=53)
    """Name of the release: its Deployments, its Pods' label app.kubernetes.io/instance, its Lease RELEASE-planner."""
    identity: str = ""
    """Unique among the release's planners; empty = the host's name, which is the Pod's, and random letters."""
    api_key: SecretStr = SecretStr("")
    """Admin API key of the routers, by which the planner reads their status and drains workers. Best given by the
    environment. Empty = none, where routers ask for none."""
    router_tls: RouterTlsSettings = RouterTlsSettings()
    """TLS to the routers."""
    dry_run: bool = False
    """Decide, log and count, but change nothing."""
    interval_s: float = Field(default=10.0, ge=0.05, le=300)
    """Time between two decisions. Seconds."""
    timeout_s: float = Field(default=5.0, gt=0, le=60)
    """Longest wait for an answer of a router, a worker or the API server. Seconds."""
    drain_timeout_s: float = Field(default=600.0, ge=0, le=86_400)
    """A drained worker that still runs requests after this time is removed all the same; it ends them within the grace
    period of its Pod. Seconds."""
    lease_s: float = Field(default=15.0, ge=1, le=300)
    """Another planner takes over when the leader has not renewed its Lease for this long. Seconds. The leader renews
    it every fifth of that, and acts no more once it has not managed to for two thirds."""
    prefill: PoolSettings = PoolSettings()
    """The prefill pool."""
    decode: PoolSettings = PoolSettings()
    """The decode pool."""
    auto: PoolSettings = PoolSettings()
    """The elastic pool, whose workers prefill and decode: named, it is sized in place of the other two."""

    def policy(self) -> PlannerConfig:
        """The policy's constants. Raises ConfigError where both pools are one, or where there are others beside an
        elastic one."""
        if self.auto.name:
            for name, pool in (("prefill", self.prefill), ("decode", self.decode)):
                if pool.name:
                    raise ConfigError(
                        f"auto.name and {name}.name are both set: an elastic pool is sized alone",
                        field=f"{name}.name", value=pool.name,
                    )  # fmt: skip
            return PlannerConfig(decode=self.auto, is_elastic=True, **self.values_of(PolicySettings))
        if self.pool_names[0] == self.pool_names[1]:
            raise ConfigError("prefill.name and decode.name must differ", field="decode.name", value=self.decode.name)
        return PlannerConfig(prefill=self.prefill, decode=self.decode, **self.values_of(PolicySettings))

    @property
    def pool_names(self) -> tuple[str, str]:
        """Names of the prefill and the decode pool; an elastic pool is the second alone, and the first is empty."""
        if self.auto.name:
            return "", self.auto.name
        return self.prefill.name or "prefill", self.decode.name or "decode"
