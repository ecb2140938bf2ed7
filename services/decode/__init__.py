"""Blocks in, tokens out: reservation, receiving, continuous batching."""
