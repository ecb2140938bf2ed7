"""What the fake server does to each request, and what it writes down about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Behaviour:
    """One request's answer: messages of some tokens, each so long after the one before it (the first: the arrival)."""

    messages: tuple[tuple[float, int], ...] = ((0.0, 1),)  # (gap in ms, tokens)
    refuse: int = 0  # HTTP status, refused at once
    fail_after: int | None = None  # messages before an error event
    die_after: int | None = None  # messages before the whole process is gone
    cached_tokens: int = 0


@dataclass(frozen=True)
class Script:
    """Behaviours in the order of arrival, from the start again at the end."""

    behaviours: tuple[Behaviour, ...]
    token_ids: bool = True  # False: a server that only counts
    service_ms: float = 0.0  # one request after the other takes so long before its answer: a queue

    @property
    def deadly(self) -> bool:
        """Whether the process may end by it."""
        return any(behaviour.die_after is not None for behaviour in self.behaviours)

    @staticmethod
    def load(fields: dict[str, Any]) -> Script:
        """From what `asdict` gave."""
        behaviours = []
        for entry in fields["behaviours"]:
            entry["messages"] = tuple((gap, count) for gap, count in entry["messages"])
            behaviours.append(Behaviour(**entry))
        return Script(tuple(behaviours), fields["token_ids"], fields["service_ms"])


@dataclass
class Truth:
    """When the server really did things: `time.perf_counter()`, one clock for all processes of a machine."""

    request_id: str
    arrived_s: float
    prompt: list[int]
    max_tokens: int
    model: str
    sent_s: list[float] = field(default_factory=list)  # one a message
    counts: list[int] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        """From the arrival to the first message."""
        return self.sent_s[0] - self.arrived_s

    @property
    def tpot_s(self) -> float:
        """Mean gap of the tokens behind the first."""
        return (self.sent_s[-1] - self.sent_s[0]) / (sum(self.counts) - 1)

    @property
    def e2e_s(self) -> float:
        """From the arrival to the last message."""
        return self.sent_s[-1] - self.arrived_s

    def gaps_s(self) -> list[float]:
        """Between consecutive tokens."""
        gaps = [0.0] * (self.counts[0] - 1)
        for before, after, count in zip(self.sent_s, self.sent_s[1:], self.counts[1:], strict=False):
            gaps += [after - before] + [0.0] * (count - 1)
        return gaps
