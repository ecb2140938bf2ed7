"""Guesses of what an answer goes on with, several tokens a step: pure policy, no tensors."""
