"""The newest ended requests, bounded."""

from __future__ import annotations

from types import SimpleNamespace

from services.router.admission.blocked import Cause
from services.router.dispatch.record import FINISHED
from services.router.status import observer
from services.router.views.attribution.ring import EndedRequests
from services.router.views.attribution.verdict import Targets
from tests.unit.router.views.attribution.requests import ended


def filled(limit: int, number: int) -> EndedRequests:
    ring = EndedRequests(limit, Targets(0.5, 0.05))
    for at in range(number):
        ring.add(ended(request_id=f"r{at}", ended_s=100.0 + at))
    return ring


def test_only_the_newest_are_kept_and_a_window_says_how_far_it_reaches():
    ring = filled(10, 25)
    assert len(ring) == 10
    assert [entry.ask.request_id for entry, _ in ring.newest(3, 125.0)] == ["r24", "r23", "r22"]
    assert len(ring.within(60.0, 125.0)) == 10
    assert ring.reach_s(60.0, 125.0) == 10.0
    assert ring.reach_s(5.0, 125.0) == 5.0
    assert filled(100, 25).reach_s(60.0, 125.0) == 60.0
    assert ring.find("r3", 125.0) is None
    assert ring.find("r24", 125.0)[0].ask.request_id == "r24"


def test_several_models_are_counted_over_the_time_that_all_of_their_rings_reach(monkeypatch):
    monkeypatch.setattr(observer.time, "perf_counter", lambda: 125.0)
    rings = [filled(10, 25), filled(100, 25)]
    models = [SimpleNamespace(requests=SimpleNamespace(ended=ring), used_fleet=lambda: None) for ring in rings]
    window = observer.GoodputView(models).window(60.0)  # type: ignore[arg-type]
    assert (window.window_s, window.num_requests) == (10.0, 20), "not the other ring's 25"


def test_a_window_holds_what_ended_within_it():
    ring = filled(100, 25)
    assert [entry.ask.request_id for entry, _ in ring.within(2.5, 125.0)] == ["r24", "r23"]


def test_a_client_that_still_reads_may_turn_a_good_request_into_a_lost_one():
    ring = EndedRequests(10, Targets(0.5, 0.05))
    reading = ended(delivered_at=0.0)
    ring.add(reading)
    assert ring.newest(1, 101.0)[0][1].lost_to is None
    reading.close(FINISHED, None, 11)
    reading.delivered_at = 110.0
    assert ring.newest(1, 111.0)[0][1].lost_to is Cause.CLIENT
