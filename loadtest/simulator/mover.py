"""Running answers that move to other decode workers: what `dispatch/mover.py` and `dispatch/answer_move.py` do, without
failures; the policy is the router's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from loadtest.simulator.fleet import World
from loadtest.simulator.request import SimRequest
from loadtest.simulator.worker import Calls, Progress, Worker
from services.router.placement.commitments import Ledger
from services.router.placement.lengths import AnswerLife
from services.router.placement.moves import (
    LOOK_EVERY_S,
    MAX_REPEATED,
    Desk,
    MoveCause,
    MoveLimits,
    MovePolicy,
    RunningAnswer,
)
from services.router.placement.split import SplitController
from services.router.placement.views import Pool, Work

COUNT_EVERY_S = 0.5


@dataclass(slots=True)
class _Answer:
    """A running answer."""

    request: SimRequest
    name: str
    """Name of its sequence."""
    life: AnswerLife
    num_asks: int = 0
    """Workers to which it was to move, so far."""
    moved_s: float = -math.inf
    """When its last move began."""
    move: _Move | None = None


@dataclass(slots=True)
class _Move:
    target: Worker
    name: str = ""
    num_tokens: int = 0
    """With which the target was asked."""
    is_second: bool = False


@dataclass(slots=True)
class SimMover:
    """Looks which answers should move, and has them moved."""

    world: World
    workers: Mapping[str, Worker]
    pool: Pool
    """The workers that decode."""
    ledger: Callable[[str], Ledger]
    split: SplitController
    policy: MovePolicy
    on_done: Callable[[SimRequest], None]
    """An answer that has moved ended."""
    num_moved: int = 0
    """Answers that went on elsewhere, so far."""
    _answers: dict[str, _Answer] = field(default_factory=dict)
    _looked_s: float = -math.inf
    _counted_s: float = -math.inf
    _is_due: bool = False

    @classmethod
    def of(
        cls,
        world: World,
        workers: Mapping[str, Worker],
        pool: Pool,
        ledger: Callable[[str], Ledger],
        split: SplitController,
        tpot_target_s: float,
        on_done: Callable[[SimRequest], None],
    ) -> SimMover:
        """With the router's limits."""
        policy = MovePolicy(MoveLimits(), tpot_target_s if tpot_target_s < math.inf else 0.0)
        return cls(world, workers, pool, ledger, split, policy, on_done)

    def begin(self, request: SimRequest) -> None:
        """An answer runs where it was placed."""
        self._answers[request.name] = _Answer(request, request.name, self.split.demand.begin())

    def end(self, request: SimRequest) -> None:
        """An answer has ended; where it was about to move it does not any more."""
        answer = self._answers.pop(request.name, None)
        if answer is not None:
            answer.life.ended(request.num_output_tokens)
            if answer.move is not None:
                self._leave(answer.move, request)

    def count(self) -> None:
        """How far the answers are. The router hears of each token; here once a second is enough."""
        now_s = self.world.clock.now_s
        if now_s < self._counted_s + COUNT_EVERY_S:
            return
        self._counted_s = now_s
        for answer in self._answers.values():
            num_tokens = self.workers[answer.request.decode].num_tokens(answer.name)
            answer.life.at(num_tokens - answer.request.num_prompt_tokens)

    def look(self) -> None:
        """Begins the moves that are due; see `Mover`."""
        now_s = self.world.clock.now_s
        if self._is_due:
            return
        if now_s < self._looked_s + LOOK_EVERY_S:
            self._look_later(self._looked_s + LOOK_EVERY_S - now_s)
            return
        self._looked_s = now_s
        vacated, preferred = self.split.vacated(now_s), self.split.split.decodes
        desks = [
            Desk.of(view, MoveCause.PREFERENCE if view.name in vacated else None, preferred=preferred)
            for view in self.pool
        ]
        sources = self.policy.sources(desks, now_s)
        if not sources:
            return
        under_way = [(a.request.decode, a.move.target.name) for a in self._answers.values() if a.move is not None]
        there = [a for a in self._answers.values() if a.move is None and a.request.decode in sources]
        running = [found for answer in there if (found := self._running(answer, now_s)) is not None]
        for name, target, _ in self.policy.choose(sources, desks, running, under_way, now_s, num_groups=1):
            self._move(self._answers[name], self.workers[target])
        if running:
            self._look_later(LOOK_EVERY_S)

    def _look_later(self, wait_s: float) -> None:
        def look() -> None:
            self._is_due = False
            self.look()

        if self._answers:
            self._is_due = True
            self.world.clock.after(wait_s, look)

    def _running(self, answer: _Answer, now_s: float) -> RunningAnswer | None:
        request, so_far = answer.request, self._progress(answer)
        if so_far is None:
            return None
        num_output = so_far.num_tokens - request.num_prompt_tokens
        return RunningAnswer(
            request.name,
            request.decode,
            so_far.num_tokens,
            self._num_blocks(so_far.num_tokens),
            num_output,
            max_left=request.num_output_tokens - num_output,
            rested_s=now_s - answer.moved_s,
        )

    def _progress(self, answer: _Answer) -> Progress | None:
        return self.workers[answer.request.decode].progress(answer.name)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-(num_tokens + 1) // self.world.index.block_size)

    # --- one move

    def _move(self, answer: _Answer, target: Worker) -> None:
        so_far = self._progress(answer)
        if so_far is not None:
            answer.moved_s, answer.move = self.world.clock.now_s, _Move(target)
            num_cached = len(so_far.hashes) * self.world.index.block_size
            self._ask(answer, answer.move, so_far, num_cached, self.workers[answer.request.decode])

    def _ask(
        self, answer: _Answer, move: _Move, so_far: Progress, num_cached: int, source: Worker | None = None
    ) -> None:
        request, target, now_s = answer.request, move.target, self.world.clock.now_s
        answer.num_asks += 1
        move.name, move.num_tokens = f"{request.name}.m{answer.num_asks}", so_far.num_tokens
        self.ledger(target.name).commit(
            request.name,
            Work.of(max(1, so_far.num_tokens - num_cached), num_cached),
            num_blocks=self._num_blocks(so_far.num_tokens),
            num_answer_tokens=so_far.num_tokens,
        )
        self.ledger(target.name).sent(request.name, now_s)
        name = move.name
        calls = Calls(
            lambda *_: None,
            lambda _: self._on_next(answer, name),
            lambda _: self._on_next_done(answer, name),
        )
        self.world.clock.after(target.spec.message_s, target.go_on, request, name, so_far, calls, source)

    def _on_next(self, answer: _Answer, name: str) -> None:
        """The first token on the worker to which the answer moves has come."""
        move, request = answer.move, answer.request
        if move is None or move.name != name or request.name not in self._answers:
            return
        self.ledger(move.target.name).computed(request.name)
        so_far = self._progress(answer)
        if so_far is None:
            return  # the message that it has ended is on its way
        if not move.is_second and so_far.num_tokens - (move.num_tokens + 1) > MAX_REPEATED:
            self._leave(move, request)
            move.is_second = True
            self._ask(
                answer, move, so_far, so_far.num_tokens // self.world.index.block_size * self.world.index.block_size
            )
            return
        self.workers[request.decode].leave(answer.name)
        self.ledger(request.decode).release(request.name)
        request.decode, answer.name, answer.move = move.target.name, name, None
        self.num_moved += 1

    def _on_next_done(self, answer: _Answer, name: str) -> None:
        if answer.name == name and answer.request.name in self._answers:
            self.on_done(answer.request)

    def _leave(self, move: _Move, request: SimRequest) -> None:
        move.target.leave(move.name)
        self.ledger(move.target.name).release(request.name)
