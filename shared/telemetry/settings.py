"""Settings of what services show of themselves."""

from __future__ import annotations

from shared.settings.group import SettingGroup
from shared.telemetry.tracing.settings import TracesSettings


class MetricsPageSettings(SettingGroup):
    """Settings of a service that has no HTTP port of its own."""

    metrics: str = "127.0.0.1:0"
    """host:port of the Prometheus page, /metrics, and of the probes /healthz and /readyz; port 0 = any free one, empty
    = neither."""


class VllmMetricsSettings(SettingGroup):
    """Settings of a service that has figures for which vLLM has names."""

    vllm_metrics: bool = False
    """The metrics page has what is known of vLLM's metrics under vLLM's names too, for dashboards, autoscalers and
    gateways that ask for these."""


class SpanSettings(SettingGroup):
    """Settings of a service that works on requests of a router."""

    traces: TracesSettings = TracesSettings()
    """Its spans of requests that the router traces."""
