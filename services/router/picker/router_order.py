"""Which routers serve a request, best first. Policy: no I/O, no clock."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

from shared.kv.rendezvous import keeper

SESSION_SLACK = 4
"""A session stays with its router while that has at most this many requests more than twice the mean."""


class Refusal(Enum):
    """Why no router serves the request."""

    NOT_READY = "not_ready"
    FULL = "full"


@dataclass(slots=True)
class Endpoint:
    """A router as the picker sees it."""

    address: str
    """ip:port of its HTTP API."""
    ready: bool
    full: bool
    """Its queue takes no more."""
    load: int
    """Requests that wait or run there, those included that were sent to it since the last probe."""


def choose(
    endpoints: Sequence[Endpoint],
    subset: Collection[str] | None,
    session: str,
    most: int,
    rng: random.Random,
) -> list[Endpoint] | Refusal:
    """At most `most` of them; `subset`: addresses that may be named, None = all of them.

    The least loaded goes first, equals in random order. A request of a session, named by a text of its own or empty,
    goes to the session's router (rendezvous hashing), unless that is full or has far more to do than others.
    """
    ready = [each for each in endpoints if each.ready and (subset is None or each.address in subset)]
    if not ready:
        return Refusal.NOT_READY
    free = [each for each in ready if not each.full]
    if not free:
        return Refusal.FULL
    ordered = sorted(free, key=lambda each: (each.load, rng.random()))
    if session:
        home = keeper(session.encode(), [each.address for each in ready])
        mean = sum(each.load for each in free) / len(free)
        ordered.sort(key=lambda each: each.address != home or each.load > 2 * mean + SESSION_SLACK)
    return ordered[:most]
