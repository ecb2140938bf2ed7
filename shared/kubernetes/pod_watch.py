"""A view of some Pods, kept up to date: one list, then a watch from its version on."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Generic, TypeVar

from shared.errors import ClusterForbids, ClusterUnavailable, ConfigError
from shared.kubernetes.access import ClusterAccess
from shared.kubernetes.pods import Expired, Pod, Pods
from shared.tasks import end_task

PAGE = 500
"""Pods in one answer to a list."""
WATCH_S = 60
"""A watch ends after this time and the next one continues there: a connection that died unseen, behind a firewall
that forgot it, is found by then. Seconds."""
SHORT_S = 1.0
"""A watch that the server ends sooner is followed by a pause."""
T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Backoff:
    """Doubles from `first_s` to `most_s` seconds; each pause is between half of that and all of it, so that the
    routers of a cluster do not come back to their API server at one moment."""

    first_s: float = 0.25
    most_s: float = 15.0

    def pause_s(self, failures: int) -> float:
        """Seconds to wait after `failures` in a row, 1 or more."""
        longest = min(self.most_s, self.first_s * 2.0 ** min(failures - 1, 30))
        return longest * random.uniform(0.5, 1.0)


class PodWatch(Generic[T]):
    """Reads each Pod into a `T`; `view` has those that count.

    Concurrency: used from the event loop's thread alone.
    Failure: a server that is away, forbids the call or answers nonsense changes nothing in `view`. `failure` says why
    it may be out of date; that is logged once, and tried again after pauses that grow. Where the server has forgotten
    our version, all is listed anew and `view` goes from the old state to the new one in one change.
    """

    def __init__(
        self,
        access: ClusterAccess,
        selector: str,
        read: Callable[[Pod], T | None],
        *,
        page: int = PAGE,
        watch_s: int = WATCH_S,
        backoff: Backoff | None = None,
    ) -> None:
        """`selector` is a label selector. `read` returns None for a Pod that does not count now, and raises ConfigError
        for one that is wrong: it is left out, and `failure` names it. Reads nothing yet."""
        self.view: dict[str, T] = {}
        """The value read from each Pod that counts, by the Pod's name."""
        self.error: ClusterForbids | ClusterUnavailable | None = None
        """The error while the server does not answer as it should; else None."""
        self._access = access
        self._selector = selector
        self._read = read
        self._page = page
        self._watch_s = watch_s
        self._backoff = backoff or Backoff()
        self._version = ""  # what `view` shows; empty: the Pods have to be listed
        self._wrong: dict[str, str] = {}  # why a Pod is left out, by its name
        self._failures = 0  # in a row
        self._listed = False
        self._task: asyncio.Task[None] | None = None

    @property
    def failure(self) -> str:
        """Why `view` may be out of date or lacks a Pod; empty while it is complete."""
        if self.error is not None:
            return self.error.message
        if not self._listed:
            return "the Pods have not been listed yet"
        return "; ".join(f"Pod {name} is left out: {why}" for name, why in sorted(self._wrong.items()))

    def start(self, on_change: Callable[[], None]) -> None:
        """Begins to follow the Pods; `on_change` is called after each change of `view`."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(on_change), name=f"Pods {self._selector}")

    async def close(self) -> None:
        """Ends it; `view` stays as it is. Twice is fine."""
        task, self._task = self._task, None
        await end_task(task)

    async def _run(self, on_change: Callable[[], None]) -> None:
        while True:
            try:
                async with self._access.connect() as api:
                    pods = Pods(api, self._access, self._selector)
                    while True:
                        await self._turn(pods, on_change)
            except Expired:
                logger.info("the Kubernetes API server has forgotten version %s: listing the Pods anew", self._version)
                self._version = ""
            except (ClusterForbids, ClusterUnavailable) as error:
                self._failed(error)
            self._failures += 1
            await asyncio.sleep(self._backoff.pause_s(self._failures))

    async def _turn(self, pods: Pods, on_change: Callable[[], None]) -> None:
        """One list where that is due, then one watch until it ends."""
        if not self._version:
            found, version = await pods.list(self._page)
            self._replace(found, on_change)
            self._version = version
            self._listed = True
            self._answered()
        begun_s = time.monotonic()
        async with aclosing(pods.watch(self._version, self._watch_s)) as events:
            async for event in events:
                self._answered()
                if event.pod is not None:
                    self._take(event.pod, event.deleted, on_change)
                self._version = event.version
        if time.monotonic() - begun_s < SHORT_S:
            raise ClusterUnavailable("the Kubernetes API server ends each watch at once")
        self._failures = 0

    def _replace(self, pods: list[Pod], on_change: Callable[[], None]) -> None:
        """The view is now that of these Pods."""
        before, was_wrong = self.view, self._wrong
        self.view, self._wrong = {}, {}
        for pod in pods:
            self._add(pod, was_wrong)
        if self.view != before:
            on_change()

    def _take(self, pod: Pod, deleted: bool, on_change: Callable[[], None]) -> None:
        """Applies a change of one Pod to the view."""
        name = pod["metadata"]["name"]
        before = self.view.pop(name, None)
        was_wrong = {name: why} if (why := self._wrong.pop(name, "")) else {}
        if not deleted:
            self._add(pod, was_wrong)
        self._failures = 0
        if self.view.get(name) != before:
            on_change()

    def _add(self, pod: Pod, was_wrong: dict[str, str]) -> None:
        name = pod["metadata"]["name"]
        try:
            read = self._read(pod)
        except ConfigError as error:
            self._wrong[name] = error.message
            if was_wrong.get(name) != error.message:
                logger.error("Pod %s is left out: %s", name, error)
            return
        if read is not None:
            self.view[name] = read

    def _failed(self, error: ClusterForbids | ClusterUnavailable) -> None:
        if type(self.error) is not type(error):  # what a server that is away fails with changes from try to try
            logger.error("%s; what is known of %d Pods stays", error, len(self.view))
        self.error = error

    def _answered(self) -> None:
        if self.error is not None:
            logger.info("the Kubernetes API server answers again")
        self.error = None
