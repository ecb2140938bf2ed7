"""A router that drains finishes what it has and refuses the rest."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.router.dispatch.record import RequestRecord
from services.router.dispatch.request import Request
from services.router.drain import REASON, Drain
from shared.engine.sampling_params import SamplingParams
from shared.errors import Draining, Overloaded

REQUEST = Request("r", (1, 2, 3), SamplingParams(seed=1, max_tokens=8))


class Scripted:
    """A core that counts."""

    def __init__(self) -> None:
        self.num_active = 0

    def submit(self, _: Request, record: RequestRecord) -> Any:
        self.num_active += 1
        return self

    def max_prompt_tokens(self) -> int:
        return 100

    def check_room(self, tenant: str, priority: int, ttft_timeout_s: float) -> None:
        raise Overloaded(f"{tenant} {priority} {ttft_timeout_s}")

    def not_ready_reason(self) -> str:
        return "" if self.num_active < 2 else "full"


def test_it_is_the_core_until_it_drains() -> None:
    core = Scripted()
    drain = Drain(core)
    assert drain.submit(REQUEST, REQUEST.new_record()) is core
    assert (drain.max_prompt_tokens(), drain.not_ready_reason()) == (100, "")
    drain.submit(REQUEST, REQUEST.new_record())
    assert drain.not_ready_reason() == "full"
    with pytest.raises(Overloaded, match=r"acme 3 0\.5"):
        drain.check_room("acme", 3, 0.5)


async def test_it_ends_with_the_last_request() -> None:
    core = Scripted()
    drain = Drain(core)
    drain.submit(REQUEST, REQUEST.new_record())
    finishing = asyncio.create_task(drain.finish(30.0))
    await asyncio.sleep(0)
    with pytest.raises(Draining) as refused:
        drain.submit(REQUEST, REQUEST.new_record())
    assert refused.value.http_status == 503
    assert refused.value.retry_after_s > 0
    assert drain.not_ready_reason() == REASON
    assert not finishing.done()
    core.num_active = 0
    await asyncio.wait_for(finishing, 60.0)


async def test_it_does_not_wait_longer_than_it_may() -> None:
    core = Scripted()
    drain = Drain(core)
    drain.submit(REQUEST, REQUEST.new_record())
    await asyncio.wait_for(drain.finish(0.05), 60.0)
