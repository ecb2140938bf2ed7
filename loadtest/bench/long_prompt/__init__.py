"""Inter-token latency of running answers, with and without long prompts arriving."""
