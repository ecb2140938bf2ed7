"""Metrics, logs and trace ids, the same in every service."""
