"""TTFT and TPOT of one request, and what they are made of: the definitions that everything shown here follows.

TTFT is the time from a call's arrival at the router to its first token. It begins when the edge has read the head of
the call; it ends when the token comes from the worker, which the edge passes on within the same turns of its loop. What
lies outside the router, the network to the client and back, is not in it.

TPOT is (end - first token) / (output tokens - 1). The first token is TTFT's; the end is when the writer of the reply
had passed on the last of the answer, so that the time of a client that reads slowly is in it; of an answer that is not
streamed, when its last token had come. The tokens are those that the client was given; below two there is no TPOT.

ITL, the gap between two consecutive tokens, is not noted for each request: the engine measures it in its steps
(`tandem_engine_inter_token_seconds`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from services.router.dispatch.record import RequestEvent, RequestRecord
from shared.fingerprints import system_fingerprint
from shared.rpc.pb.tandem.v1 import types_pb2

# Read for each entry: a member of an enum takes 0.1 µs by its name.
_MATCHED, _PLACED, _SUBMITTED = RequestEvent.MATCHED, RequestEvent.PLACED, RequestEvent.SUBMITTED
_FIRST_TOKEN, _JOINED, _RETRY = RequestEvent.FIRST_TOKEN, RequestEvent.JOINED, RequestEvent.RETRY
_SWITCHED, _LEFT_ALONE = RequestEvent.SWITCHED, RequestEvent.LEFT_ALONE


class TtftSplit(NamedTuple):
    """Where the time to the first token went, milliseconds; see proto TtftSplit for each part's meaning."""

    queue_ms: float = 0.0
    placement_ms: float = 0.0
    reserve_ms: float = 0.0
    prefix_fetch_ms: float = 0.0
    adapter_ms: float = 0.0
    prefill_queue_ms: float = 0.0
    prefill_compute_ms: float = 0.0
    return_ms: float = 0.0
    ttft_ms: float = 0.0
    ship_exposed_ms: float = 0.0
    first_decode_step_ms: float = 0.0

    @property
    def parts_ms(self) -> dict[str, float]:
        """What adds up to `ttft_ms`, in the order in which it is shown, by name without the unit."""
        return dict(zip(TTFT_PARTS, self, strict=False))


TTFT_PARTS = tuple(field.removesuffix("_ms") for field in TtftSplit._fields[: TtftSplit._fields.index("ttft_ms")])
"""Names of `TtftSplit.parts_ms`, which are the split's first fields."""


NO_SPLIT = TtftSplit()
"""Before the first token."""


def first_token_at(record: RequestRecord) -> float:
    """time.perf_counter() seconds; 0: none came."""
    for entry in record.entries:
        if entry.event is _FIRST_TOKEN or entry.event is _JOINED:
            return entry.at
    return 0.0


def ended_at(record: RequestRecord) -> float:
    """When the core was through with it: at the last token, or at its early end; 0 while it runs."""
    return record.entries[-1].at if record.has_ended else 0.0


def delivered_at(record: RequestRecord) -> float:
    """When the client had taken all; while it still reads, when the last token was there for it."""
    return max(record.delivered_at, ended_at(record))


def ttft_s(record: RequestRecord) -> float | None:
    """None where no token came."""
    first = first_token_at(record)
    return first - record.ask.arrived_at if first else None


def decoded_elsewhere_s(record: RequestRecord) -> float:
    """From the first token until the answer went on with another decode worker for the last time; what the last worker
    reports begins then. 0 where it did not move."""
    moved = (entry.at for entry in reversed(record.entries) if entry.event is _SWITCHED or entry.event is _LEFT_ALONE)
    at = next(moved, 0.0) if record.moves else 0.0
    return max(0.0, at - first_token_at(record)) if at else 0.0


def tpot_s(record: RequestRecord) -> float | None:
    """None below two tokens, and while it runs."""
    first, end = first_token_at(record), delivered_at(record)
    num_tokens = record.num_output_tokens
    if record.outcome:  # beams advance together: only their steps are in `num_output_tokens`
        num_tokens = min(record.num_given_tokens, num_tokens or record.num_given_tokens)
    if not first or not end or num_tokens < 2:
        return None
    return max(0.0, end - first) / (num_tokens - 1)


def ttft_split(record: RequestRecord) -> TtftSplit:
    """The parts of the TTFT in the attempt that brought the first token; what lies before its look-up is in
    `placement_ms`."""
    if isinstance(record.split, TtftSplit):
        return record.split
    split = _split(record)
    if record.has_ended:
        record.split = split
    return split


def _split(record: RequestRecord) -> TtftSplit:
    arrived = matched = placed = reserved = record.ask.arrived_at
    first = exposed_ms = 0.0
    for event, _, at, _, _ in record.entries:
        if first:
            if event is _JOINED:
                exposed_ms = max(0.0, (at - first) * 1e3 - record.first_decode_step_ms)
            if event is _JOINED or event is _RETRY:
                break
        elif event is _MATCHED:
            matched = placed = reserved = at
        elif event is _PLACED:
            placed = reserved = at
        elif event is _SUBMITTED:
            reserved = at if reserved == placed else reserved
        elif event is _FIRST_TOKEN:
            first = at
        elif event is _JOINED:  # the decode worker computed the prompt: one message asked for both
            first, reserved = at, placed
            break
    if not first:
        return NO_SPLIT
    on_worker_ms = record.prefix_fetch_ms + record.adapter_ms + record.prefill_queue_ms + record.prefill_compute_ms
    return TtftSplit(
        queue_ms=(placed - matched) * 1e3,
        placement_ms=(matched - arrived) * 1e3,
        reserve_ms=(reserved - placed) * 1e3,
        prefix_fetch_ms=record.prefix_fetch_ms,
        adapter_ms=record.adapter_ms,
        prefill_queue_ms=record.prefill_queue_ms,
        prefill_compute_ms=record.prefill_compute_ms,
        return_ms=max(0.0, (first - reserved) * 1e3 - on_worker_ms),
        ttft_ms=(first - arrived) * 1e3,
        ship_exposed_ms=exposed_ms,
        first_decode_step_ms=record.first_decode_step_ms,
    )


def system_fingerprint_of(record: RequestRecord) -> str:
    """The fingerprint of the weights that computed the answer; several joined by +, empty before the first token."""
    return "+".join(map(system_fingerprint, record.weights))


def tandem_member(record: RequestRecord, start: Mapping[str, Any] | None = None) -> dict[str, object]:
    """`{"tandem": {...}}`: where the time to the first token went, and which workers served; with what `start_member`
    gave where the chunk is also the choice's first. Beside it OpenAI's `system_fingerprint`, where it is known."""
    named = {"system_fingerprint": name} if (name := system_fingerprint_of(record)) else {}
    return {
        **named,
        "tandem": {
            **(start["tandem"] if start else {}),
            "ttft": {name: round(value, 3) for name, value in ttft_split(record)._asdict().items()},
            "prefill_worker": record.prefill_worker,
            "decode_worker": record.decode_worker,
        },
    }


def ttft_message(record: RequestRecord) -> types_pb2.TtftSplit:
    """Where the time to the first token went."""
    return types_pb2.TtftSplit(**ttft_split(record)._asdict())
