"""Settings of traces. The standard OTEL_* variables set them too: see `standard_variables.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator

from shared.settings.group import SettingGroup

Protocol = Literal["auto", "grpc", "http/protobuf"]

HTTP_PORT = 4318
"""OTLP's usual port for HTTP; that for gRPC is 4317."""


class TracesSettings(SettingGroup):
    """Where a service's spans go."""

    endpoint: str = ""
    """URL of an OpenTelemetry collector that takes OTLP, such as http://127.0.0.1:4317; https:// for TLS. Empty = no
    traces. OTEL_EXPORTER_OTLP_TRACES_ENDPOINT and OTEL_EXPORTER_OTLP_ENDPOINT set it too."""
    protocol: Protocol = "auto"
    """How it is spoken to. auto: http/protobuf where the URL has a path or port 4318, else grpc. The path /v1/traces is
    added where there is none."""
    headers: SecretStr = SecretStr("")
    """Sent with each export, such as `authorization=Bearer …`: name=value, comma-separated, values percent-encoded."""
    certificate: Path | None = None
    """File with the authorities that https:// endpoints are checked against; unset = the usual ones."""

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, value: str) -> str:
        if not value:
            return value
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError("must be http://host:port or https://host:port")
        _ = parts.port  # raises ValueError where it is none
        return value

    @field_validator("headers")
    @classmethod
    def _check_headers(cls, value: SecretStr) -> SecretStr:
        if any("=" not in item for item in filter(None, value.get_secret_value().split(","))):
            raise ValueError("must be name=value, comma-separated")
        return value

    @property
    def speaks_http(self) -> bool:
        """Whether exports are HTTP requests; else gRPC calls."""
        parts = urlsplit(self.endpoint)
        if self.protocol == "auto":
            return parts.port == HTTP_PORT or parts.path.strip("/") != ""
        return self.protocol == "http/protobuf"


class RouterTracesSettings(TracesSettings):
    """The router's: it also decides which requests are traced."""

    sample: float = Field(default=0.0, ge=0, le=1)
    """Share of requests whose traces are exported. OTEL_TRACES_SAMPLER and OTEL_TRACES_SAMPLER_ARG set it too."""
    follow_client: bool = True
    """Whether the sampled flag of a client's `traceparent` decides instead, where it sends one. Its ids are used in
    either case."""
    keep_failed: bool = True
    """Whether the trace of a request that failed by the cluster's fault (an error of 500 or above) is exported although
    it was not sampled."""
    slow_ttft_s: float = Field(default=10.0, ge=0)
    """The same for a request whose first token took longer than this. Seconds; 0 = for none."""
    slow_tpot_s: float = Field(default=0.0, ge=0)
    """The same for a request whose tokens after the first took longer than this on average. Seconds; 0 = for none."""
