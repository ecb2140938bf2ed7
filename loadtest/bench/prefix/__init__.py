"""Prefill that a fleet saves: its prefix hits compared with one ideal cache, and TTFT with a fetched prefix."""
