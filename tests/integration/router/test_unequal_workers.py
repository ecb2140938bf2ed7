"""Workers in deterministic mode that compute other bits than the fleet are not used, and status says who and why."""

from __future__ import annotations

import pytest

from services.router.views.status import _failures
from shared.fingerprints import deterministic_fingerprint
from tests.integration.router.router_under_test import Router, decode_worker

ONE, OTHER = (deterministic_fingerprint("model", arithmetic) for arithmetic in ("1a", "2b"))


@pytest.mark.parametrize(
    ("fingerprints", "reason"),
    [((ONE, OTHER), "computes model model in other bits"), ((ONE, "model"), "deterministic, the fleet")],
)
async def test_the_second_is_named_and_left_out(fingerprints: tuple[str, str], reason: str) -> None:
    workers = [decode_worker(f"d{i}", fingerprint=fingerprint) for i, fingerprint in enumerate(fingerprints)]
    async with Router([], workers) as router:
        (refused,) = (link for link in router.fleet.links if not link.connected)
        (failure,) = _failures(router.fleet)
        assert f"worker {refused.name} is not connected" in failure
        assert reason in failure


async def test_those_that_compute_alike_serve_together() -> None:
    async with Router([], [decode_worker(f"d{i}", fingerprint=ONE) for i in range(2)]) as router:
        assert all(link.connected for link in router.fleet.links)
        assert _failures(router.fleet) == []
