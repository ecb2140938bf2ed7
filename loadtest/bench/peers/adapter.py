"""What every engine in the comparison implements. Needs nothing but Python: each engine runs in a venv of its own."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

MAX_TOKENS = 4096
"""Longest sequence that is asked for."""
MAX_BATCH = 32
STEP_TOKENS = 2048
"""Most prompt tokens of one step, the same for all that have such a limit."""
VOCAB_SIZE = 32000
"""Of the shapes in loadtest/bench/shapes.py."""


@dataclass(frozen=True)
class Settings:
    """What an engine is loaded with."""

    folder: Path
    """Of the checkpoint."""
    scratch: Path
    """Where it may keep what it converts the checkpoint into."""
    num_threads: int


class EngineAdapter(Protocol):
    """One engine with the model loaded."""

    def describe(self) -> str:
        """Its version, and what it computes in, as far as it tells."""
        ...

    def prefill_s(self, prompt: list[int]) -> float:
        """Seconds from handing over a prompt to its first token; nothing of it may be cached."""
        ...

    def decode_steps_s(self, prompts: list[list[int]], num_steps: int) -> list[float]:
        """Seconds of each step in which all the sequences get one more token, their prompts being computed."""
        ...


@runtime_checkable
class ReturnsLogits(Protocol):
    """A adapter whose logits can be had."""

    def logits(self, prompt: list[int]) -> list[list[float]]:
        """Of every token: [num_tokens, vocab_size]."""
        ...


def random_prompt(num_tokens: int, generator: random.Random, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """Tokens that no other prompt begins with, so that no prefix is found in a cache."""
    return [generator.randrange(3, vocab_size) for _ in range(num_tokens)]


def spare_steps(prompts: list[list[int]]) -> int:
    """Steps beyond those asked for, since prompts end in different ones and all are to decode together."""
    return -(-sum(map(len, prompts)) // STEP_TOKENS) + 2
