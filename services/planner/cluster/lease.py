"""Leader election by a Kubernetes Lease: the holder acts, and stops at once when its hold is not certain any more."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime

from services.planner.cluster.calls import Absent, ClusterCalls, Conflict, Json
from shared.errors import ClusterUnavailable
from shared.tasks import end_task

logger = logging.getLogger(__name__)


class Leadership:
    """Takes the Lease and renews it, in a task of its own.

    `held` is computed from this process's clock: true for two thirds of the Lease's duration after the call that last
    renewed it *began*. So a leader that hangs, or whose calls are lost, has stopped before another may take over. That
    one waits until it has itself seen no renewal for the whole duration: no two clocks are compared.
    """

    def __init__(
        self,
        calls: ClusterCalls,
        name: str,
        identity: str,
        duration_s: float,
        failed: Callable[[Exception], None],
        answered: Callable[[], None],
    ) -> None:
        """`failed` is called with the error of each failed API call, which is then retried, `answered` when one has
        read or renewed the Lease. No API call before `start`."""
        self._calls, self._name, self._identity = calls, name, identity
        self._duration_s = duration_s
        self._failed, self._answered = failed, answered
        self._until_s = 0.0  # monotonic
        self._seen = ""  # version of another holder's Lease,
        self._seen_s = 0.0  # and when we first saw it
        self._task: asyncio.Task[None] | None = None
        self.holder = ""
        """The holder's identity, as last seen."""
        self.changed = asyncio.Event()
        """Set when it may have been gained."""

    @property
    def held(self) -> bool:
        """Whether this process may act now."""
        return time.monotonic() < self._until_s

    def start(self) -> None:
        """Begins to seek and to renew the Lease."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"Lease {self._name}")

    async def close(self) -> None:
        """Gives the Lease back, if it is held, so that another planner need not wait. Twice is fine."""
        if self._task is None:
            return
        task, self._task = self._task, None
        await end_task(task)
        if self.held:
            self._until_s = 0.0
            with contextlib.suppress(ClusterUnavailable, Conflict):
                lease = await self._calls.lease(self._name)
                if lease["spec"].get("holderIdentity") == self._identity:
                    await self._calls.replace_lease({**lease, "spec": {**lease["spec"], "holderIdentity": ""}})

    async def _run(self) -> None:
        while True:
            began_s = time.monotonic()
            was_held = self.held
            try:
                async with asyncio.timeout(self._duration_s / 3):
                    ours = await self._renew()
                self._answered()
            except Conflict:
                ours = False  # another planner was faster: the next read shows its identity
            except (ClusterUnavailable, TimeoutError) as error:
                self._failed(error)
                ours = None
            if ours:
                lapsed = not self.held  # it may have lapsed during the call, and who acted has seen that
                self._until_s = began_s + self._duration_s * 2 / 3
                if lapsed:
                    logger.info("%s leads", self._identity)
                    self.changed.set()
            elif ours is False:
                self._until_s = 0.0
                if was_held:
                    logger.warning("%s does not lead any more, %s does", self._identity, self.holder or "nobody")
            await asyncio.sleep(self._duration_s / 5)

    async def _renew(self) -> bool:
        """Whether the Lease is ours after this."""
        try:
            lease = await self._calls.lease(self._name)
        except Absent:
            await self._calls.create_lease(self._name, self._spec({}))
            self.holder = self._identity
            return True
        self.holder = lease["spec"].get("holderIdentity") or ""
        if self.holder not in ("", self._identity) and not self._expired(lease):
            return False
        spec = self._spec(lease["spec"] if self.holder == self._identity else {"leaseTransitions": _transitions(lease)})
        await self._calls.replace_lease({**lease, "spec": spec})
        self.holder = self._identity
        return True

    def _expired(self, lease: Json) -> bool:
        """Whether its holder has not renewed it for as long as it said it would be valid, by our clock."""
        now_s, version = time.monotonic(), lease["metadata"]["resourceVersion"]
        if version != self._seen:
            self._seen, self._seen_s = version, now_s
        return now_s - self._seen_s > float(lease["spec"].get("leaseDurationSeconds") or self._duration_s)

    def _spec(self, before: Json) -> Json:
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": max(1, round(self._duration_s)),
            "acquireTime": before.get("acquireTime", now),
            "renewTime": now,
            "leaseTransitions": before.get("leaseTransitions", 0),
        }


def _transitions(lease: Json) -> int:
    return int(lease["spec"].get("leaseTransitions") or 0) + 1
