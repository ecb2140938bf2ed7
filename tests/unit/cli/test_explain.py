"""`tandem explain`: one attempt in words, its candidates in a table."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from services.cli.explain import candidate_table, pair_table, summary_line
from services.router.placement.decision import Route
from shared.rpc.pb.tandem.v1 import inference_pb2


def decision(**more) -> inference_pb2.PlacementDecision:
    return inference_pb2.PlacementDecision(
        attempt=1,
        num_prompt_tokens=640,
        queue_ms=1.25,
        route="hand_off",
        decode_worker="d1",
        prefill_worker="p0",
        **more,
    )


def test_an_attempt_in_words():
    assert summary_line(decision()) == (
        "attempt 1: p0 -> d1, prefilled by the prefill pool; 640 prompt tokens, 1.2 ms in the queue"
    )
    assert summary_line(decision(predicted_ttft_ms=30.0)).endswith(", first token predicted in 30.0 ms")


def test_the_chosen_worker_is_marked_and_every_scorer_has_a_column():
    candidates = [
        inference_pb2.PlacementCandidate(
            worker=name,
            score=score,
            parts=[inference_pb2.ScorePart(scorer="queue", score=score)],
            num_hit_tokens=320,
        )
        for name, score in (("p0", 0.75), ("p1", 0.5))
    ]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(candidate_table("prefill", "p1", candidates))
    lines = console.export_text().splitlines()
    assert lines[0].split() == [
        "prefill",
        "worker",
        "score",
        "queue",
        "hit",
        "tokens",
        "queued",
        "free",
        "blocks",
        "requests",
    ]
    assert lines[1].split()[:3] == ["p0", "0.750", "0.750"]
    assert lines[2].split()[:4] == ["p1", "*", "0.500", "0.500"]


def test_pairs_are_shown_with_both_predictions_the_one_taken_first():
    pairs = [
        inference_pb2.PlacementPair(
            decode_worker="w1", prefill_worker=prefill, ttft_ms=ttft_ms, tpot_ms=tpot_ms, in_time=in_time, score=score
        )
        for prefill, ttft_ms, tpot_ms, in_time, score in (("w1", 120.0, 21.5, 0.97, 0.4), ("w2", None, None, 0.9, 0.5))
    ]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(pair_table(pairs))
    head, first, second = console.export_text().splitlines()
    assert head.split() == ["decode", "worker", "prefill", "worker", "TTFT", "TPOT", "in", "time", "score"]
    assert first.split() == ["w1", "*", "here", "120.0", "ms", "21.5", "ms", "97", "%", "0.400"]
    assert second.split() == ["w1", "w2", "-", "-", "90", "%", "0.500"]


def test_a_pool_whose_workers_do_both_has_no_prefill_pool():
    told = decision(pairs=[inference_pb2.PlacementPair(decode_worker="d1", prefill_worker="p0")])
    assert summary_line(told).startswith("attempt 1: p0 -> d1, prefilled by another worker; ")


@pytest.mark.parametrize("route", Route)
def test_every_route_is_said_in_words(route):
    told = decision()
    told.route = route.value
    assert "prefilled" in summary_line(told)
