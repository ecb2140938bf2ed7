"""The interface of a client, and the values that go through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from loadtest.records import Failure, FailureCause, Reply


@dataclass(frozen=True, slots=True)
class Call:
    """One request to be sent: greedy, and as long as asked for where `ignore_eos` is set."""

    request_id: str
    token_ids: Sequence[int]
    max_tokens: int
    ignore_eos: bool = True


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """What a target reports about itself."""

    model: str


class RequestFailed(Exception):
    """A request has no complete answer."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def failed(cause: FailureCause, message: str, kind: str = "") -> RequestFailed:
    """The exception for a cause."""
    return RequestFailed(Failure(cause, message, kind))


class Client(Protocol):
    """One target. Any number of requests at once, on one event loop."""

    async def start(self) -> TargetInfo:
        """Connects and asks the target about itself; raises RequestFailed, ConfigError where it is not ready."""
        ...

    def encode(self, call: Call) -> Any:
        """The request in the form that `generate` sends; done ahead, so that sending costs little."""
        ...

    async def generate(self, payload: Any, reply: Reply) -> None:
        """Sends and fills `reply` with absolute times until the answer's end.

        Raises RequestFailed; what came until then is in `reply`. Cancelling it ends the request at the server.
        """
        ...

    async def close(self) -> None:
        """Drops all connections. Idempotent."""
        ...
