"""An attempt's answers to its workers' messages, one by one, between links that record their commands, without a
network."""

from __future__ import annotations

import asyncio

import pytest

from services.router.dispatch.record import RequestState
from services.router.placement.views import NO_WORK, Work
from shared.errors import Overloaded, TransferFailed, WorkerLost
from tests.unit.router.dispatch.attempt_rig import AHEAD, PROMPT, Rig


async def test_each_worker_is_charged_with_its_part() -> None:
    rig = Rig()
    rig.attempt.open(Work(5), 9)
    assert rig.decode.calls == [("open", "r#1.1", NO_WORK, 9)]
    assert rig.prefill.calls == [("open", "r#1.1", Work(5), 0)]
    alone = Rig(collocated=True)
    alone.attempt.open(Work(5), 9)
    assert alone.decode.calls == [("open", "r#1.1", Work(5), 9)]
    for each in (rig, alone):
        each.attempt.release()
        each.running.cancel()


async def test_only_who_computes_the_prompt_is_told_of_peers_and_only_of_better_ones() -> None:
    rig = Rig()
    await rig.submitted()
    [reserve], [(submit, token_ids)] = rig.decode.sent, rig.prefill.sent
    assert (reserve.prefill_here, list(reserve.peers)) == (False, [])
    assert (submit.ticket, list(submit.needed_blocks), submit.transfer_address) == (7, [1, 2], b"at d0")
    assert (list(submit.peers), token_ids) == ([], list(PROMPT))  # p0 has the longest hit itself
    alone = Rig(collocated=True)
    await alone.submitted()
    [reserve] = alone.decode.sent
    assert reserve.prefill_here
    assert [(peer.address, peer.num_blocks) for peer in reserve.peers] == [("p0:1", 3)]
    for each in (rig, alone):
        each.attempt.release()
        each.running.cancel()


async def test_a_second_reserved_changes_nothing() -> None:
    rig = Rig()
    await rig.submitted()
    rig.reserved()
    assert len(rig.prefill.sent) == 1
    rig.attempt.release()
    rig.running.cancel()


@pytest.mark.parametrize(("num_cached", "uncached"), [(0, 100), (60, 40), (99, 1), (100, 1), (500, 1)])
async def test_the_predictor_learns_what_was_computed_at_least_one_token(num_cached: int, uncached: int) -> None:
    rig = Rig()
    await rig.submitted()
    rig.attempt._placed_at -= 10.0
    rig.prefilled(1, num_cached_tokens=num_cached, prefill_queue_ms=1000, prefill_compute_ms=2000)
    assert rig.predictor.seen == [("prefill", AHEAD, Work.of(uncached, 100 - uncached), 3.0)]
    [hand_off_s] = rig.predictor.hand_offs_s
    assert 7.0 <= hand_off_s < 60.0
    assert rig.prefill.calls == [("computed", "r#1.1")]
    alone = Rig(collocated=True)
    await alone.submitted()
    alone.decoded(1, num_cached_tokens=num_cached, prefill_compute_ms=2000)
    assert alone.predictor.seen == [("here", AHEAD, Work.of(uncached, 100 - uncached), 2.0)]
    assert alone.predictor.hand_offs_s == []
    for each in (rig, alone):
        each.attempt.release()
        each.running.cancel()


async def test_a_worker_that_says_it_took_longer_than_passed_teaches_no_negative_hand_off() -> None:
    rig = Rig()
    await rig.submitted()
    rig.prefilled(1, prefill_compute_ms=9e6)
    assert rig.predictor.hand_offs_s == [0.0]
    rig.attempt.release()
    rig.running.cancel()


async def test_a_worker_that_names_no_time_teaches_nothing() -> None:
    rig = Rig()
    await rig.submitted()
    rig.prefilled(1)
    assert (rig.predictor.seen, rig.predictor.hand_offs_s) == ([], [])
    rig.attempt.release()
    rig.running.cancel()


async def test_the_second_token_completes_the_split_and_no_later_one_does() -> None:
    rig = Rig()
    await rig.submitted()
    rig.prefilled(1)
    rig.decoded(2, first_decode_step_ms=40)
    rig.decoded(3, first_decode_step_ms=90)
    assert rig.active.record.first_decode_step_ms == 40
    assert rig.active.produced == [1, 2, 3]
    assert ("close", "r#1.1") in rig.prefill.calls
    rig.attempt.release()
    rig.running.cancel()


async def test_steps_that_overtake_the_first_token_wait_for_it() -> None:
    rig = Rig()
    await rig.submitted()
    rig.decoded(2)
    rig.decoded(3)
    assert rig.active.produced == []
    rig.prefilled(1)
    assert rig.active.produced == [1, 2, 3]
    assert rig.active.state is RequestState.DECODING
    rig.attempt.release()
    rig.running.cancel()


@pytest.mark.parametrize(
    ("error", "by_prefill", "suspects"),
    [
        (WorkerLost("gone"), True, {"p0"}),
        (WorkerLost("gone"), False, {"d0"}),
        (TransferFailed("broken"), True, {"p0", "d0"}),
        (TransferFailed("broken"), False, {"p0", "d0"}),
        (Overloaded("full"), True, {"p0"}),
    ],
)
async def test_of_a_transfer_either_side_is_suspected_else_who_reported(error, by_prefill: bool, suspects) -> None:
    rig = Rig()
    await rig.submitted()
    rig.attempt.receive(rig.prefill if by_prefill else rig.decode, error)  # type: ignore[arg-type]
    assert await rig.ended() is error
    assert rig.attempt.suspects == suspects
    rig.attempt.refuse()
    assert {link.name for link in (rig.decode, rig.prefill) if ("refused",) in link.calls} == suspects


async def test_a_failed_transfer_without_a_prefill_worker_charges_the_decode_worker() -> None:
    rig = Rig(collocated=True)
    await rig.submitted()
    rig.attempt.receive(rig.decode, TransferFailed("a peer's prefix"))  # type: ignore[arg-type]
    assert isinstance(await rig.ended(), TransferFailed)
    assert rig.attempt.suspects == {"d0"}


@pytest.mark.parametrize(("begun", "silent"), [(False, "p0"), (True, "d0")])
async def test_who_is_silent_is_who_owns_the_phase(begun: bool, silent: str) -> None:
    rig = Rig(timeout_s=1000.0)
    await rig.submitted()
    if begun:
        rig.prefilled(1)
    rig.attempt._check_silence()  # not yet
    assert not rig.attempt._over.done()
    rig.attempt._heard_at -= 1000.0
    rig.attempt._check_silence()
    error = await rig.ended()
    assert isinstance(error, WorkerLost)
    assert error.details["limit"] == 1000.0
    assert rig.attempt.suspects == {silent}


async def test_a_message_puts_the_time_of_silence_off() -> None:
    rig = Rig(timeout_s=1000.0)
    await rig.submitted()
    rig.attempt._heard_at -= 1000.0
    rig.prefilled(1)
    rig.attempt._check_silence()
    assert not rig.attempt._over.done()
    rig.attempt.release()
    rig.running.cancel()


async def test_what_comes_after_the_end_is_dropped() -> None:
    rig = Rig()
    await rig.submitted()
    rig.attempt.receive(rig.prefill, WorkerLost("gone"))  # type: ignore[arg-type]
    rig.prefilled(1)
    rig.attempt.receive(rig.decode, WorkerLost("later"))  # type: ignore[arg-type]
    assert str(await rig.ended()) == "gone"
    assert rig.active.produced == []


@pytest.mark.parametrize(
    ("phase", "to_prefill", "to_decode"),
    [
        ("placed", None, None),
        ("reserved", None, {"peer": ""}),
        ("prefilling", {"peer": "d0"}, {"peer": "p0"}),
        ("shipping", {"peer": "d0"}, {"peer": "p0"}),
        ("decoding", None, {"peer": ""}),
    ],
)
async def test_an_early_end_tells_exactly_those_who_hold_something(phase: str, to_prefill, to_decode) -> None:
    rig = Rig()
    if phase != "placed":
        await asyncio.sleep(0)
    if phase in ("prefilling", "shipping", "decoding"):
        rig.reserved()
    if phase in ("shipping", "decoding"):
        rig.prefilled(1)
    if phase == "decoding":
        rig.decoded(2)
    rig.attempt.release()
    told = [next((call[2] for call in link.calls if call[0] == "cancel"), None) for link in (rig.prefill, rig.decode)]
    assert told == [to_prefill, to_decode]
    assert ("close", "r#1.1") in rig.prefill.calls
    assert ("close", "r#1.1") in rig.decode.calls
    rig.running.cancel()


async def test_a_lost_worker_is_neither_told_nor_waited_for() -> None:
    rig = Rig()
    await rig.submitted()
    rig.prefill.connected = False
    rig.attempt.release()
    assert ("cancel", "r#1.1", {"peer": ""}) in rig.decode.calls
    assert not any(call[0] == "cancel" for call in rig.prefill.calls)
    other = Rig()
    await other.submitted()
    other.decode.connected = False
    other.attempt.release()
    assert ("cancel", "r#1.1", {"peer": ""}) in other.prefill.calls
    for each in (rig, other):
        each.running.cancel()


async def test_a_decode_worker_lost_before_the_submit_is_noticed() -> None:
    rig = Rig()
    rig.decode.welcome = None
    await rig.submitted()
    assert isinstance(await rig.ended(), WorkerLost)
    assert rig.prefill.sent == []
