"""The duration of an engine step, one form for all of them: steps that decode, chunks of prompts, and both at once.

seconds = fixed + hidden(read, products) + sequences · sequence + context tokens · kv + chunk pairs · attention
products = (sequences + chunk tokens) · token
hidden(a, b) = max(a, b) + (1 - overlap) · min(a, b)

Weights are read while products are computed: with overlap 1 the shorter of the two costs nothing, with 0 they add up.
`shared/sizing/roofline.py` gives the coefficients by arithmetic, `StepTimeFit` by steps that were measured.

With experts the reading includes those that the step's tokens chose. Through s stages a step goes in m parts, one
behind the other, m being the number of its sequences or s: the time of one part on one stage, m + s - 1 times. Products
and KV are split among the parts, so they take (m + s - 1) / (m · s) of what they take without; weights are read for
every part, (m + s - 1) / s times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple


class StepWork(NamedTuple):
    """The numbers of sequences and tokens that a step computes."""

    num_sequences: int = 0
    """Sequences that decode a token each."""
    num_context_tokens: int = 0
    """Tokens whose KV the decoding sequences read."""
    num_chunk_tokens: int = 0
    """Tokens of prompts, and of what is computed again."""
    num_chunk_pairs: int = 0
    """Query and key of the chunks' causal attention."""
    num_chunks: int = 0

    @property
    def num_tokens(self) -> int:
        """Rows of the step's products."""
        return self.num_sequences + self.num_chunk_tokens

    def with_chunk(self, num_tokens: int, num_before: int) -> StepWork:
        """The same step with a prompt's next `num_tokens` behind its first `num_before` besides."""
        return StepWork(
            self.num_sequences,
            self.num_context_tokens,
            self.num_chunk_tokens + num_tokens,
            self.num_chunk_pairs + chunk_pairs(num_tokens, num_before),
            self.num_chunks + 1,
        )


def chunk_pairs(num_tokens: int, num_before: int) -> int:
    """Pairs of query and key: each of `num_tokens` attends to all `num_before`, to those of its chunk up to itself."""
    return num_tokens * num_before + num_tokens * (num_tokens + 1) // 2


class StepKinds(NamedTuple):
    """What coefficients rest on, counted in kinds: magnitudes of a step's numbers."""

    num_batches: int = 0
    """Batches of answers and their context; at most one where all steps had about as many answers: one that grows tells
    no part of their time from another."""
    num_chunks: int = 0
    """Kinds of chunks and their pairs."""


BATCH_GAIN = 2.0
"""Times a step of one answer, what a batch may take where even that one misses the target: all are late there, and a
batch of one would serve the fewest of them."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The coefficients, in seconds unless they say otherwise. None is negative."""

    fixed_s: float
    """Time of every step, whatever it computes."""
    read_s: float
    """Reading the weights once, without experts."""
    token_s: float
    """A token's share of the products."""
    sequence_s: float
    """What a decoding sequence takes beside its products and its KV."""
    kv_s: float
    """Reading the KV of one context token for a decoding sequence."""
    attention_s: float
    """One pair of a chunk's attention."""
    overlap: float = 1.0
    """Share, from 0 to 1, of the shorter one of reading and products that costs no time."""
    experts_s: float = 0.0
    """Reading all experts once."""
    unread_share: float = 0.0
    """Share of the experts that one token does not choose."""
    uneven: float = 0.0
    """2 · ln(g) · g / E, for E experts that lie on g groups of ranks."""
    num_stages: int = 1
    pass_s: float = 0.0
    """Time of every part of a step that passes through the stages by itself, beside the reading."""

    def step_s(self, work: StepWork) -> float:
        """Time of a step. It grows with each number of the work."""
        parts, passes = 1, 1.0
        if self.num_stages > 1:
            parts, passes = self.through(work.num_sequences + work.num_chunks)
        read_s = self.read_s
        if self.experts_s:
            read_s += self.experts_s * self.read_share(work.num_tokens / parts)
        own_s = (
            work.num_sequences * self.sequence_s
            + work.num_context_tokens * self.kv_s
            + work.num_chunk_pairs * self.attention_s
        )
        products_s = work.num_tokens * self.token_s / parts
        return self.fixed_s + passes * (self.pass_s + self.hidden_s(read_s, products_s) + own_s / parts)

    def scaled(self, factor: float) -> StepTimes:
        """The times of a machine on which every step takes `factor` times as long."""
        return replace(
            self, fixed_s=self.fixed_s * factor, read_s=self.read_s * factor, token_s=self.token_s * factor,
            sequence_s=self.sequence_s * factor, kv_s=self.kv_s * factor, attention_s=self.attention_s * factor,
            experts_s=self.experts_s * factor, pass_s=self.pass_s * factor,
        )  # fmt: skip

    def decode_step_s(self, batch: int, num_kv_tokens: int) -> float:
        """Time of one token for each of `batch` sequences."""
        return self.step_s(StepWork(batch, num_kv_tokens))

    def most_step_s(self, target_s: float, num_context_tokens: float) -> float:
        """The longest that a step of answers may take where `target_s` is wanted between two tokens: that, or where one
        answer alone, with that context, takes longer, BATCH_GAIN times its step."""
        alone_s = self.decode_step_s(1, round(num_context_tokens))
        return target_s if alone_s <= target_s else BATCH_GAIN * alone_s

    def prompt_s(self, num_tokens: int) -> float:
        """Time of a prompt that is computed alone, in one step."""
        return self.step_s(StepWork().with_chunk(num_tokens, 0))

    def chunk_s(self, num_tokens: int, num_before: int) -> float:
        """Time of a prompt's next `num_tokens` after `num_before` in a step that products bind, beside the rest."""
        return num_tokens * self.token_s + chunk_pairs(num_tokens, num_before) * self.attention_s

    def largest_chunk(self, work: StepWork, num_before: int, within_s: float, most: int) -> int:
        """The most tokens, up to `most`, of a prompt behind `num_before` that the step may compute besides, so that
        it takes at most `within_s`; 0 where not even one may."""
        low, high = 0, most + 1  # the answer is in [low, high)
        while high - low > 1:
            middle = (low + high) // 2
            if self.step_s(work.with_chunk(middle, num_before)) <= within_s:
                low = middle
            else:
                high = middle
        return low

    def growth_s(self, batch: int) -> float:
        """How much longer the next decode step is, by the KV of this one's tokens."""
        parts, passes = self.through(batch)
        return self.kv_s * batch * passes / parts

    def read_share(self, num_tokens: float) -> float:
        """Share of a rank's experts that some of `num_tokens` chose, on the rank where they are the most.

        Tokens choose at random; the most of g groups' numbers is about their mean + sqrt(2 ln g) standard deviations.
        """
        unread: float = self.unread_share**num_tokens
        return min(1.0, 1 - unread + math.sqrt(self.uneven * unread * (1 - unread)))

    def bubble(self, num_sequences: int) -> float:
        """Share of a step in which a stage waits for others."""
        parts, passes = self.through(num_sequences)
        return 1 - parts / (passes * self.num_stages)

    def through(self, num_sequences: int) -> tuple[int, float]:
        """A step's parts, and how many times as long as one part through all stages it takes."""
        if self.num_stages == 1:
            return 1, 1.0
        parts = max(1, min(num_sequences, self.num_stages))
        return parts, (parts + self.num_stages - 1) / self.num_stages

    def hidden_s(self, read_s: float, products_s: float) -> float:
        """Reading and products of one step together."""
        return max(read_s, products_s) + (1 - self.overlap) * min(read_s, products_s)

    @property
    def lines(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """`hidden_s` of the weights by the number of tokens is the greater one of two straight lines: (seconds at none,
        seconds a token) of each. So what both leave room for, a step has room for. Without experts and stages."""
        exposed = 1 - self.overlap
        return (self.read_s, exposed * self.token_s), (exposed * self.read_s, self.token_s)
