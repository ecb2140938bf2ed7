"""What a role is to a worker: its commands, and the engine's events about its sequences."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from services.worker.attempt import WorkerRequest
from services.worker.session import Session
from shared.engine.messages import Event
from shared.errors import TandemError

HANDOFF_TIMEOUT_S = 60.0
"""A receiver that has not taken all so long after the last chunk is given up; a safety net beneath the protocol.
Seconds."""
SENDER_TIMEOUT_S = 600.0
"""So is a sender of which nothing comes for so long: its next chunk may wait in a queue, and take minutes on a slow
machine. Seconds."""

TakeCommand = Callable[[Session, Any], None]
"""Carries out one kind of command. Raises a TandemError for one that is refused and has changed nothing."""


class Role(Protocol):
    """What one role adds to a worker: its commands, and what the engine's events mean for its sequences.

    Every method runs on the event loop, and none blocks. A role ignores what concerns another role's sequences.
    """

    commands: Mapping[str, TakeCommand]
    """By the field of `Command`. Commands that several roles have in common, such as cancel, each role gets."""

    @property
    def requests(self) -> Mapping[str, WorkerRequest]:
        """The role's running requests, by sequence id."""

    @property
    def held(self) -> Collection[str]:
        """Sequence ids of all that it holds anything of, also of what ended and is not free yet."""

    def on_event(self, event: Event) -> None:
        """The engine's events about sequences, in order."""

    def abandon(self, sequence_id: str) -> None:
        """Frees a sequence, and sends nothing: its command could not be carried out, or its router is gone."""

    def fail(self, sequence_id: str, error: TandemError) -> None:
        """Frees a sequence, and sends the error to its router."""
