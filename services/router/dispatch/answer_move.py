"""A running answer moves to another decode worker, which begins before the old one ends.

The next worker gets the tokens so far and fetches the sealed blocks from the old one, which streams on. Tokens are
known by their position: the next one repeats those that came meanwhile, and the client gets those alone that it lacks.
Where it would repeat many, it is asked a second time: it has most of the KV then, and computes the newest tokens in one
step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import NamedTuple

from services.router.dispatch.active_request import ActiveRequest
from services.router.dispatch.record import MoveNote, RequestEvent, RequestState
from services.router.dispatch.transitions import HOLDERS, Holder
from services.router.dispatch.worker_commands import AttemptCommands
from services.router.placement.moves import MAX_REPEATED, MoveCause
from services.router.placement.views import Work
from services.router.workers.link import Message, WorkerLink
from shared.errors import DeadlineExceeded, Overloaded, TandemError
from shared.kv.groups import KVGroups
from shared.rpc.pb.tandem.v1 import types_pb2

MOVE_TIMEOUT_S = 30.0
"""A move that has not got a token from the next worker after this time is given up, seconds."""

_ASKS = (RequestEvent.MOVE, RequestEvent.ASKED_ANEW)
"""Each gives the sequence on the next worker a name of its own."""
PREPARING = (RequestState.COPYING, RequestState.CLOSING_UP)
"""States of a move in which both workers have the answer."""


class Seat(NamedTuple):
    """A request's sequence on a decode worker."""

    link: WorkerLink
    name: str
    """The request's on the wire."""

    def leave(self) -> None:
        """Frees it; what still comes of it is dropped."""
        self.link.close(self.name)
        self.link.cancel(self.name)


class AnswerMove:
    """One move: from MOVE until the request decodes again the attempt passes it the messages of both workers."""

    def __init__(
        self,
        active: ActiveRequest,
        seat: Seat,
        target: WorkerLink,
        groups: KVGroups,
        commands: AttemptCommands,
        receive: Callable[[WorkerLink, Message | TandemError], None],
    ) -> None:
        """`seat`: of the answer. `receive` takes the target's messages."""
        self._active = active
        self._target = target
        self._groups = groups
        self._commands = commands
        self._receive = receive
        self._next = Seat(target, "")
        self._position = 0  # of the token that the next worker sends next, among the output tokens
        self._timer: asyncio.TimerHandle | None = None
        self.seat = seat
        """Where the answer is: the next worker's, once it has switched."""

    def begin(self, cause: MoveCause) -> None:
        """Asks the next worker. The answer stays where that one is not there any more."""
        source = self.seat.link
        self._active.record.moves.append(MoveNote(cause, source.name, self._target.name))
        self._active.move(RequestEvent.MOVE, self._target.name)
        late = DeadlineExceeded(f"not moved within {MOVE_TIMEOUT_S:g} s", limit=MOVE_TIMEOUT_S)
        self._timer = asyncio.get_running_loop().call_later(MOVE_TIMEOUT_S, self._receive, self._target, late)
        num_sealed = (self._active.num_tokens - 1) // self._groups.block_size  # the newest token's KV is not computed
        peer = types_pb2.PrefixHolder(address=source.address, num_blocks=num_sealed)
        try:
            self._ask([peer] if num_sealed else [], num_sealed)
        except TandemError as error:
            self.stay(error)

    def take(self, worker: WorkerLink, tokens: types_pb2.SequenceTokens) -> None:
        """New tokens, from either worker."""
        if worker is self._target:
            self._on_next(tokens)
            return
        if tokens.finish_reason:
            self.stay()
        self._active.emit(tokens)

    def stay(self, error: TandemError | None = None) -> None:
        """The answer stays where it is; without an error because it ends there."""
        self._stop_timer()
        self._next.leave()
        self._active.move(RequestEvent.STAYED, self._target.name, error)
        if error is None:
            return
        if isinstance(error, Overloaded):
            self._target.refused()
        self._active.log.warning("request %s stays on %s: %s", self.seat.name, self.seat.link.name, error)

    def left_alone(self, error: TandemError) -> None:
        """The old worker failed: the next one has the answer."""
        self._active.log.warning("request %s continues on %s: %s", self.seat.name, self._target.name, error)
        self._switch(RequestEvent.LEFT_ALONE, error)
        if len(self._active.produced) - self._position > MAX_REPEATED:
            self._ask_anew()

    def end(self) -> None:
        """The attempt is over: frees what the next worker holds, unless the answer is there."""
        self._stop_timer()
        if Holder.NEXT in HOLDERS[self._active.state]:
            self._next.leave()

    # --- the next worker

    def _ask(self, peers: Iterable[types_pb2.PrefixHolder], num_held: int) -> None:
        """Raises WorkerLost. `num_held`: blocks that it need not compute."""
        active, target = self._active, self._target
        name = f"{active.wire_id}.m{sum(entry.event in _ASKS for entry in active.record.entries)}"
        num_cached = num_held * self._groups.block_size
        work = Work.of(max(1, active.num_tokens - num_cached), num_cached)
        num_blocks = self._groups.num_blocks(active.num_tokens + 1)
        was, self._next, self._position = self._next, Seat(target, name), len(active.produced)
        if self.seat is was:
            self.seat = self._next
        target.open(
            name,
            lambda message: self._receive(target, message),
            work,
            num_blocks=num_blocks,
            num_answer_tokens=active.num_tokens,
        )
        command = self._commands.go_on(name)
        command.peers.extend(peers)
        target.reserve(command, active.token_ids)

    def _ask_anew(self) -> None:
        """With the tokens so far; the old worker's blocks have been fetched, or could not be."""
        self._next.leave()
        self._active.move(RequestEvent.ASKED_ANEW, self._target.name)
        self._ask((), self._active.num_tokens // self._groups.block_size)

    def _on_next(self, tokens: types_pb2.SequenceTokens) -> None:
        active = self._active
        self._target.computed(self._next.name)
        begin, end = self._position, self._position + len(tokens.token_ids)
        known = active.produced[begin:end]
        differs = known != list(tokens.token_ids[: len(known)])
        if active.state is RequestState.COPYING and (differs or len(active.produced) - end > MAX_REPEATED):
            try:
                self._ask_anew()
            except TandemError as error:
                self.stay(error)
            return
        if active.state in PREPARING:
            self._switch(RequestEvent.SWITCHED)
        if differs:
            self._ask_anew()
            return
        self._position = end
        if len(known) < len(tokens.token_ids) or tokens.finish_reason:
            active.move(RequestEvent.CAUGHT_UP, self._target.name)
            active.emit(_behind(tokens, len(known)))

    def _switch(self, event: RequestEvent, error: TandemError | None = None) -> None:
        self._stop_timer()
        old, self.seat = self.seat, self._next
        old.leave()
        self._active.move(event, self._target.name, error)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _behind(tokens: types_pb2.SequenceTokens, count: int) -> types_pb2.SequenceTokens:
    """The message without its first tokens."""
    if count:
        del tokens.token_ids[:count]
        del tokens.logprobs[:count]
        known = max(0, tokens.num_accepted - len(tokens.token_ids))  # counted with the old worker's tokens
        tokens.num_guessed -= known
        tokens.num_accepted -= known
    return tokens
