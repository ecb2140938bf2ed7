"""What a source of guesses is. Any may be wrong at any time: a guess costs time, and never changes an answer."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from shared.engine.sequence import EngineSequence


class Draft(NamedTuple):
    """A guess of an answer's tokens behind its newest one."""

    token_ids: tuple[int, ...] = ()
    chances: tuple[float, ...] = ()
    """For each guess the chance that it is right and all before it are: from 1 to 0, falling."""


NO_DRAFT = Draft()
LEAST_CHANCE = 0.08
"""Least chance of a guess that is proposed."""


class Drafter(Protocol):
    """Guesses from what is known of sequences; the engine thread alone calls it."""

    @property
    def method(self) -> str:
        """Its name in settings, requests and metrics."""

    def propose(self, sequence: EngineSequence, most: int) -> Draft:
        """At most `most` guesses of what follows a sequence's known tokens. Learns from the tokens that came since the
        last call, whether or not it had proposed them. Takes a few microseconds."""
        ...

    def forget(self, sequence_id: str) -> None:
        """The sequence has left; its id may be given anew."""
        ...


def most_guesses(sequence: EngineSequence) -> int:
    """Most guesses of a sequence's next step: as many as it asks for and has room for."""
    return min(sequence.sampling.speculation.most_guesses, sequence.num_guessable_tokens)
