"""How much prefill a fleet spares: its prefix hits beside those of one ideal cache, and what a fetched prefix saves."""
