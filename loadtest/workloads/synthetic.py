"""Synthetic workloads: unrelated prompts, shared prefixes, conversations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import ClassVar

import numpy as np

from loadtest.workloads.conversation import Conversation, Turn
from loadtest.workloads.lengths import Lengths
from loadtest.workloads.tokens import Span
from shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Random:
    """Prompts without common prefixes."""

    input_len: Lengths
    output_len: Lengths

    turns_per_conversation: ClassVar[float] = 1.0
    timed: ClassVar[bool] = False

    def conversations(self, rng: np.random.Generator) -> Iterator[Conversation]:
        """Endless."""
        for i in count():
            span = Span(f"random/{i}", self.input_len.draw(rng))
            yield Conversation((Turn((span,), self.output_len.draw(rng)),))


FIRST_ANSWERED = 1000
"""The token id with which a model answers a `Copies` prompt that gives each token its successor in the vocabulary."""
_LEAST_UNSHARED = 16


@dataclass(frozen=True, slots=True)
class Copies:
    """Prompts that have a share of their own answers, as a file to edit has, or by chance; for a model that gives each
    token its successor (`loadtest.rig.successors`), so that the answer is known."""

    input_len: Lengths
    """Tokens; at least what the copied runs take."""
    output_len: Lengths
    run_len: Lengths
    """Tokens of the answer that the prompt has in a row, before another token follows there."""
    share: float
    """Share of these runs that it has."""

    turns_per_conversation: ClassVar[float] = 1.0
    timed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ConfigError(f"share must be between 0 and 1, got {self.share:g}", field="share")

    def conversations(self, rng: np.random.Generator) -> Iterator[Conversation]:
        """Endless. No two prompts begin alike."""
        for i in count():
            input_len, output_len, runs = self.input_len.draw(rng), self.output_len.draw(rng), list[Span]()
            first = FIRST_ANSWERED
            while (left := FIRST_ANSWERED + output_len - first) > 0:
                run_len = min(self.run_len.draw(rng), left)
                if rng.random() < self.share:
                    run = tuple(range(first, first + run_len))
                    runs += [Span(f"run/{first}/{run_len}", run_len, run), Span(f"between/{i}/{first}", 1)]
                first += run_len
            rest = max(input_len - sum([run.num_tokens for run in runs]) - 1, _LEAST_UNSHARED)
            spans = (Span(f"copies/{i}", rest), *runs, Span("last", 1, (FIRST_ANSWERED - 1,)))
            yield Conversation((Turn(spans, output_len),))


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Each prompt begins with one of `groups` system prompts, all equally popular."""

    prefix_len: int
    groups: int
    input_len: Lengths
    """Tokens after the prefix."""
    output_len: Lengths

    turns_per_conversation: ClassVar[float] = 1.0
    timed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise ConfigError(f"groups must be at least 1, got {self.groups}", field="groups")

    def conversations(self, rng: np.random.Generator) -> Iterator[Conversation]:
        """Endless."""
        for i in count():
            prefix = Span(f"prefix/{int(rng.integers(self.groups))}", self.prefix_len)
            span = Span(f"suffix/{i}", self.input_len.draw(rng))
            yield Conversation((Turn((prefix, span), self.output_len.draw(rng)),))


@dataclass(frozen=True, slots=True)
class Chats:
    """Conversations: a system prompt shared by all, then turns that each carry the whole history.

    The history has the server's own answers, token by token, as a chat client would send them back. So a turn cannot
    be sent before the answer that it replies to. Conversations arrive on schedule, turns follow after a pause.
    """

    system_len: int
    turns: Lengths
    input_len: Lengths
    """Tokens of one user message."""
    output_len: Lengths
    mean_think_s: float
    """Pause before the next turn, seconds: exponential with this mean."""

    timed: ClassVar[bool] = False

    @property
    def turns_per_conversation(self) -> float:
        """Mean number of turns."""
        return self.turns.mean

    def conversations(self, rng: np.random.Generator) -> Iterator[Conversation]:
        """Endless."""
        system = Span("system", self.system_len)
        for i in count():
            turns = []
            for k in range(self.turns.draw(rng)):
                message = Span(f"chat/{i}/{k}", self.input_len.draw(rng))
                think_s = float(rng.exponential(self.mean_think_s)) if k else 0.0
                opening = () if k else (system,)
                turns.append(Turn((*opening, message), self.output_len.draw(rng), think_s))
            yield Conversation(tuple(turns))
