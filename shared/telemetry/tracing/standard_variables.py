"""OpenTelemetry's own environment variables, as far as Tandem's settings of traces have the same meaning:
https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/. Tandem's own names come first."""

from __future__ import annotations

from collections.abc import Mapping

_PARTS = {"protocol": "PROTOCOL", "headers": "HEADERS", "certificate": "CERTIFICATE"}


def standard_traces(environment: Mapping[str, str | None], fields: frozenset[str]) -> dict[str, object]:
    """What they say of those settings of traces that are among `fields`. Names in lower case."""
    given = {name: value for name, value in environment.items() if name.startswith("otel_") and value}
    if given.get("otel_sdk_disabled", "").lower() == "true" or given.get("otel_traces_exporter") == "none":
        return {}
    found: dict[str, object] = {}
    for field, name in _PARTS.items():
        for prefix in ("otel_exporter_otlp_", "otel_exporter_otlp_traces_"):
            if value := given.get(prefix + name.lower()):
                found[field] = value
    if endpoint := given.get("otel_exporter_otlp_traces_endpoint"):
        found["endpoint"] = endpoint
    elif endpoint := given.get("otel_exporter_otlp_endpoint"):
        found["endpoint"] = _of_all_signals(endpoint, str(found.get("protocol", "")))
    found |= _sampler(given)
    return {name: value for name, value in found.items() if name in fields}


def _of_all_signals(endpoint: str, protocol: str) -> str:
    """Below the path of an endpoint for all signals, traces have one of their own; gRPC knows no path."""
    if protocol == "grpc" or not endpoint.partition("://")[2].partition("/")[2].strip("/"):
        return endpoint
    return f"{endpoint.rstrip('/')}/v1/traces"


def _sampler(given: Mapping[str, str]) -> dict[str, object]:
    name = given.get("otel_traces_sampler", "")
    kind = name.removeprefix("parentbased_")
    if kind not in ("always_on", "always_off", "traceidratio"):
        return {}
    share: object = {"always_on": 1.0, "always_off": 0.0}.get(kind, given.get("otel_traces_sampler_arg", 1.0))
    return {"sample": share, "follow_client": name != kind}
