"""Spans of requests, and their way to an OpenTelemetry collector by OTLP (docs/decisions/0120)."""
