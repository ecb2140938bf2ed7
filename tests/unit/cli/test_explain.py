"""`tandem explain`: one attempt in words, its candidates in a table."""

from __future__ import annotations

import io

from rich.console import Console

from services.cli.explain import candidate_table, summary_line
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
