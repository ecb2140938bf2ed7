"""Conversations, of which every workload consists; most have one turn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from loadtest.workloads.tokens import Span


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. Its prompt is all earlier prompts and answers of the conversation, then these spans."""

    spans: tuple[Span, ...]
    num_output_tokens: int
    think_s: float = 0.0  # from the end of the previous answer

    @property
    def num_new_tokens(self) -> int:
        """Prompt tokens that this turn adds."""
        return sum(span.num_tokens for span in self.spans)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that follow each other; `at_s` is a trace's own arrival time, from the slice's start."""

    turns: tuple[Turn, ...]
    at_s: float | None = None


class Workload(Protocol):
    """A source of conversations."""

    @property
    def turns_per_conversation(self) -> float:
        """Average number of requests for each arrival."""
        ...

    @property
    def timed(self) -> bool:
        """Whether every conversation has its own `at_s`, in non-decreasing order, and the source ends."""
        ...

    def conversations(self, rng: np.random.Generator) -> Iterator[Conversation]:
        """The conversations in order, determined by the random stream."""
        ...


def ideal_cached_share(conversations: Iterable[Conversation]) -> float:
    """Share of the prompt tokens that an unlimited cache would hit, in [0, 1].

    It keeps every prompt and answer, finds any prefix of them, and has an answer as soon as its request was made.
    """
    longest: dict[int, int] = {}  # tokens seen of a span, by the hash of all labels up to it
    num_prompt_tokens = num_cached_tokens = 0
    for conversation in conversations:
        history_len = 0
        chain = 0
        for turn in conversation.turns:
            num_prompt_tokens += history_len + turn.num_new_tokens
            num_cached_tokens += history_len
            known = history_len == 0
            for span in turn.spans:
                chain = hash((chain, span.label))
                before = longest.get(chain, 0)
                seen = min(before, span.num_tokens) if known else 0
                num_cached_tokens += seen
                known = known and seen == span.num_tokens
                longest[chain] = max(before, span.num_tokens)
            history_len += turn.num_new_tokens + turn.num_output_tokens
    return num_cached_tokens / num_prompt_tokens if num_prompt_tokens else 0.0
