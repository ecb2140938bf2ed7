"""Admission expects of a prompt only what no worker has of it."""

from __future__ import annotations

import pytest

from services.router.placement.views import NO_WORK, PrefixHits, Work
from shared.errors import Overloaded
from shared.rpc.pb.tandem.v1 import worker_pb2
from tests.integration.router.router_under_test import Router, decode_worker, prefill_worker, read

TOKEN_S = 1e-3
PROMPT = tuple(range(800))


class Hits:
    """A look-up that always finds the same."""

    def __init__(self, num_tokens: int) -> None:
        self._hits = PrefixHits.of({"p0": num_tokens} if num_tokens else {})

    async def hits_for(self, _) -> PrefixHits:
        return self._hits


async def routed(router: Router, num_hit_tokens: int):
    """A prompt of 0.8 s with 0.3 s to its first token."""
    for n in range(1, 20):
        router.dispatcher._room._predictor.observe_prefill(NO_WORK, Work(n * 50), n * 50 * TOKEN_S)
    router.dispatcher._room._lookup = Hits(num_hit_tokens)
    return router.ask(prompt=PROMPT, ttft_timeout_s=0.3)


async def test_a_long_prompt_that_a_worker_holds_is_let_in():
    prefill, decode = prefill_worker(), decode_worker()
    decode.num_blocks = prefill.num_blocks = 1000
    async with Router([prefill], [decode]) as router:
        running = await routed(router, 784)
        await decode.expect(worker_pb2.Reserve)
        await running.aclose()


async def test_the_same_prompt_is_refused_where_nobody_holds_it():
    prefill, decode = prefill_worker(), decode_worker()
    decode.num_blocks = prefill.num_blocks = 1000
    async with Router([prefill], [decode]) as router:
        with pytest.raises(Overloaded):
            await read(await routed(router, 0))
        assert decode.commands.empty()


async def test_admission_hears_how_much_of_the_prompt_is_cached(monkeypatch):
    prefill, decode = prefill_worker(), decode_worker()
    decode.num_blocks = prefill.num_blocks = 1000
    async with Router([prefill], [decode]) as router:
        admission, seen = router.dispatcher._room._admission, []
        enter = admission.enter

        def noting(item, *args, num_cached, **more):
            seen.append((item.num_tokens, num_cached))
            return enter(item, *args, num_cached=num_cached, **more)

        monkeypatch.setattr(admission, "enter", noting)
        running = await routed(router, 784)
        await decode.expect(worker_pb2.Reserve)
        assert seen == [(16, 784)]
        await running.aclose()
