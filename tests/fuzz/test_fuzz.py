"""A few thousand random requests of each kind: nothing crashes, and ordinary streams go on undisturbed."""

from __future__ import annotations

import pytest

from tests.fuzz.__main__ import run, run_services, shares
from tests.fuzz.campaign import Findings
from tests.fuzz.edge_process import DEMO, edge_process

MOST_BUSY_MS = 100
"""Of the loop's own computing in one turn, which the machine's other work does not count in."""


def check(counts: dict[str, int]) -> None:
    found = Findings()
    with edge_process() as edge:
        before = edge.health()
        after = run(edge, counts, found)
        assert edge.process.poll() is None
    print(f"{dict(found.outcomes)}; largest loop lag {after.loop_lag_ms:.0f} ms, computing {after.loop_busy_ms:.0f} ms")
    assert not found.failures, found.failures[:5]
    assert {"http 200", "http 400", "grpc OK", "grpc INVALID_ARGUMENT"} <= found.outcomes.keys()
    assert found.num_streams >= 2
    assert after.loop_busy_ms < MOST_BUSY_MS
    assert after.rss_mb - before.rss_mb < 100


@pytest.mark.slow
def test_three_thousand_cases() -> None:
    check({**shares(3500), "schema": 0})


@pytest.mark.slow
def test_two_hundred_requests_after_the_openapi_document() -> None:
    pytest.importorskip("schemathesis", reason="schemathesis is not installed: make setup")
    from tests.fuzz.schema_campaign import fuzz_schema

    found = Findings()
    with edge_process() as edge:
        fuzz_schema(edge, 200, found)
        assert edge.process.poll() is None
    print(dict(found.outcomes))
    assert not found.failures, found.failures[:5]
    assert {"schema 200", "schema 400"} <= found.outcomes.keys()


@pytest.mark.slow
@pytest.mark.skipif(not (DEMO / "model.safetensors").is_file(), reason="the demo model is not here")
def test_four_hundred_messages_to_workers() -> None:
    found = Findings()
    run_services(400, found)
    print(dict(found.outcomes))
    assert not found.failures, found.failures[:5]
    assert {"prefill session OK", "decode session OK", "/tandem.v1.BlockService/LookUp OK"} <= found.outcomes.keys()
