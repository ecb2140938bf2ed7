"""Structured output: grammars compiled for a model's vocabulary, and which tokens may come next."""
