"""The interface of a client, and its argument and result types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from loadtest.records import Failure, FailureCause, Reply


@dataclass(frozen=True, slots=True)
class Call:
    """One request to send: greedy; with `ignore_eos` its answer has exactly `max_tokens`."""

    request_id: str
    token_ids: Sequence[int]
    max_tokens: int
    ignore_eos: bool = True
    model: str = ""
    """Empty: the client's."""


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """What a target reports about itself."""

    model: str


@dataclass(frozen=True, slots=True)
class CauseLine:
    """One cause of the target's own attribution, over the run."""

    cause: str
    num_lost: int
    """Requests lost to it, by the target's targets."""
    lost_share: float
    time_share: float


class RequestFailed(Exception):
    """A request has no complete answer."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def failed(cause: FailureCause, message: str, kind: str = "") -> RequestFailed:
    """The exception for a cause."""
    return RequestFailed(Failure(cause, message, kind))


class Client(Protocol):
    """One target. Any number of concurrent requests, on one event loop."""

    async def start(self) -> TargetInfo:
        """Connects and queries the target's model; raises RequestFailed, ConfigError if it is not ready."""
        ...

    def encode(self, call: Call) -> Any:
        """The request in the form that `generate` sends; done in advance, so that sending is cheap."""
        ...

    async def generate(self, payload: Any, reply: Reply) -> None:
        """Sends and fills `reply` with absolute times until the end of the answer.

        Raises RequestFailed; `reply` then has what had arrived. Cancelling it also cancels the request at the server.
        """
        ...

    async def causes(self, window_s: float) -> tuple[CauseLine, ...]:
        """What requests of the last `window_s` were lost to and took their time, by the target; empty where it does not
        say. Never raises RequestFailed."""
        ...

    async def close(self) -> None:
        """Drops all connections. Idempotent."""
        ...
