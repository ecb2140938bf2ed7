"""Prompt in, sealed blocks out: chunked prefill and shipping."""
