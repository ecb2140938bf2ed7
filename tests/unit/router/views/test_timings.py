"""TTFT and TPOT: where they begin and end, and that the parts leave no gap."""

from __future__ import annotations

import pytest

from services.router.dispatch.record import FINISHED, Ask, Failure, RequestRecord
from services.router.dispatch.record import RequestEvent as E
from services.router.dispatch.record import RequestState as S
from services.router.placement.decision import Choice
from services.router.views.timings import NO_SPLIT, delivered_at, ended_at, first_token_at, tpot_s, ttft_s, ttft_split

HAND_OFF = [
    (E.ACCEPTED, S.QUEUED, 10.0625),
    (E.MATCHED, S.QUEUED, 10.125),
    (E.CHOOSING, S.QUEUED, 10.25),
    (E.PLACED, S.RESERVED, 10.375),
    (E.SUBMITTED, S.PREFILLING, 10.875),
    (E.FIRST_TOKEN, S.SHIPPING, 12.875),
]


def record(*entries: tuple[E, S, float], **fields: object) -> RequestRecord:
    made = RequestRecord(Ask("r", arrived_at=10.0), **fields)  # type: ignore[arg-type]
    for event, state, at in entries:
        made.add(event, state, at=at)
    return made


def test_the_time_to_the_first_token_is_split_without_a_gap():
    made = record(*HAND_OFF, (E.JOINED, S.DECODING, 13.0), prefix_fetch_ms=100, prefill_queue_ms=200)
    made.adapter_ms = 50
    made.prefill_compute_ms, made.first_decode_step_ms = 300, 40
    split = ttft_split(made)
    assert (split.placement_ms, split.queue_ms, split.reserve_ms) == (125, 250, 500)
    assert (split.prefix_fetch_ms, split.prefill_queue_ms, split.prefill_compute_ms) == (100, 200, 300)
    assert (split.adapter_ms, split.return_ms, split.ttft_ms, ttft_s(made)) == (50, 1350, 2875, 2.875)
    assert sum(split.parts_ms.values()) == split.ttft_ms
    assert (split.first_decode_step_ms, split.ship_exposed_ms) == (40, 85)


def test_a_worker_whose_clock_says_more_than_passed_makes_no_part_negative():
    made = record(*HAND_OFF, (E.JOINED, S.DECODING, 13.0), prefill_compute_ms=9e6, first_decode_step_ms=9e6)
    assert (ttft_split(made).return_ms, ttft_split(made).ship_exposed_ms) == (0, 0)


def test_before_the_first_token_there_is_nothing_to_split():
    made = record(*HAND_OFF[:-1])
    assert (ttft_split(made), ttft_s(made), tpot_s(made), first_token_at(made), ended_at(made)) == (
        NO_SPLIT, None, None, 0.0, 0.0,
    )  # fmt: skip


def test_a_decode_worker_that_computes_the_prompt_is_asked_once():
    made = record(*HAND_OFF[:-1], (E.JOINED, S.DECODING, 12.875))
    split = ttft_split(made)
    assert (split.reserve_ms, split.return_ms, split.ship_exposed_ms) == (0, 2500, 0)


def test_attempts_that_brought_no_token_lie_before_the_last_look_up_and_later_ones_change_nothing():
    again = [(event, state, at + 5.0) for event, state, at in HAND_OFF[1:]]
    made = record(*HAND_OFF[:-1], (E.RETRY, S.QUEUED, 11.0), *again)
    split = ttft_split(made)
    assert (split.placement_ms, split.queue_ms, split.reserve_ms, split.ttft_ms) == (5125, 250, 500, 7875)
    later = [(event, state, at + 10.0) for event, state, at in HAND_OFF[1:]]
    for event, state, at in ((E.RETRY, S.QUEUED, 18.0), *later, (E.JOINED, S.DECODING, 23.0)):
        made.add(event, state, at=at)
    assert ttft_split(made) == split  # the two tokens came from two attempts: no hand-off lay between them


def test_a_prefill_worker_that_is_replaced_is_part_of_the_same_hand_off():
    made = record(
        *HAND_OFF, (E.SENDER_LOST, S.RESUMING, 13.0), (E.SUBMITTED, S.SHIPPING, 13.5), (E.JOINED, S.DECODING, 13.875)
    )
    assert (ttft_split(made).reserve_ms, ttft_split(made).ship_exposed_ms) == (500, 1000)


@pytest.mark.parametrize(
    ("num_output", "num_given", "delivered", "expected"),
    [
        (11, None, 0.0, 0.1),  # the client still reads
        (11, 11, 13.875, 0.1),
        (11, 11, 14.875, 0.2),  # it took its time
        (11, 6, 13.875, 0.2),  # a stop string cut off the others
        (1, 1, 14.0, None),
    ],
)
def test_tpot_ends_when_the_client_had_all_and_counts_what_it_was_given(num_output, num_given, delivered, expected):
    made = record(*HAND_OFF, (E.JOINED, S.DECODING, 13.0), (E.FINISH, S.FINISHED, 13.875), num_output_tokens=num_output)
    if num_given is not None:
        made.close(FINISHED, None, num_given)
    made.delivered_at = delivered
    assert tpot_s(made) == (None if expected is None else pytest.approx(expected))
    assert delivered_at(made) == max(13.875, delivered)


def test_the_newest_attempt_names_the_workers():

    made = record(*HAND_OFF[:4], choices=[Choice("d0", "p0")])
    assert (made.decode_worker, made.prefill_worker) == ("d0", "p0")
    made.num_failures += 1
    made.add(E.SENDER_LOST, S.RESERVED, "p1", Failure("worker_lost", "gone", 503))
    assert made.prefill_worker == "p1"
    made.add(E.RETRY, S.QUEUED)
    made.choices.append(Choice("d1", "p2"))
    made.add(E.PLACED, S.RESERVED, "d1")
    assert (made.decode_worker, made.prefill_worker) == ("d1", "p2")
    made.choices.append(Choice("d1", None))
    assert made.prefill_worker == ""
