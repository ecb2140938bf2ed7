"""Settings of the planner."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import ClassVar

from pydantic import Field, SecretStr
from pydantic_settings import SettingsConfigDict

from services.planner.policy.config import PlannerConfig, PoolLimits
from shared.config import ServiceSettings
from shared.errors import ConfigError
from shared.kubernetes.settings import ApiServerSettings
from shared.settings.group import SettingGroup
from shared.telemetry.settings import MetricsPageSettings
from tandem import ClientTls


class PoolSettings(SettingGroup):
    """One pool that the planner sizes."""

    name: str = ""
    """The pool's name in the chart: the planner scales the Deployment RELEASE-NAME. Empty = `prefill` or `decode`."""
    min_workers: int = Field(default=1, ge=1, le=10_000)
    """Fewest workers."""
    max_workers: int = Field(default=100, ge=1, le=10_000)
    """Most workers."""
    gpus_per_worker: int = Field(default=1, ge=1, le=1024)
    """GPUs of one worker, as gpu_budget counts them."""

    @property
    def limits(self) -> PoolLimits:
        """For the policy."""
        return PoolLimits(self.min_workers, self.max_workers, self.gpus_per_worker)


class RouterTlsSettings(SettingGroup):
    """TLS to the routers."""

    ca: Path | None = None
    """Authority in PEM that signed the certificate of the routers' APIs (their edge.tls); none = they have no TLS."""
    server_name: str = ""
    """Name that this certificate has, expected in place of a router's address, which is its Pod's. Empty = the
    address."""

    def client(self) -> ClientTls | None:
        """For connections; None without TLS. Raises ConfigError where the file is no authority's certificate."""
        if self.ca is None:
            return None
        try:
            ssl.create_default_context(cafile=str(self.ca))
        except OSError as error:
            raise ConfigError(f"setting router_tls.ca: {self.ca}: {error}", field="router_tls.ca") from error
        return ClientTls(ca=self.ca, server_name=self.server_name)


class PlannerSettings(ServiceSettings, ApiServerSettings, MetricsPageSettings):
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
    gpu_budget: int = Field(default=64, ge=1, le=1_000_000)
    """Most GPUs of both pools together; Pods that start or end count."""
    ttft_s: float = Field(default=1.0, gt=0, le=3600)
    """Target for the time to the first token. Seconds; take a boundary of the histogram
    gen_ai_server_time_to_first_token_seconds, between two of them the share is interpolated."""
    tpot_s: float = Field(default=0.05, gt=0, le=60)
    """Target for the time per output token. Seconds."""
    attainment: float = Field(default=0.95, ge=0.5, le=0.999)
    """Share of the requests that should meet both."""
    decode_sequences: float = Field(default=64.0, gt=0, le=100_000)
    """Sequences that a decode worker runs within the TPOT target, as `tandem fit` says; observations correct it."""
    start_s: float = Field(default=120.0, ge=0, le=7200)
    """Time from the decision to a worker that serves: how far the forecast looks. Seconds."""
    cold_start_s: float = Field(default=60.0, ge=0, le=7200)
    """Nothing is learnt from latencies while a worker has served for less than this. Seconds."""
    down_window_s: float = Field(default=120.0, ge=0, le=86_400)
    """A pool shrinks only to the largest size that it needed during this time. Seconds."""
    direction_s: float = Field(default=300.0, ge=0, le=86_400)
    """Least time between two changes of direction of a pool. Seconds."""
    smoothing_s: float = Field(default=90.0, gt=0, le=3600)
    """Time constant of the measured request rate. Seconds."""
    band: float = Field(default=0.08, ge=0, le=1)
    """Share of spare demand that must fit before a pool shrinks; half of it must be missing before it grows."""

    def policy(self) -> PlannerConfig:
        """The policy's constants. Raises ConfigError where both pools are one."""
        if self.pool_names[0] == self.pool_names[1]:
            raise ConfigError("prefill.name and decode.name must differ", field="decode.name", value=self.decode.name)
        return PlannerConfig(
            prefill=self.prefill.limits,
            decode=self.decode.limits,
            gpu_budget=self.gpu_budget,
            ttft_s=self.ttft_s,
            tpot_s=self.tpot_s,
            attainment=self.attainment,
            decode_sequences=self.decode_sequences,
            start_s=self.start_s,
            cold_start_s=self.cold_start_s,
            down_window_s=self.down_window_s,
            direction_s=self.direction_s,
            smoothing_s=self.smoothing_s,
            band=self.band,
        )

    @property
    def pool_names(self) -> tuple[str, str]:
        """Of prefill and decode."""
        return self.prefill.name or "prefill", self.decode.name or "decode"
