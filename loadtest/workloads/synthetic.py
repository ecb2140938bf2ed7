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
