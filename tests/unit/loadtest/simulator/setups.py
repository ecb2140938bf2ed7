"""Small fleets and traces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from loadtest.simulator.fleet import WorkerSpec
from loadtest.simulator.outcome import Targets
from loadtest.simulator.simulation import Setup, two_pools
from loadtest.simulator.tandem_router import TandemConfig
from loadtest.workloads.trace import TraceRequest
from loadtest.workloads.trace_json import read_json_trace
from services.router.placement.decision import Thresholds
from services.router.placement.policy import PlacementConfig
from services.router.placement.scorers import weights
from shared.sizing.devices import H200
from shared.sizing.roofline import roofline
from shared.sizing.shapes import LLAMA_3_70B

HEAD = Path(__file__).parents[4] / "loadtest" / "traces" / "mooncake_conversation_head.jsonl"


def head(count: int = 400) -> list[TraceRequest]:
    """The first requests of the conversation trace."""
    return list(read_json_trace(HEAD))[:count]


def repeated(times: int) -> list[TraceRequest]:
    """The head of the trace again and again, one behind the other; they share nothing but the first run."""
    trace = head()
    span_s = trace[-1].at_s * (1 + 1 / len(trace))
    return [
        replace(
            line,
            at_s=line.at_s + turn * span_s,
            hash_ids=(*line.hash_ids[:1], *(run + turn * 1_000_000 for run in line.hash_ids[1:])),
        )
        for turn in range(times)
        for line in trace
    ]


def spec(num_blocks: int = 5000, *, block_size: int = 64, **changes) -> WorkerSpec:
    """Four H200 with Llama-3-70B's shape, whose products hide nothing of the reading."""
    times = changes.pop("times", None) or roofline(LLAMA_3_70B, H200, 4, overlap=0.0)
    return WorkerSpec(times, num_blocks, 160e9, LLAMA_3_70B.kv_bytes_per_token, block_size, **changes)


def setup(num_prefills: int = 4, num_decodes: int = 4, *, placement=None, **changes) -> Setup:
    """A fleet with our usual settings."""
    config = PlacementConfig(
        **{
            "max_queued_tokens": 8192,
            "patience": 4.0,
            "weights": weights(prefix=3.0, decode_prefix=3.0),
            "thresholds": Thresholds(512, 4096),
            "explain": False,
            "tpot_target_s": 0.05,
            "ttft_target_s": 5.0,
            **(placement or {}),
        }
    )
    worker = changes.pop("worker", spec())
    decode = changes.pop("decode", replace(worker, max_num_batched_tokens=512))
    groups = two_pools(num_prefills, num_decodes, worker, decode)
    return Setup(groups, Targets(5.0, 0.05), tandem=TandemConfig(placement=config), **changes)
