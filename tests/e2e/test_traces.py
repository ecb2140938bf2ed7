"""Traces of real requests through a real cluster, as an OTLP receiver in a process of its own gets them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator

import pytest

from tests.e2e.collector import Found, collecting
from tests.e2e.running import Running, running

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=7"}
UNSAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
PROMPT = [20 + i * 37 % 2000 for i in range(200)]
CRITICAL = ("edge", "match", "queue", "placement", "reserve", "prefill")
"""The router's spans up to the first token: each begins where the one before ends."""
SERVICES = {"tandem-router", "tandem-prefill", "tandem-decode", "tandem-kvstore"}


async def streamed(run: Running, headers: dict[str, str], first_token: asyncio.Event | None = None, **fields) -> float:
    """Streams an answer to its end; the client's time to the first token in seconds. Sets `first_token` when it
    comes."""
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **fields}
    began, first = time.perf_counter(), 0.0
    async for event in run.events(body, headers=headers):
        if not first:
            assert event["choices"]
            first = time.perf_counter()
            if first_token is not None:
                first_token.set()
    return first - began


def named(spans: Iterable[Found], name: str, service: str = "tandem-router") -> Found:
    [found] = of(spans, name, service)
    return found


def of(spans: Iterable[Found], name: str, service: str = "tandem-router") -> list[Found]:
    return [span for span in spans if span.name == name and span.service == service]


def is_whole(spans: list[Found]) -> bool:
    """Every process has sent its part: each part of a process comes in one piece."""
    return {span.service for span in spans} == SERVICES


def assert_one_tree(spans: list[Found], outer: str) -> Found:
    """The root; every other span's parent is a span of the trace, and so is what it links to."""
    ids = {span.id for span in spans}
    assert len(ids) == len(spans)
    [root] = [span for span in spans if span.parent not in ids]
    assert root.parent == outer
    assert all(link in ids for span in spans for link in span.links)
    return root


async def test_a_streamed_request_is_one_tree_over_four_processes_and_its_spans_sum_to_the_ttft(tmp_path):
    async with collecting(tmp_path) as collector, running(tmp_path, traces_endpoint=collector.grpc) as run:
        await streamed(run, {}, prompt=PROMPT[::-1])  # what runs for the first time takes longer
        ttft_s = await streamed(run, SAMPLED)
        await collector.until(lambda _: is_whole(collector.of(TRACE)))
        spans = collector.of(TRACE)
    root = assert_one_tree(spans, PARENT)
    assert (root.name, root.kind, root.error) == ("text_completion demo", 2, None)
    assert {span.instance for span in spans if span.service != "tandem-kvstore"} == {
        "router-0",
        "prefill-0",
        "decode-0",
    }
    assert {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "demo",
        "gen_ai.request.max_tokens": 12,
        "gen_ai.usage.input_tokens": len(PROMPT),
        "gen_ai.usage.output_tokens": 12,
    }.items() <= root.attributes.items()
    parts = [named(spans, name) for name in CRITICAL]
    assert all(after.began == pytest.approx(before.ended, abs=1e-3) for before, after in itertools.pairwise(parts))
    spent_s = sum(part.took for part in parts)
    [first_token_at] = [at for name, at in root.events if name == "first token"]
    assert spent_s == pytest.approx(first_token_at - root.began, rel=0.05, abs=1e-3)
    assert spent_s < ttft_s  # the client's own clock has more: sockets, and whatever else this machine does
    assert named(spans, "attempt").attributes["tandem.prefill_worker"] == "prefill-0"
    for name, service, outer in (
        ("match", "tandem-kvstore", named(spans, "match")),
        ("prefill", "tandem-prefill", named(spans, "prefill")),
        ("decode", "tandem-decode", named(spans, "attempt")),
    ):
        assert named(spans, name, service).parent == outer.id
    prefill, decode = named(spans, "prefill", "tandem-prefill"), named(spans, "decode", "tandem-decode")
    for name, outer in (("queue", prefill), ("compute", prefill), ("ship", prefill)):
        assert named(spans, name, "tandem-prefill").parent == outer.id
    for name in ("reserve", "receive", "join", "stream"):
        assert named(spans, name, "tandem-decode").parent == decode.id
    assert "chunk" in [name for name, _ in named(spans, "compute", "tandem-prefill").events]
    assert [name for name, _ in root.events] == ["first token"]


@contextlib.contextmanager
def stopped(run: Running, kind: str) -> Iterator[Callable[[str], None]]:
    """Both workers of the kind stand still; what is yielded kills the one of that name and lets the other go on."""
    pids = {name: child.pid for name, child in run.cluster.children.items() if name.startswith(kind)}

    def kill(lost: str) -> None:
        for name, pid in pids.items():
            os.kill(pid, signal.SIGKILL if name == lost else signal.SIGCONT)
        del pids[lost]

    for pid in pids.values():
        os.kill(pid, signal.SIGSTOP)
    try:
        yield kill
    finally:
        for pid in pids.values():
            os.kill(pid, signal.SIGCONT)


@pytest.fixture
def patient_router(monkeypatch):
    """Workers that stand still for a while are neither suspected nor given up."""
    monkeypatch.setenv("TANDEM_ROUTER_SUSPECT_AFTER_S", "5")
    monkeypatch.setenv("TANDEM_ROUTER_GIVE_UP_AFTER_S", "100")


@pytest.mark.slow
async def test_a_killed_prefill_worker_is_a_failed_span_that_the_next_one_links_to(tmp_path, patient_router):
    async with (
        collecting(tmp_path) as collector,
        running(tmp_path, traces_endpoint=collector.grpc, num_prefill=2, restart=False) as run,
    ):
        with stopped(run, "prefill") as kill:
            asking = asyncio.create_task(streamed(run, SAMPLED))
            lost = await run.busy("prefill")
            kill(lost)
            await asking
        await collector.until(lambda _: is_whole(collector.of(TRACE)))
        spans = collector.of(TRACE)
    root = assert_one_tree(spans, PARENT)
    assert root.error is None
    failed, other = sorted(of(spans, "prefill"), key=lambda span: span.began)
    assert failed.attributes["error.type"] == "worker_lost"
    assert lost in failed.error
    assert (failed.attributes["tandem.worker"], failed.links) == (lost, [])
    assert (other.error, other.links, failed.parent) == (None, [failed.id], other.parent)
    assert named(spans, "prefill", "tandem-prefill").instance == other.attributes["tandem.worker"] != lost


@pytest.mark.slow
async def test_a_slow_request_is_exported_whole_although_it_was_not_sampled(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_ROUTER_TRACES__SLOW_TTFT_S", "0.000001")
    async with (
        collecting(tmp_path) as collector,
        running(tmp_path, traces_endpoint=collector.grpc, traces_sample=0.0) as run,
    ):
        await streamed(run, UNSAMPLED)
        await collector.until(lambda _: is_whole(collector.of(TRACE)))
        assert_one_tree(collector.of(TRACE), PARENT)
