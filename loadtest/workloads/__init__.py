"""Workloads: prompts as spans of tokens, answer lengths, conversations; synthetic or from traces."""
