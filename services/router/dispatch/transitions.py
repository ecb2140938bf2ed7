"""What each event of a request leads to, and who holds memory for it in each state; the states themselves are in
`record.py`."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from services.router.dispatch.record import RequestEvent, RequestState
from shared.errors import Internal


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

    __hash__ = object.__hash__  # looked for in sets several times a request: Enum's own is written in Python


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

HELD = (_S.REASSIGNING_HELD, _S.RESUMING_HELD)
"""Nothing is submitted before it is known which workers died together."""
ASKED_AGAIN = (_S.REASSIGNING, _S.RESUMING, *HELD)
"""The decode worker is asked what it still needs of the next prefill worker."""
AWAITS_FIRST_TOKEN = (_S.REASSIGNING, _S.REASSIGNING_HELD)
HAS_FIRST_TOKEN = (_S.SHIPPING, _S.RESUMING, _S.RESUMING_HELD)
UNSUBMITTED = (_S.RESERVED, *ASKED_AGAIN)
"""No prefill worker that is alive knows of the request."""


def after(state: RequestState, event: RequestEvent) -> RequestState:
    """The state that the event leads to; raises Internal where the table has no such transition."""
    following = TRANSITIONS[state].get(event)
    if following is None:
        raise Internal(f"a request that is {state.value} cannot take the event {event.value}")
    return following
