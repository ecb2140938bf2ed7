"""Mode auto: the split flips under load, and no answer is another one for it."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest

from services.router.placement.decision import Choice, Route
from services.router.placement.policy import PlacementConfig
from tests.e2e.stage import Chosen, prompt, staged

NAMES = ("worker-0", "worker-1")
PROMPTS = [prompt(40 + 37 * n, seed=31 + n) for n in range(6)]


class Flipping(Chosen):
    """Wants the other worker to decode, each time that it is asked, and every third prompt handed over: with all cached
    on both workers the policy hands over few or none."""

    num_flips = 0

    def choose_pair(self, need, decodes, prefills):
        self.num_flips += 1
        wanted = frozenset({NAMES[self.num_flips % 2]})
        self.split.decodes = lambda *_: wanted
        choice = super().choose_pair(need, decodes, prefills)
        if choice is None or choice.prefill is not None or self.num_flips % 3:
            return choice
        [other] = set(NAMES) - {choice.decode}
        return Choice(choice.decode, other, Route.HAND_OFF, choice.predicted_ttft_s)


@pytest.mark.parametrize("num_flips", [40, pytest.param(500, marks=pytest.mark.slow)])
async def test_flips_under_load_change_no_token_and_keep_every_block(tmp_path, num_flips):
    placement = Flipping(PlacementConfig(tpot_target_s=10.0))
    async with staged(tmp_path, placement=placement, num_prefill=1, num_decode=1, mode="auto") as stage:
        before = {link.name: link.welcome.worker.incarnation for link in stage.fleet.links}
        assert before.keys() == set(NAMES)
        expected = [(await stage.ask(each))[0] for each in PROMPTS]
        draws, pairs = random.Random(5), set()

        async def asks() -> None:
            while placement.num_flips < num_flips:
                which = draws.randrange(len(PROMPTS))
                tokens, record = await stage.ask(PROMPTS[which], tenant=f"t{draws.randrange(3)}")
                assert tokens == expected[which]
                pairs.add((record.prefill_worker, record.decode_worker))

        await asyncio.gather(*(asks() for _ in range(6)))
        assert {decode for _, decode in pairs} == set(NAMES)
        assert pairs & {(a, b) for a, b in itertools.permutations(NAMES, 2)}, "no prompt was handed over"
        await stage.idle()
        after = {link.name: link.welcome.worker.incarnation for link in stage.fleet.links}
        assert after == before, "a flip starts nothing anew"
