"""Dashboard, alert rules and reference for operators, made from the metrics' definitions."""
