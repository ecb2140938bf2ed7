"""`python -m loadtest.bench traces-ttft`: which part of the client's TTFT the spans of a trace account for.

Streams over HTTP to a cluster with two prefill workers, every request traced. The router's spans up to the first token
(edge, match, queue, placement, reserve, prefill; of a retry all of them) are summed and divided by the time that the
client measured from sending to the first token. What is missing lies before the router's first line of Python (the
kernel, the event loop) and behind its last one. With a retry: the prefill worker that has the prompt is killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import grpc.aio
import typer
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from loadtest.command_line import Out
from loadtest.figures import Result, machine, table, write
from services.local.cluster import LocalCluster
from services.local.spec import DEMO_MODEL, ClusterSpec
from shared.child_process import ChildProcess
from shared.errors import Internal
from shared.rpc.pb.tandem.v1 import inference_pb2, inference_pb2_grpc, types_pb2

DEADLINE_S = 120.0
VOCAB = range(260, 1260)
NUM_TOKENS = 16
GOAL = 0.95
WARM = 5
_OUTER = ("attempt", "ship", "decode")
"""Spans of the router that hold others, or begin with the first token."""


@dataclass(frozen=True, slots=True)
class Call:
    """What the client saw, Unix seconds."""

    trace: bytes
    sent: float
    first: float

    @property
    def ttft_s(self) -> float:
        """From sending to the first token."""
        return self.first - self.sent


@dataclass(frozen=True, slots=True)
class Account:
    """One call's TTFT in seconds: spans, and what lies before and behind them."""

    ttft_s: float
    spans_s: float
    before_s: float
    behind_s: float

    @property
    def share(self) -> float:
        """Of the spans."""
        return self.spans_s / self.ttft_s


async def call(http: str, num_prompt_tokens: int) -> Call:
    """Streams one answer to its end. Raises Internal where it fails before the first token."""
    trace = random.getrandbits(128).to_bytes(16, "big")
    prompt = random.choices(VOCAB, k=num_prompt_tokens)
    body = json.dumps({"prompt": prompt, "max_tokens": NUM_TOKENS, "stream": True, "ignore_eos": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {http}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        f"traceparent: 00-{trace.hex()}-00f067aa0ba902b7-01\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    host, _, port = http.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    async with asyncio.timeout(DEADLINE_S):
        sent, first = time.time(), 0.0
        writer.write(head.encode() + body)
        answer = b""
        while piece := await reader.read(1 << 16):
            answer += piece
            if not first and b"\ndata: " in answer:
                first = time.time()
    writer.close()
    if b"data: [DONE]" not in answer or b'"error"' in answer:
        raise Internal(f"a request failed: {answer[-300:]!r}")
    return Call(trace, sent, first)


async def call_with_retry(cluster: LocalCluster, num_prompt_tokens: int) -> Call:
    """The same; the prefill worker that it went to is killed before it answers, and is back afterwards."""
    pids = {name: child.pid for name, child in cluster.children.items() if name.startswith("prefill")}
    async with grpc.aio.insecure_channel(cluster.grpc) as channel, asyncio.timeout(DEADLINE_S):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for pid in pids.values():
            os.kill(pid, signal.SIGSTOP)
        try:
            asking = asyncio.create_task(call(cluster.http, num_prompt_tokens))
            lost = await _holder(stub)
            os.kill(pids.pop(lost.name), signal.SIGKILL)
        finally:
            for pid in pids.values():
                os.kill(pid, signal.SIGCONT)
        found = await asking
        await _back(stub, lost)
        return found


async def _holder(stub: inference_pb2_grpc.InferenceServiceAsyncStub) -> types_pb2.WorkerId:
    """Waits until a prefill worker has a request, and names it."""
    while True:
        status = await stub.GetStatus(inference_pb2.GetStatusRequest())
        for each in status.workers:
            if each.num_requests and each.worker.name.startswith("prefill"):
                return each.worker
        await asyncio.sleep(0.01)


async def _back(stub: inference_pb2_grpc.InferenceServiceAsyncStub, lost: types_pb2.WorkerId) -> None:
    """Waits until the worker that was killed serves again, as another incarnation."""
    while True:
        status = await stub.GetStatus(inference_pb2.GetStatusRequest())
        names = [each.worker for each in status.workers if each.connected]
        if any(each.name == lost.name and each.incarnation != lost.incarnation for each in names):
            return
        await asyncio.sleep(0.1)


def accounts(exported: bytes, calls: list[Call]) -> list[Account]:
    """Of each call, by what the collector got. Raises Internal where a trace is missing."""
    by_trace: dict[bytes, list[Span]] = {}
    for span in _router_spans(ExportTraceServiceRequest.FromString(exported)):
        by_trace.setdefault(span.trace_id, []).append(span)
    return [_account(each, by_trace.get(each.trace, [])) for each in calls]


def _router_spans(exported: ExportTraceServiceRequest) -> Iterator[Span]:
    for group in exported.resource_spans:
        resource = {pair.key: pair.value.string_value for pair in group.resource.attributes}
        if resource["service.name"] == "tandem-router":
            for scope in group.instrumentation_library_spans:
                yield from scope.spans


def _account(made: Call, spans: list[Span]) -> Account:
    roots = [span for span in spans if span.kind == Span.SPAN_KIND_SERVER]
    events = [event for span in roots for event in span.events if event.name == "first token"]
    if not roots or not events:
        raise Internal(f"the trace {made.trace.hex()} has not come with a first token")
    first = events[0].time_unix_nano
    spent = sum(
        max(0, min(span.end_time_unix_nano, first) - span.start_time_unix_nano)
        for span in spans
        if span is not roots[0] and span.name not in _OUTER
    )
    return Account(made.ttft_s, spent / 1e9, roots[0].start_time_unix_nano / 1e9 - made.sent, made.first - first / 1e9)


def results_of(kind: str, found: list[Account]) -> list[Result]:
    """The shares, and where the rest is."""
    shares = sorted(each.share for each in found)
    return [
        Result(f"{kind}: client's TTFT", 1e3 * median(each.ttft_s for each in found), "ms"),
        Result(f"{kind}: spans / TTFT, p50", median(shares), "of it", limit=GOAL),
        Result(f"{kind}: spans / TTFT, worst", shares[0], "of it", limit=GOAL),
        Result(f"{kind}: before the first span", 1e3 * median(each.before_s for each in found), "ms"),
        Result(f"{kind}: behind the last one", 1e3 * median(each.behind_s for each in found), "ms"),
    ]


async def measure(num_requests: int, num_retried: int, num_prompt_tokens: int) -> list[Result]:
    """One request at a time."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        command = [sys.executable, "-m", "loadtest.bench.traces.sink", str(scratch / "spans")]
        sink = ChildProcess("sink", command, scratch / "sink.log")
        await sink.start()
        try:
            spec = ClusterSpec(
                model=DEMO_MODEL,
                http="127.0.0.1:0",
                grpc="127.0.0.1:0",
                num_prefill=2,
                restart=True,
                num_kv_blocks=2048,
                state_dir=scratch / "cluster",
                traces_endpoint=f"http://{(await sink.ready(DEADLINE_S)).address}",
            )
            async with LocalCluster(spec) as cluster:
                for _ in range(WARM):
                    await call(cluster.http, num_prompt_tokens)
                plain = [await call(cluster.http, num_prompt_tokens) for _ in range(num_requests)]
                retried = [await call_with_retry(cluster, num_prompt_tokens) for _ in range(num_retried)]
            # The cluster has ended, and each process has sent what it had.
            exported = (scratch / "spans").read_bytes()
        finally:
            sink.kill()
            await sink.stop(DEADLINE_S)
    results = results_of(f"prompts of {num_prompt_tokens}", accounts(exported, plain))
    if retried:
        results += results_of(f"prompts of {num_prompt_tokens}, one retry", accounts(exported, retried))
    return results


def main(
    out: Out = None,
    requests: Annotated[int, typer.Option(help="without a retry", min=1)] = 50,
    retried: Annotated[int, typer.Option(help="further ones, each with a killed prefill worker")] = 5,
    prompt_tokens: Annotated[int, typer.Option(help="of each prompt, none of them cached")] = 1000,
) -> None:
    """Compare the sum of a trace's spans with the client's TTFT."""
    print(machine())
    results = asyncio.run(measure(requests, retried, prompt_tokens))
    print(table(results))
    if out is not None:
        write(out, results)
