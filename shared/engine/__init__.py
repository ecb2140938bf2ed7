"""The engine that both roles run: sequences, scheduler (pure policy), runner (tensors), sampler, the step loop."""
