"""What the processes of a real cluster say of themselves: `/metrics` with all names, and JSON log lines with ids."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterable
from typing import Any

import httpx
import pytest
import pytest_asyncio

from services.kvstore.metrics import METRICS as KVSTORE_METRICS
from services.kvstore.metrics import NODE_METRICS
from services.monitoring.dashboard import ROWS
from services.monitoring.rules import ALERTS, RECORDINGS
from services.router.views.observed import METRICS as ROUTER_METRICS
from services.worker.telemetry.metrics import METRICS as WORKER_METRICS
from shared.telemetry.metrics import Metric
from tests.e2e.running import BLOCK_SIZE, Running, running
from tests.waiting import DEADLINE_S, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

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


IN_AUTO = {"tandem_router_decode_preferred_workers", "tandem_router_split_headroom"}
"""What a router has in mode auto alone."""


def asked() -> set[tuple[str, frozenset[str]]]:
    """What panels, recordings and alerts read: samples' names and labels."""
    lines = [line for row in ROWS.values() for panel in row for line in panel.lines.values()]
    return {use for query in (*lines, *(item.query for item in (*RECORDINGS, *ALERTS))) for use in query.uses}


async def pages(run: Running) -> dict[str, str]:
    async with httpx.AsyncClient(timeout=DEADLINE_S) as client:
        replies = {name: await client.get(f"http://{at}/metrics") for name, at in run.cluster.metrics.items()}
    assert all(reply.status_code == 200 for reply in replies.values())
    return {name: reply.text for name, reply in replies.items()}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def run(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    with pytest.MonkeyPatch.context() as patch:
        for service in ("ROUTER", "WORKER"):
            patch.setenv(f"TANDEM_{service}_LOG_LEVEL", "debug")
        folder = tmp_path_factory.mktemp("cluster")
        async with running(folder, store_host_bytes=1 << 24, log_format="json") as started:
            yield started


async def test_every_process_has_a_page_that_moves_when_a_request_is_served(run: Running):
    before = {name: values(page) for name, page in (await pages(run)).items()}
    assert set(before) == set(DEFINED)
    await run.tokens(PROMPT, max_tokens=NUM_OUTPUT)
    await run.idle()

    async def moved() -> dict[str, str] | None:
        """The pages once the store and the index have heard of blocks, which is after the answer."""
        texts = await pages(run)
        seen = values(texts["kvstore"])
        has_moved = seen.get("tandem_store_stored_blocks_total") and seen["tandem_index_published_blocks_total"]
        return texts if has_moved else None

    texts = await until(moved)
    after = {name: values(page) for name, page in texts.items()}
    for name, metrics in DEFINED.items():
        assert [line for line in helped(metrics) if line not in texts[name]] == [], name
        assert "otel_scope" not in texts[name]
        assert f'service_name="tandem-{name.partition("-")[0]}"' in texts[name]

    there: dict[str, set[str]] = {}
    for text in texts.values():
        for sample, labels in series(text).items():
            there.setdefault(sample, set()).update(labels)
    assert {name for name, _ in asked()} - there.keys() == IN_AUTO
    assert {(name, labels) for name, labels in asked() if name not in IN_AUTO and not labels <= there[name]} == set()

    def grown(process: str, metric: str) -> float:
        return after[process][metric] - before[process].get(metric, 0)

    assert grown("router", "tandem_requests_total") == 1
    assert grown("router", "gen_ai_server_time_to_first_token_seconds_count") == 1
    for worker in ("prefill-0", "decode-0"):
        assert grown(worker, "tandem_prompt_tokens_total") == len(PROMPT)
        assert grown(worker, "tandem_engine_steps_total") > 0
        assert 0 < grown(worker, "tandem_engine_step_seconds_total") < DEADLINE_S
        pool_bytes = 256 * 2 * 4 * 4 * 16 * 32 * 4  # blocks, K and V, layers, heads, tokens, head_dim, fp32
        assert after[worker]["tandem_kv_pool_bytes"] == pool_bytes
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


TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
HEADERS = {"traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01", "x-request-id": "asked#once"}
SERVICES = {"router": "tandem-router", "prefill-0": "tandem-prefill", "decode-0": "tandem-decode"}


def records(run: Running, name: str) -> list[dict[str, Any]]:
    """A process's whole lines."""
    text = (run.cluster.spec.log_dir / f"{name}.log").read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def ids(found: list[dict[str, Any]]) -> set[str]:
    return {record["request_id"] for record in found if "request_id" in record}


async def test_a_request_with_a_traceparent_has_one_trace_id_in_all_logs(run: Running):
    earlier = {name: ids(records(run, name)) for name in SERVICES}
    body = {"prompt": PROMPT[:50], "max_tokens": 2, "temperature": 0}
    assert (await run.http.post("/v1/completions", json=body, headers=HEADERS)).status_code == 200
    await run.tokens(PROMPT[:30], max_tokens=2)
    await run.idle()
    for name, service in SERVICES.items():
        await until(lambda name=name: len(ids(records(run, name)) - earlier[name]) == 2)
        found = records(run, name)
        assert {record["service"] for record in found} == {service}
        mine = [record for record in found if record.get("trace_id") == TRACE_ID]
        assert ids(mine) == {"asked#once"}, "the other request has an id of its own, and no trace"
        if name != "router":
            assert {record["attempt"] for record in mine} == {"1"}
    assert records(run, "kvstore")[0]["service"] == "tandem-kvstore"
