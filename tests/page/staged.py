"""A real router's front door over a cluster that a test wrote down: the page's figures, names and answers at will."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from services.router.edge.http.app import build_app
from services.router.edge.http.server.http_server import HttpServer
from services.router.edge.settings import EdgeSettings
from services.router.views.cluster_view import RequestDetail, RequestRow
from shared.model.text.tokenizer import Tokenizer
from shared.rpc.pb.tandem.v1 import inference_pb2, types_pb2
from tests.e2e.running import DEMO
from tests.unit.router.edge.fixed_view import FixedView
from tests.unit.router.edge.scripted_core import MODEL, ScriptedCore, make_input_processor, text_steps

SPLIT = {
    "queue_ms": 12.0,
    "placement_ms": 3.0,
    "reserve_ms": 2.0,
    "prefill_queue_ms": 20.0,
    "prefill_compute_ms": 60.0,
    "return_ms": 3.0,
}


@dataclass
class Staged:
    """A running front door."""

    url: str
    view: FixedView
    core: ScriptedCore


def worker(
    name: str, role: types_pb2.WorkerRole, *, connected: bool = True, **load: float
) -> inference_pb2.WorkerStatus:
    """One worker's line."""
    known = {"num_total_blocks": 512, "num_free_blocks": 300, "num_cached_blocks": 120, "num_steps": 40, "busy_s": 0.5}
    return inference_pb2.WorkerStatus(
        worker=types_pb2.WorkerId(name=name, incarnation=1),
        role=role,
        address="127.0.0.1:9000",
        connected=connected,
        load=types_pb2.Load(**{**known, **load}),
        kernels="cpu:avx512",
        dtype="float32",
        pool_bytes=1 << 28,
    )


def status(model: str = MODEL, prefix: str = "") -> inference_pb2.ClusterStatus:
    """Two pools of two, and a minute in which one request in four was lost."""
    prefill, decode = types_pb2.WORKER_ROLE_PREFILL, types_pb2.WORKER_ROLE_DECODE
    share = inference_pb2.CauseShare
    return inference_pb2.ClusterStatus(
        router_name="router-0",
        model_name=model,
        ready=True,
        mode="disaggregated",
        store_available=True,
        queue_limit=1024,
        num_finished=30,
        workers=[
            worker(f"{prefix}prefill-0", prefill, num_running=2),
            worker(f"{prefix}prefill-1", prefill),
            worker(f"{prefix}decode-0", decode, num_running=6, kv_bytes_received=1_000_000),
            worker(f"{prefix}decode-1", decode, num_running=4),
        ],
        flow=inference_pb2.RequestFlow(num_queued=2, num_prefilling=2, num_shipping=1, num_decoding=10),
        window=inference_pb2.GoodputWindow(
            window_s=60, num_requests=40, num_good=30, num_refused=2, num_failed=1, goodput=0.5,
            ttft_target_ms=500, tpot_target_ms=50, num_prompt_tokens=4000, num_cached_tokens=1500,
            num_output_tokens=2500, binding="kv_room",
            ttft=inference_pb2.Percentiles(p50_ms=180, p95_ms=640, p99_ms=900),
            tpot=inference_pb2.Percentiles(p50_ms=18, p95_ms=31, p99_ms=48),
            causes=[
                share(cause="kv_room", num_lost=7, lost_share=0.175, time_share=0.3),
                share(cause="prefill_compute", num_lost=3, lost_share=0.075, time_share=0.22),
                share(cause="decode_step", time_share=0.4),
                share(cause="router", time_share=0.08),
            ],
        ),
    )  # fmt: skip


def row(request_id: str, state: str = "finished", **fields: object) -> RequestRow:
    """One request."""
    known = {
        "model": MODEL, "num_prompt_tokens": 64, "num_cached_tokens": 16, "num_output_tokens": 20, "age_ms": 100.0,
        "duration_ms": 900.0, "ttft_ms": 100.0, "tpot_ms": 20.0, "prefill_worker": "prefill-0",
        "decode_worker": "decode-0",
    }  # fmt: skip
    return RequestRow(request_id=request_id, state=state, **{**known, **fields})


def detail(request_id: str, worker_name: str = "decode-0") -> RequestDetail:
    """Its time, and one placement."""
    candidate = inference_pb2.PlacementCandidate(
        worker=worker_name, score=0.75, parts=[inference_pb2.ScorePart(scorer="queue", score=0.5)], num_free_blocks=9
    )
    attempt = inference_pb2.PlacementDecision(
        attempt=1, route="hand_off", decode_worker=worker_name, prefill_worker="prefill-0",
        decode_candidates=[candidate],
    )  # fmt: skip
    told = inference_pb2.Explanation(request_id=request_id, attempts=[attempt])
    return RequestDetail(row(request_id), SPLIT, {"prefill_compute": 80.0, "decode_step": 400.0}, told)


@contextlib.asynccontextmanager
async def staged(model: str = MODEL, **settings: object) -> AsyncIterator[Staged]:
    """Serves on a free port; every request is answered with a few words."""
    tokenizer = Tokenizer.load(DEMO)
    core = ScriptedCore(lambda request: text_steps(tokenizer, "Once there was a fox who ran."))
    core.limit = 4096
    options = EdgeSettings(**settings)  # type: ignore[arg-type]
    processor = make_input_processor(core, tokenizer, options)
    view = FixedView(status(model))
    states = ("queued", "queued", "prefilling", "prefilling", "shipping", *["decoding"] * 6, "finished", "failed")
    view.rows = [row(f"request-{number}", state) for number, state in enumerate(states)]
    view.details = {each.request_id: detail(each.request_id) for each in view.rows}
    http = HttpServer("127.0.0.1:0", build_app(processor, options, lambda: b"", view), options.limits)
    await http.start()
    try:
        yield Staged(f"http://{http.address}/", view, core)
    finally:
        await http.stop(0)


async def _serve() -> None:
    async with staged() as front:
        print(front.url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve())
