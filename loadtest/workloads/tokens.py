"""Prompt tokens as a pure function of (seed, label): equal labels give equal tokens, and so shared prefixes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shared.errors import ConfigError

MIN_BLOCK_BITS = 64
"""Least entropy of a trace's block in bits, so that different hash ids do not give the same tokens."""


@dataclass(frozen=True, slots=True)
class Span:
    """A run of prompt tokens; a shorter span of the same label is a prefix of a longer one."""

    label: str
    num_tokens: int
    token_ids: tuple[int, ...] = ()
    """Given tokens, as many; empty: as a `TokenSource` draws them."""


@dataclass(frozen=True, slots=True)
class TokenSource:
    """Turns spans into token ids in [first_id, vocab_size).

    All tokens depend on the seed: runs with different seeds share no prompt, so a cache filled by the first run does
    not favour the second. Low ids are left out, because tokenizers have their special tokens there.
    """

    seed: int
    vocab_size: int = 1000
    first_id: int = 100

    def __post_init__(self) -> None:
        if not 0 <= self.first_id < self.vocab_size - 1:
            raise ConfigError(
                f"vocab_size must be at least {self.first_id + 2}, got {self.vocab_size}", field="vocab_size"
            )

    @property
    def bits_per_token(self) -> float:
        """Entropy of one token."""
        return math.log2(self.vocab_size - self.first_id)

    def span(self, span: Span) -> list[int]:
        """The span's tokens."""
        if span.token_ids:
            return list(span.token_ids)
        # An extendable-output hash: its first bytes do not depend on the requested length.
        stream = hashlib.shake_128(f"{self.seed}/{span.label}".encode()).digest(4 * span.num_tokens)
        words = np.frombuffer(stream, dtype="<u4").astype(np.int64)
        token_ids: list[int] = (words % (self.vocab_size - self.first_id) + self.first_id).tolist()
        return token_ids

    def prompt(self, spans: Sequence[Span]) -> list[int]:
        """The spans' tokens, concatenated."""
        token_ids: list[int] = []
        for span in spans:
            token_ids += self.span(span)
        return token_ids

    def check_block(self, num_tokens: int) -> None:
        """Raises ConfigError if blocks of `num_tokens` tokens are too short to distinguish hash ids."""
        if num_tokens * self.bits_per_token < MIN_BLOCK_BITS:
            raise ConfigError(
                f"scale: a block of {num_tokens} tokens over {self.vocab_size - self.first_id} token ids cannot keep "
                "different hash_ids apart; use a smaller scale or a larger vocab_size",
                field="scale",
            )
