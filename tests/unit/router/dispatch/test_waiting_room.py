"""What a request's way through the waiting room tells of the demand."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

from services.router.dispatch.active_request import ActiveRequest, WriteCoalescer
from services.router.dispatch.request import Request
from services.router.dispatch.waiting_room import DispatchConfig, WaitingRoom
from services.router.placement.policy import Placement, PlacementConfig
from services.router.placement.views import NO_HITS, Pool
from shared.engine.sampling_params import SamplingParams
from shared.errors import Overloaded


async def no_hits(_: ActiveRequest) -> object:
    return NO_HITS


async def test_a_request_that_is_placed_anew_has_arrived_once() -> None:
    pools = {"layout": None, "prefill_pool": Pool(), "decode_pool": Pool()}
    fleet = SimpleNamespace(**pools, shared=False, not_ready_reason=lambda: "", heard=None, converts=False)
    placement = Placement(PlacementConfig(tpot_target_s=0.05, ttft_target_s=1.0))
    config = DispatchConfig(mode="auto", queue_timeout_s=0.001)
    room = WaitingRoom(fleet, placement, SimpleNamespace(hits_for=no_hits), config, list)  # type: ignore[arg-type]
    active = ActiveRequest(Request("r", (5,) * 100, SamplingParams(max_tokens=8, seed=0)), WriteCoalescer())
    for returning in (False, True, True):
        with contextlib.suppress(Overloaded):
            await room.place(active, returning=returning)
    assert placement.split.demand.num_arrived == 1
