"""What a request says of guessing."""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import InvalidRequest

MOST_GUESSES = 15
"""Of one sequence in one step."""
AUTO, OFF, NGRAM = "auto", "off", "ngram"
METHODS = (AUTO, OFF, NGRAM)


@dataclass(frozen=True, slots=True)
class Speculation:
    """Which drafters may guess for an answer, and how far. It changes how fast the answer comes and nothing else.
    Raises InvalidRequest naming the field."""

    method: str = AUTO
    """auto: each that the worker has; off: none; else the drafter's name."""
    most_guesses: int = MOST_GUESSES
    """Tokens beyond the next one that one step may guess; `max` in requests."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            limit = f"one of {', '.join(METHODS)}"
            raise InvalidRequest(
                f"speculation.method must be {limit}, got {self.method!r}", field="speculation.method", limit=limit
            )
        if not 1 <= self.most_guesses <= MOST_GUESSES:
            raise InvalidRequest(
                f"speculation.max must be 1 to {MOST_GUESSES}, got {self.most_guesses}",
                field="speculation.max",
                limit=MOST_GUESSES,
            )

    def allows(self, method: str) -> bool:
        """Whether the drafter of this name may guess."""
        return self.method in (AUTO, method)


DEFAULT_SPECULATION = Speculation()
