"""What the fake server does to each request, and what it writes down about it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path


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

    def dump(self) -> str:
        """As the server's argument."""
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str) -> Script:
        """What `dump` wrote."""
        fields = json.loads(text)
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


def read_truth(path: Path) -> dict[str, Truth]:
    """The server's log by request id; warm-up included."""
    rows = [Truth(**json.loads(line)) for line in path.read_text().splitlines()]
    return {row.request_id: row for row in rows}
