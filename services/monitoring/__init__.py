"""What operators look at, made from the metrics' definitions: dashboard, rules and reference."""
