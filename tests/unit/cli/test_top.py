"""One frame of `tandem top`, at several widths."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from services.cli.top import Frame, Steps
from shared.rpc.pb.tandem.v1 import inference_pb2, types_pb2


def cluster(**fields) -> inference_pb2.ClusterStatus:
    share = inference_pb2.CauseShare
    return inference_pb2.ClusterStatus(
        model_name="demo", router_name="router-0", mode="disaggregated", ready=True,
        flow=inference_pb2.RequestFlow(num_queued=3, num_prefilling=2, num_decoding=7),
        window=inference_pb2.GoodputWindow(
            window_s=60, num_requests=40, num_good=30, goodput=0.5, binding="kv_room", tpot_target_ms=50,
            ttft=inference_pb2.Percentiles(p50_ms=120, p95_ms=480),
            tpot=inference_pb2.Percentiles(p50_ms=12, p95_ms=80),
            causes=[share(cause="kv_room", num_lost=10, time_share=0.6), share(cause="decode_step", time_share=0.4)],
        ),
        workers=[
            inference_pb2.WorkerStatus(
                worker=types_pb2.WorkerId(name="decode-0"), role=types_pb2.WORKER_ROLE_DECODE, connected=True,
                load=types_pb2.Load(num_free_blocks=64, num_total_blocks=256, num_cached_blocks=32, num_running=7),
            ),
            inference_pb2.WorkerStatus(worker=types_pb2.WorkerId(name="decode-1"), role=types_pb2.WORKER_ROLE_DECODE),
        ],
        **fields,
    )  # fmt: skip


def drawn(status: inference_pb2.ClusterStatus, width: int = 120) -> str:
    screen = io.StringIO()
    Console(width=width, file=screen).print(Frame(status, Steps()))
    return screen.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_a_frame_fits_the_terminal_and_names_what_binds(width):
    text = drawn(cluster(), width)
    assert max(map(len, text.splitlines())) <= width
    assert "KV room: 10 of 40 lost" in text
    assert "192 of 256" in text
    assert "lost" in next(line for line in text.splitlines() if line.startswith("decode-1"))


def test_a_missed_target_is_told_without_colour_too():
    text = drawn(cluster())
    assert "p95 80 ✕ target 50 ms" in text


def test_nothing_lost_nothing_seen_and_no_router_are_told():
    calm = cluster()
    calm.window.binding = ""
    assert "nothing: no request was lost" in drawn(calm)
    assert "no request has ended" in drawn(inference_pb2.ClusterStatus(window=inference_pb2.GoodputWindow(window_s=60)))
    assert "not ready: gone" in drawn(inference_pb2.ClusterStatus(not_ready_reason="gone"))


def test_the_step_time_is_of_the_steps_since_the_last_look():
    steps = Steps()
    assert steps.mean_ms("d", types_pb2.Load(num_steps=10, busy_s=0.1)) == pytest.approx(10.0)
    assert steps.mean_ms("d", types_pb2.Load(num_steps=20, busy_s=0.4)) == pytest.approx(30.0)
    assert steps.mean_ms("d", types_pb2.Load(num_steps=20, busy_s=0.4)) == pytest.approx(30.0)
    assert steps.mean_ms("d", types_pb2.Load(num_steps=5, busy_s=0.1)) == pytest.approx(20.0)
    assert steps.mean_ms("other", types_pb2.Load()) == 0.0


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
