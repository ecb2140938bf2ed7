"""How much prefill a fleet saves: its prefix hits beside those of one ideal cache, and TTFT with a fetched prefix."""
