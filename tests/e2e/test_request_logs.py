"""One request's JSON log lines: the same ids in the router's log and in both workers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.e2e.running import Running, running

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
HEADERS = {"traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01", "x-request-id": "asked#once"}
PROMPT = [20 + i * 37 % 2000 for i in range(50)]
SERVICES = {"router": "tandem-router", "prefill-0": "tandem-prefill", "decode-0": "tandem-decode"}


def records(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "logs" / f"{name}.log").read_text().splitlines()]


async def ask(run: Running, **fields: Any) -> int:
    body = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0, **fields}
    return (await run.http.post("/v1/completions", json=body, headers=HEADERS)).status_code


async def test_a_request_with_a_traceparent_has_one_trace_id_in_all_logs(tmp_path, monkeypatch):
    for service in ("ROUTER", "WORKER"):
        monkeypatch.setenv(f"TANDEM_{service}_LOG_LEVEL", "debug")
    async with running(tmp_path, log_format="json") as run:
        assert await ask(run) == 200
        await run.tokens(PROMPT[:30], max_tokens=2)
        await run.idle()
    for name, service in SERVICES.items():
        found = records(tmp_path, name)
        assert {record["service"] for record in found} == {service}
        mine = [record for record in found if record.get("trace_id") == TRACE_ID]
        assert {record["request_id"] for record in mine} == {"asked#once"}, name
        others = {record["request_id"] for record in found if "request_id" in record} - {"asked#once"}
        assert len(others) == 1, "the other request has an id of its own, and no trace"
        if name != "router":
            assert {record["attempt"] for record in mine} == {"1"}
    assert json.loads((tmp_path / "logs" / "kvstore.log").read_text().splitlines()[0])["service"] == "tandem-kvstore"
