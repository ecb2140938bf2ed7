"""What tandem status, explain and top show of mode auto, and of splits that had been better."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from services.router.placement.decision import Route
from shared.rpc.pb.tandem.v1 import inference_pb2, types_pb2
from tandem_cli.explain import pair_table, summary_line
from tests.unit.cli.conftest import RunTandem
from tests.unit.cli.scripted_router import ScriptedRouter
from tests.unit.cli.test_views import cluster, decision, drawn


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


def elastic() -> inference_pb2.ClusterStatus:
    """Two workers with both roles, of which one only prefills."""
    status = inference_pb2.ClusterStatus(model_name="demo", mode="auto", ready=True, store_available=True)
    for name, preference in (("w-0", types_pb2.WORKER_ROLE_DECODE), ("w-1", types_pb2.WORKER_ROLE_PREFILL)):
        status.workers.add(
            worker=types_pb2.WorkerId(name=name),
            role=types_pb2.WORKER_ROLE_DECODE,
            roles=[types_pb2.WORKER_ROLE_PREFILL, types_pb2.WORKER_ROLE_DECODE],
            preference=preference,
            connected=True,
        )
    status.split.MergeFrom(inference_pb2.RoleSplit(num_decoding=1, num_workers=2, headroom=1.5, num_flips=3))
    return status


def test_what_workers_of_both_roles_are_used_for_is_shown(tandem: RunTandem, router: ScriptedRouter) -> None:
    router.status = elastic()
    lines = tandem("status").out.splitlines()
    assert (
        "split: 1 of 2 workers decode, the others only prefill; headroom 1.50 times the demand, "
        "3 changes of a preference"
    ) in lines
    rows = [line.split() for line in lines]
    assert ["w-0", "prefill,decode", "decode"] in [row[:3] for row in rows]
    assert ["w-1", "prefill,decode", "prefill"] in [row[:3] for row in rows]
    router.status.split.ClearField("headroom")
    assert "split: all 2 workers prefill and decode: nothing is decided yet" in tandem("status").out
    router.status.split.MergeFrom(inference_pb2.RoleSplit(num_decoding=2, headroom=0.75))
    assert "split: all 2 workers prefill and decode; headroom 0.75 times the demand, 3" in tandem("status").out


def test_an_elastic_pool_shows_its_split_at_every_width():
    status = cluster(split=inference_pb2.RoleSplit(num_decoding=1, num_workers=2, headroom=0.8))
    status.workers[0].preference = types_pb2.WORKER_ROLE_DECODE
    for width in (80, 120):
        text = drawn(status, width)
        assert max(map(len, text.splitlines())) <= width
        assert "1 of 2 workers decode" in text
        assert "prefers" in text
    assert "prefers" not in drawn(cluster())


@pytest.mark.parametrize(
    ("split", "words"),
    [
        (
            {"best_decoding": 3, "worth_it": True},
            "with 3 of 8 workers decoding headroom would have been 1.50 instead of",
        ),
        ({"best_decoding": 3, "worth_it": True, "elastic": True}, "3 of 8 workers decoding, prompts beside answers"),
        (
            {"best_decoding": 8, "worth_it": True, "elastic": True},
            "with all 8 workers prefilling and decoding headroom",
        ),
        ({"best_decoding": 3}, "5 of 8 workers decoding was about the best: headroom 0.90"),
    ],
)
def test_the_split_that_would_have_been_better_is_named(split, words):
    status = cluster()
    status.window.split.MergeFrom(
        inference_pb2.SplitVerdict(num_workers=8, num_decoding=5, headroom=0.9, best_headroom=1.5, **split)
    )
    assert words in drawn(status, 140)
    assert "headroom" not in drawn(cluster())
