"""The interface of the compared engines. Needs only Python, because each engine runs in a venv of its own."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

MAX_TOKENS = 4096
"""Longest sequence, tokens."""
MAX_BATCH = 32
STEP_TOKENS = 2048
"""Most prompt tokens of one step, the same for all engines with such a limit."""
VOCAB_SIZE = 32000
"""Vocabulary of the shapes in loadtest/rig/models.py."""


PLAIN, INT8, INT4 = "plain", "int8", "int4"
W8A8, W4A8, W8A8_WIDE, W4A8_WIDE = "w8a8", "w4a8", "w8a8 in 128", "w4a8 in 128"
"""Forms of weights: in 16 bits, or rounded; with a8 what they are multiplied with is rounded to int8 too, as the engine
does by itself, or with a scale for 128 numbers of a token. Not each engine has each."""
NGRAM, DRAFT = "ngram", "draft"


@dataclass(frozen=True)
class Settings:
    """The settings of an engine."""

    folder: Path
    """Folder of the checkpoint."""
    scratch: Path
    """Folder for a converted checkpoint."""
    num_threads: int
    cpu_isa: str = "auto"
    """Widest instruction set that the engine may use, as in TANDEM_CPU_ISA."""
    form: str = PLAIN
    """Form of the weights."""
    guesses_by: str = ""
    """How an `Answers` guesses the next tokens: "", NGRAM or DRAFT."""
    draft: Path | None = None
    """Folder of the model that guesses with DRAFT."""


class EngineAdapter(Protocol):
    """One engine with the model loaded."""

    def describe(self) -> str:
        """Its version and compute precision, as far as known."""
        ...

    def prefill_s(self, prompt: list[int]) -> float:
        """Seconds from handing over a prompt to its first token; no part of it may be cached."""
        ...

    def decode_steps_s(self, prompts: list[list[int]], num_steps: int) -> list[float]:
        """Seconds of each decode step that gives all sequences one token; their prompts are computed before."""
        ...


@runtime_checkable
class ReturnsLogits(Protocol):
    """An adapter that can return logits."""

    def logits(self, prompt: list[int]) -> list[list[float]]:
        """Logits of every token: [num_tokens, vocab_size]."""
        ...


@runtime_checkable
class Embeds(Protocol):
    """An adapter that can embed texts."""

    def embed_s(self, prompts: list[list[int]]) -> float:
        """Seconds from handing over all texts to the last hidden state of each one's last token, in fp32."""
        ...


@runtime_checkable
class Answers(Protocol):
    """An adapter that guesses the next tokens of answers."""

    def answer(self, prompt: list[int], num_tokens: int, num_guesses: int) -> tuple[float, list[int]]:
        """A greedy answer to one prompt alone: seconds from its first token to its last one, and its tokens.
        `num_guesses`: of a step, where the engine does not choose that by itself."""
        ...


def random_prompt(num_tokens: int, generator: random.Random, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """Random tokens, so that no prompt's prefix is cached."""
    return [generator.randrange(3, vocab_size) for _ in range(num_tokens)]


def spare_steps(prompts: list[list[int]]) -> int:
    """Extra steps, because prefills end in different steps and all sequences have to decode together."""
    return -(-sum(map(len, prompts)) // STEP_TOKENS) + 2
