"""Guesses of an answer's next tokens, several a step: pure policy, no tensors."""
