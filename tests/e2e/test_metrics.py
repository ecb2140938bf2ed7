"""`/metrics` of every process of a real cluster: all names with their HELP, and figures that move with requests."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable

import httpx

from services.kvstore.metrics import METRICS as KVSTORE_METRICS
from services.kvstore.metrics import NODE_METRICS
from services.monitoring.dashboard import ROWS
from services.monitoring.rules import ALERTS, RECORDINGS
from services.router.views.observed import METRICS as ROUTER_METRICS
from services.worker.telemetry.metrics import METRICS as WORKER_METRICS
from shared.telemetry.metrics import Metric
from tests.e2e.running import BLOCK_SIZE, Running, running
from tests.waiting import DEADLINE_S

NUM_BLOCKS = 4
PROMPT = [20 + i * 37 % 2000 for i in range(NUM_BLOCKS * BLOCK_SIZE + 1)]
NUM_OUTPUT = 3

DEFINED: dict[str, tuple[Metric, ...]] = {
    "router": ROUTER_METRICS,
    "prefill-0": tuple(item.metric for item in WORKER_METRICS),
    "decode-0": tuple(item.metric for item in WORKER_METRICS),
    "kvstore": tuple(item.metric for item in (*KVSTORE_METRICS, *NODE_METRICS)),
}


def helped(metrics: Iterable[Metric]) -> set[str]:
    return {f"# HELP {metric.exposed_name} " for metric in metrics}


def values(page: str) -> dict[str, float]:
    """Sums of each name's samples over their labels."""
    found: dict[str, float] = {}
    for name, value in re.findall(r"^(\w+)(?:\{.*\})? (\S+)$", page, re.MULTILINE):
        found[name] = found.get(name, 0) + float(value)
    return found


def series(page: str) -> dict[str, set[str]]:
    """Every sample's name on a page, with the labels that any of its series has."""
    found: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^([a-z_:]+)(?:\{(.*)\})? \S+$", page, re.MULTILINE):
        found.setdefault(name, set()).update(re.findall(r'(?:^|,)(\w+)="', labels))
    return found


def asked() -> set[tuple[str, frozenset[str]]]:
    """What panels, recordings and alerts read: samples' names and labels."""
    lines = [line for row in ROWS.values() for panel in row for line in panel.lines.values()]
    return {use for query in (*lines, *(item.query for item in (*RECORDINGS, *ALERTS))) for use in query.uses}


async def pages(run: Running) -> dict[str, str]:
    async with httpx.AsyncClient(timeout=DEADLINE_S) as client:
        replies = {name: await client.get(f"http://{at}/metrics") for name, at in run.cluster.metrics.items()}
    assert all(reply.status_code == 200 for reply in replies.values())
    return {name: reply.text for name, reply in replies.items()}


async def test_every_process_has_a_page_that_moves_when_a_request_is_served(tmp_path):
    async with running(tmp_path, store_host_bytes=1 << 24) as run:
        before = {name: values(page) for name, page in (await pages(run)).items()}
        assert set(before) == set(DEFINED)
        await run.tokens(PROMPT, max_tokens=NUM_OUTPUT)
        await run.idle()
        async with asyncio.timeout(DEADLINE_S):
            while True:  # the store and the index hear of blocks after the answer
                texts = await pages(run)
                after = {name: values(page) for name, page in texts.items()}
                moved = after["kvstore"]
                if moved.get("tandem_store_stored_blocks_total") and moved["tandem_index_published_blocks_total"]:
                    break
                await asyncio.sleep(0.05)
    for name, metrics in DEFINED.items():
        assert [line for line in helped(metrics) if line not in texts[name]] == [], name
        assert "otel_scope" not in texts[name]
        assert f'service_name="tandem-{name.partition("-")[0]}"' in texts[name]

    there: dict[str, set[str]] = {}
    for text in texts.values():
        for sample, labels in series(text).items():
            there.setdefault(sample, set()).update(labels)
    assert {name for name, _ in asked()} - there.keys() == set()
    assert {(name, labels) for name, labels in asked() if not labels <= there[name]} == set()

    def grown(process: str, metric: str) -> float:
        return after[process][metric] - before[process].get(metric, 0)

    assert grown("router", "tandem_requests_total") == 1
    assert grown("router", "gen_ai_server_time_to_first_token_seconds_count") == 1
    for worker in ("prefill-0", "decode-0"):
        assert grown(worker, "tandem_prompt_tokens_total") == len(PROMPT)
        assert grown(worker, "tandem_engine_steps_total") > 0
        assert 0 < grown(worker, "tandem_engine_step_seconds_total") < DEADLINE_S
        assert after[worker]["tandem_kv_pool_blocks"] == after[worker]["tandem_kv_free_blocks"] == 256
        assert after[worker]["tandem_kv_cached_blocks"] >= NUM_BLOCKS
        assert after[worker]["tandem_engine_running_sequences"] == 0
    assert grown("prefill-0", "tandem_engine_computed_tokens_total") == len(PROMPT)
    assert grown("prefill-0", "tandem_engine_output_tokens_total") == 1
    assert grown("decode-0", "tandem_engine_output_tokens_total") == NUM_OUTPUT - 1
    # The store took blocks from the prefill worker too, so it may have sent more than the hand-off.
    assert (
        grown("prefill-0", "tandem_transfer_sent_bytes_total")
        >= grown("decode-0", "tandem_transfer_received_bytes_total")
        > 0
    )
    assert after["kvstore"]["tandem_index_available"] == 1
    assert grown("kvstore", "tandem_index_matches_total") >= 1
    assert grown("kvstore", "tandem_store_used_bytes") > 0
    assert grown("kvstore", "tandem_transfer_received_bytes_total") > 0
