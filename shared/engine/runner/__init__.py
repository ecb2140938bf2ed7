"""Planned steps as tensors: the model, the sampler, the KV pool's memory."""
