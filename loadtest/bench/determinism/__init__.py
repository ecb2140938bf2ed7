"""How often answers depend on what else is computed, without and with deterministic mode, and what the mode costs."""
