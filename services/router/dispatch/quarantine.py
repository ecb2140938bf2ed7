"""Quarantine of requests that were present at two worker deaths: such a request must not reach a third worker. Pure
policy."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from shared.errors import Quarantined

SAME_PLACE_TOKENS = 16
"""Two deaths with fewer new tokens between them happened at the same place of the answer."""
MAX_REMEMBERED = 1024
"""Requests whose ids stay refused; the oldest is forgotten first."""


@dataclass(frozen=True, slots=True)
class _Death:
    worker: str
    num_produced: int


class Deaths:
    """The deaths that one request was present at, those at one place of its answer."""

    def __init__(self) -> None:
        self._latest: _Death | None = None
        self._is_known = True  # whether any worker died with the latest one

    def __bool__(self) -> bool:
        """Whether there was any."""
        return self._latest is not None

    def note(self, request_id: str, worker: str, num_produced: int) -> None:
        """A worker's process ended while it held the request, whose answer had `num_produced` tokens. Those that end
        before `all_known` died together: the request did not move from one to the other.

        Raises Quarantined where it is the second at one place. A request that made progress in between was not the
        cause of the first: a long answer may outlive any number of workers.
        """
        if not self._is_known:
            return
        is_near = self.is_near(num_produced)
        before, self._latest = self._latest, _Death(worker, num_produced)
        self._is_known = False
        if before is not None and is_near:
            raise Quarantined(
                f"request {request_id!r} was present when worker {before.worker} and then worker {worker} died: "
                "it is not given to a third",
                request_id=request_id,
                workers=f"{before.worker},{worker}",
            )

    def is_near(self, num_produced: int) -> bool:
        """Whether another death now would be at the place of the latest one."""
        return self._latest is not None and num_produced - self._latest.num_produced < SAME_PLACE_TOKENS

    def all_known(self) -> None:
        """Every other worker was heard from since the latest death; the request may be placed on one of them."""
        self._is_known = True


class Quarantine:
    """The ids of quarantined requests, by tenant: a client that retries with the same id gets the same error."""

    def __init__(self, limit: int = MAX_REMEMBERED) -> None:
        self._limit = limit
        self._errors: OrderedDict[tuple[str, str], Quarantined] = OrderedDict()

    def add(self, tenant: str, request_id: str, error: Quarantined) -> None:
        """Refuses the id from now on."""
        # A copy: the one that was raised keeps the frames that it came through, and with them the request.
        self._errors[tenant, request_id] = Quarantined(error.message, **error.details)
        if len(self._errors) > self._limit:
            self._errors.popitem(last=False)

    def check(self, tenant: str, request_id: str) -> None:
        """Raises Quarantined for an id that was added."""
        error = self._errors.get((tenant, request_id))
        if error is not None:
            raise Quarantined(error.message, **error.details)
