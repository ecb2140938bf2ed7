"""Metrics, logs and traces, the same way in every service."""
