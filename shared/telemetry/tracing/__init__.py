"""Spans of requests, and their way to an OpenTelemetry collector by OTLP (docs/decisions/telemetry.md, 0120)."""
