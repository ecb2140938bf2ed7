"""One client's huge prompt must not stop another client's stream."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
import pytest

from services.router.edge.limits import LimitSettings
from tests.fuzz.edge_process import CONTEXT_LEN, EdgeProcess, edge_process
from tests.fuzz.ticking_core import STEADY
from tests.waiting import DEADLINE_S

MOST_BUSY_MS = 100
"""Of the loop's own computing in one turn, which the machine's other work does not count in."""
NUM_CHARS = 7_900_000


async def largest_gap(edge: EdgeProcess, until: asyncio.Event) -> float:
    """The longest time between two tokens of an ordinary stream, seconds; for people: it is the machine's doing too."""
    body = {"prompt": "hi", "stream": True, "max_tokens": CONTEXT_LEN - 10, "request_id": STEADY}
    async with (
        httpx.AsyncClient(base_url=f"http://{edge.http}", timeout=DEADLINE_S, verify=False) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        assert answer.status_code == 200
        worst, last = 0.0, 0.0
        async for _ in answer.aiter_raw():
            now = time.perf_counter()
            worst, last = max(worst, now - last if last else 0.0), now
            if until.is_set():
                break
        return worst


async def send(edge: EdgeProcess, path: str, body: bytes) -> tuple[float, httpx.Response]:
    """The answer, and the seconds until it came. In a thread: this process's own loop measures gaps."""

    def post() -> tuple[float, httpx.Response]:
        begun = time.perf_counter()
        answer = httpx.post(f"http://{edge.http}{path}", content=body, timeout=DEADLINE_S, verify=False)
        return time.perf_counter() - begun, answer

    return await asyncio.to_thread(post)


@pytest.mark.slow
async def test_a_huge_text_is_refused_at_once_and_stops_no_other_stream() -> None:
    text = "the quick brown fox jumps over the lazy dog. " * (NUM_CHARS // 45)
    bodies = [
        ("/v1/completions", "prompt", json.dumps({"prompt": text}).encode()),
        ("/v1/chat/completions", "messages", json.dumps({"messages": [{"role": "user", "content": text}]}).encode()),
    ]
    with edge_process() as edge:
        enough = asyncio.Event()
        gap = asyncio.create_task(largest_gap(edge, enough))
        await asyncio.sleep(0.3)  # the stream runs
        before = edge.health()
        for path, field, body in bodies:
            _, answer = await send(edge, path, body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["code"]) == (400, field, "context_length_exceeded")
            assert "characters is not tokenized" in error["message"]
        after = edge.health()
        enough.set()
        worst = await gap
    grown_mb = after.rss_mb - before.rss_mb
    print(f"largest gap {1e3 * worst:.0f} ms, computing {after.loop_busy_ms:.0f} ms, +{grown_mb:.0f} MB")
    assert after.loop_busy_ms < MOST_BUSY_MS
    assert grown_mb < 100


@pytest.mark.slow
async def test_the_longest_text_that_is_tokenized_stops_no_other_stream() -> None:
    chars = LimitSettings().max_chars_per_token
    text = ("the quick brown fox jumps over the lazy dog. " * CONTEXT_LEN)[: CONTEXT_LEN * chars * 9 // 10]
    with edge_process() as edge:
        enough = asyncio.Event()
        gap = asyncio.create_task(largest_gap(edge, enough))
        answers = await asyncio.gather(
            *(send(edge, "/v1/completions", json.dumps({"prompt": text}).encode()) for _ in range(8))
        )
        enough.set()
        worst = await gap
        busy_ms = edge.health().loop_busy_ms
    assert {answer.status_code for _, answer in answers} == {400}
    print(f"largest gap {1e3 * worst:.0f} ms, computing {busy_ms:.0f} ms")
    assert busy_ms < MOST_BUSY_MS
