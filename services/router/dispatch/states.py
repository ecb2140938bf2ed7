"""The states of a request in the router, their transitions, and the holders of its memory in each.

    queued ──► reserved ──► prefilling ──► shipping ──► decoding ──► finished
      ▲           │             │             │            │
      └───────────┴── retry ────┴─────────────┴────────────┘     failed, cancelled: from each of the living ones

A prefill worker that is lost costs no retry where another one can serve the same reservation: from prefilling to
reassigning, from shipping to resuming, until the decode worker has said which blocks it still needs. Where its process
died, the request is held in either state until it is known which other workers died with it.

A request whose decode worker computes the prompt itself goes from prefilling to decoding: nothing is shipped. The
answer may also end with its first token.

A running answer may move to another decode worker, which begins before the old one ends:

    decoding ──► copying ──► closing_up ──► repeating ──► decoding
        ▲           │            │              ▲
        └── stayed ─┴────────────┘              └── from copying too: the old worker is lost, or the new one is quick

A state names the holders of memory, and so the workers that a failure is charged to and that need a message about an
early end: the loss of a worker that holds nothing of a request does not touch the request."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from shared.errors import Internal


class RequestState(Enum):
    """Where a request is."""

    QUEUED = "queued"
    """In the admission queue, or on its way there."""
    RESERVED = "reserved"
    """Workers are chosen; the decode worker is asked for blocks."""
    PREFILLING = "prefilling"
    """The prompt is being computed; blocks that are sealed are on their way already."""
    OVERTAKEN = "overtaken"
    """The decode worker has joined the request to its batch and sent tokens, which wait in the router: the first token
    is still on its way from the prefill worker."""
    SHIPPING = "shipping"
    """The client has the first token; the last blocks and the trailer are on their way."""
    REASSIGNING = "reassigning"
    """The prefill worker is lost before the first token; the decode worker is asked what it still needs."""
    RESUMING = "resuming"
    """The client has the first token, the prefill worker is lost; the decode worker is asked what it still needs."""
    REASSIGNING_HELD = "reassigning_held"
    """As REASSIGNING, after a death: no prefill worker gets the prompt before every other worker was heard from."""
    RESUMING_HELD = "resuming_held"
    """As RESUMING, after a death: no prefill worker gets the prompt before every other worker was heard from."""
    DECODING = "decoding"
    """The decode worker has joined the request to its batch: it has every block, and the prefill worker is out."""
    COPYING = "copying"
    """The answer runs on its decode worker, and the next one prepares to continue it: fetches its blocks, computes the
    rest."""
    CLOSING_UP = "closing_up"
    """As COPYING: the next worker has all but the newest tokens, and was asked anew with these."""
    REPEATING = "repeating"
    """The answer runs on the next worker alone, which has not sent a token yet that the client lacks."""
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    __hash__ = object.__hash__  # a key of tables that are read several times a request: Enum's own is written in Python

    @property
    def ended(self) -> bool:
        """No event is expected any more."""
        return not TRANSITIONS[self]


class RequestEvent(Enum):
    """What moves a request from state to state."""

    PLACED = "placed"
    """Workers are chosen, and the decode worker is asked for blocks."""
    SUBMITTED = "submitted"
    """The prompt was sent to the worker that computes it."""
    FIRST_TOKEN = "first_token"
    """The first token came: from the prefill worker, or where that is lost from the decode worker's trailer."""
    SENDER_LOST = "sender_lost"
    """The prefill worker is lost, another one is to serve the same reservation."""
    OVERTOOK = "overtook"
    """The decode worker's tokens came before the first one."""
    HELD = "held"
    """The lost prefill worker died with the request: its successor may have died with it."""
    ALL_HEARD = "all_heard"
    """Every other worker was heard from since that death."""
    JOINED = "joined"
    """The decode worker sent its first tokens."""
    MOVE = "move"
    """The answer is to continue on another decode worker, which is asked for it."""
    ASKED_ANEW = "asked_anew"
    """The next worker is asked anew, with the tokens so far: it would repeat too many of them, or differs in one."""
    SWITCHED = "switched"
    """The next worker answered: the old one is out."""
    LEFT_ALONE = "left_alone"
    """The old worker failed while the next one prepared: that one continues."""
    STAYED = "stayed"
    """The move was given up: the next worker failed, or the answer ends where it is."""
    CAUGHT_UP = "caught_up"
    """The next worker sent the first token that the client lacked."""
    RETRY = "retry"
    """The attempt failed in a way that other workers may not: it is queued again."""
    FINISH = "finish"
    """The last token came."""
    FAIL = "fail"
    CANCEL = "cancel"
    """The client left, or a stop string was found."""

    # Moments within a state.
    ACCEPTED = "accepted"
    """The core has taken it."""
    MATCHING = "matching"
    """The index is asked where its prefix lies."""
    MATCHED = "matched"
    """The place of its prefix is known, or will not be; it enters the queue."""
    WAITED = "waited"
    """No worker could start it at once: it stays in the queue."""
    CHOOSING = "choosing"
    """The choice of workers that succeeded began."""
    FULL = "full"
    """Refused: the queue has no room."""
    LATE = "late"
    """Refused: its first token would come too late."""
    TIMEOUT = "timeout"
    """Refused at the end of its time in the queue."""

    __hash__ = object.__hash__  # as above


class Holder(Enum):
    """A holder of memory for a request."""

    QUEUE = "queue"
    """The admission queue, within its byte limit; released when the request leaves the queue, for any reason."""
    DECODE = "decode"
    """The decode worker: reserved blocks, then the sequence; given back at its last token, or by a Cancel."""
    PREFILL = "prefill"
    """The prefill worker: the sequence, then the blocks not yet sent; given back by the trailer, or by a Cancel."""
    NEXT = "next"
    """The decode worker that the answer moves to: a sequence of its own; given back by a Cancel."""


_S, _E = RequestState, RequestEvent
_EXITS = {_E.FAIL: _S.FAILED, _E.CANCEL: _S.CANCELLED}
_EXITS_OF_AN_ATTEMPT = {_E.RETRY: _S.QUEUED, **_EXITS}

TRANSITIONS: Mapping[RequestState, Mapping[RequestEvent, RequestState]] = {
    _S.QUEUED: {_E.PLACED: _S.RESERVED, **_EXITS},
    _S.RESERVED: {_E.SUBMITTED: _S.PREFILLING, _E.SENDER_LOST: _S.RESERVED, **_EXITS_OF_AN_ATTEMPT},
    _S.PREFILLING: {
        _E.FIRST_TOKEN: _S.SHIPPING,
        _E.OVERTOOK: _S.OVERTAKEN,
        _E.JOINED: _S.DECODING,
        _E.SENDER_LOST: _S.REASSIGNING,
        **_EXITS_OF_AN_ATTEMPT,
    },
    _S.OVERTAKEN: {
        _E.FIRST_TOKEN: _S.SHIPPING,
        _E.SENDER_LOST: _S.REASSIGNING,
        **_EXITS_OF_AN_ATTEMPT,
    },
    _S.SHIPPING: {
        _E.JOINED: _S.DECODING,
        _E.FINISH: _S.FINISHED,
        _E.SENDER_LOST: _S.RESUMING,
        **_EXITS_OF_AN_ATTEMPT,
    },
    _S.REASSIGNING: {
        _E.SUBMITTED: _S.PREFILLING,
        _E.FIRST_TOKEN: _S.RESUMING,
        _E.OVERTOOK: _S.REASSIGNING,
        _E.SENDER_LOST: _S.REASSIGNING,
        _E.HELD: _S.REASSIGNING_HELD,
        **_EXITS_OF_AN_ATTEMPT,
    },
    _S.REASSIGNING_HELD: {
        _E.FIRST_TOKEN: _S.RESUMING_HELD,
        _E.OVERTOOK: _S.REASSIGNING_HELD,
        _E.SENDER_LOST: _S.REASSIGNING_HELD,
        _E.ALL_HEARD: _S.REASSIGNING,
        **_EXITS_OF_AN_ATTEMPT,
    },
    _S.RESUMING: {
        _E.SUBMITTED: _S.SHIPPING,
        _E.JOINED: _S.DECODING,
        _E.SENDER_LOST: _S.RESUMING,
        _E.HELD: _S.RESUMING_HELD,
        **_EXITS_OF_AN_ATTEMPT,
    },
    _S.RESUMING_HELD: {
        _E.JOINED: _S.DECODING,
        _E.SENDER_LOST: _S.RESUMING_HELD,
        _E.ALL_HEARD: _S.RESUMING,
        **_EXITS_OF_AN_ATTEMPT,
    },
    _S.DECODING: {_E.FINISH: _S.FINISHED, _E.MOVE: _S.COPYING, **_EXITS_OF_AN_ATTEMPT},
    _S.COPYING: {
        _E.ASKED_ANEW: _S.CLOSING_UP,
        _E.SWITCHED: _S.REPEATING,
        _E.LEFT_ALONE: _S.REPEATING,
        _E.STAYED: _S.DECODING,
        **_EXITS_OF_AN_ATTEMPT,
    },
    _S.CLOSING_UP: {
        _E.SWITCHED: _S.REPEATING,
        _E.LEFT_ALONE: _S.REPEATING,
        _E.STAYED: _S.DECODING,
        **_EXITS_OF_AN_ATTEMPT,
    },
    _S.REPEATING: {_E.ASKED_ANEW: _S.REPEATING, _E.CAUGHT_UP: _S.DECODING, **_EXITS_OF_AN_ATTEMPT},
    _S.FINISHED: {},
    _S.FAILED: {},
    _S.CANCELLED: {},
}
"""What each event leads to; an event that a state does not list is a bug."""

HOLDERS: Mapping[RequestState, frozenset[Holder]] = {
    _S.QUEUED: frozenset({Holder.QUEUE}),
    _S.RESERVED: frozenset({Holder.DECODE}),
    _S.PREFILLING: frozenset({Holder.DECODE, Holder.PREFILL}),
    _S.OVERTAKEN: frozenset({Holder.DECODE, Holder.PREFILL}),
    _S.SHIPPING: frozenset({Holder.DECODE, Holder.PREFILL}),
    _S.REASSIGNING: frozenset({Holder.DECODE}),
    _S.REASSIGNING_HELD: frozenset({Holder.DECODE}),
    _S.RESUMING: frozenset({Holder.DECODE}),
    _S.RESUMING_HELD: frozenset({Holder.DECODE}),
    _S.DECODING: frozenset({Holder.DECODE}),
    _S.COPYING: frozenset({Holder.DECODE, Holder.NEXT}),
    _S.CLOSING_UP: frozenset({Holder.DECODE, Holder.NEXT}),
    _S.REPEATING: frozenset({Holder.DECODE}),  # which is the next worker from then on
    # Both workers have seen the last token, and free what they hold by themselves.
    _S.FINISHED: frozenset(),
    _S.FAILED: frozenset(),
    _S.CANCELLED: frozenset(),
}
"""The holders of memory in each state: an early end is sent to exactly these."""


def after(state: RequestState, event: RequestEvent) -> RequestState:
    """The state that the event leads to; raises Internal where the table has no such transition."""
    following = TRANSITIONS[state].get(event)
    if following is None:
        raise Internal(f"a request that is {state.value} cannot take the event {event.value}")
    return following
