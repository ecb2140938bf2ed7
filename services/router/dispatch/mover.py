"""Looks from time to time which running answers should move, and has them moved."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Iterator, Set

from services.router.dispatch.active_request import ActiveRequest
from services.router.dispatch.answer_move import PREPARING
from services.router.dispatch.record import RequestEvent, RequestState
from services.router.placement.move_settings import MoveSettings
from services.router.placement.moves import LOOK_EVERY_S, Desk, MoveCause, MoveLimits, MovePolicy, RunningAnswer
from services.router.workers.fleet import Fleet
from services.router.workers.link import WorkerLink
from shared.kv.groups import KVGroups
from shared.sizing.step_time import StepWork

MoveAnswer = Callable[[str, str, MoveCause], bool]
"""As `Dispatcher.move`."""


class Mover:
    """Reads the workers' reports and the running requests; the policy decides. On the event loop."""

    def __init__(
        self,
        fleet: Fleet,
        settings: MoveSettings,
        tpot_target_s: float,
        running: Callable[[], Iterable[ActiveRequest]],
        move: MoveAnswer,
    ) -> None:
        """`tpot_target_s`: 0 = none, and then no answer is rescued. `running` gives all requests."""
        self._fleet = fleet
        self._settings = settings
        self._running = running
        self._move = move
        self._policy = MovePolicy(MoveLimits(), tpot_target_s, rescue=settings.rescue)
        self._looked_at = -math.inf
        self._again: asyncio.TimerHandle | None = None
        self.vacated: Set[str] = frozenset()
        """Names of workers whose answers are to go elsewhere, for they are wanted for prompts."""
        self.preferred: Set[str] = frozenset()
        """Names of workers to which answers may move; empty: to all."""

    def look(self) -> None:
        """Begins the moves that are due, soon where it has just looked; to be called whenever a worker has reported."""
        now = time.perf_counter()
        wait_s = self._looked_at + LOOK_EVERY_S - now
        layout = self._fleet.layout
        if layout is None or self._fleet.converts or self._again is not None:
            return
        if wait_s > 0:
            self._look_later(wait_s)
            return
        self._looked_at = now
        desks = list(self._desks())
        sources = self._policy.sources(desks, now)
        if not sources:
            return
        living = [
            active for active in self._running() if active.state is RequestState.DECODING or active.state in PREPARING
        ]
        under_way = [active.record.moves[-1][1:] for active in living if active.state in PREPARING]
        answers = [
            running_answer(active, layout.groups, now)
            for active in living
            if active.state is RequestState.DECODING
            and active.record.decode_worker in sources
            and active.request.sampling.beams is None
        ]
        for proposed in self._policy.choose(sources, desks, answers, under_way, now, layout.groups.size):
            self._move(*proposed)
        if answers:
            self._look_later(LOOK_EVERY_S)  # some may have to wait for moves to end, or for rest

    def _look_later(self, wait_s: float) -> None:
        def look() -> None:
            self._again = None
            self.look()

        self._again = asyncio.get_running_loop().call_later(wait_s, look)

    def _desks(self) -> Iterator[Desk]:
        fleet = self._fleet
        for link in fleet.decodes.values():
            if link.connected:
                yield self._desk(link)
        for link in fleet.retiring:
            if link.connected and link.name not in fleet.decodes:
                yield self._desk(link)

    def _desk(self, link: WorkerLink) -> Desk:
        view = self._fleet.decode_pool.get(link.name)
        leaving = None
        if self._settings.drain and (link.load.draining or link.retired):
            leaving = MoveCause.DRAIN
        elif link.name in self.vacated:
            leaving = MoveCause.PREFERENCE
        if view is None:  # removed: it gets nothing new
            return Desk(link.name, StepWork(), 0, 0, 0, accepting=False, leaving=leaving)
        return Desk.of(view, leaving, preferred=self.preferred)


def running_answer(active: ActiveRequest, groups: KVGroups, now: float) -> RunningAnswer:
    """What the policy knows of an answer; `now` in time.perf_counter() seconds."""
    moved_at = next((e.at for e in reversed(active.record.entries) if e.event is RequestEvent.MOVE), -math.inf)
    return RunningAnswer(
        active.request.request_id,
        active.record.decode_worker,
        active.num_tokens,
        groups.num_blocks(active.num_tokens + 1),
        len(active.produced),
        max_left=max(0, (active.request.sampling.max_tokens or 0) - len(active.produced)),
        rested_s=now - moved_at,
    )
