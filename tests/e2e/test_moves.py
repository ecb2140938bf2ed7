"""Running answers move between decode workers: their tokens are those of answers that stay, and nothing is left."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections import Counter

import pytest

from services.router.dispatch.active_request import ActiveRequest
from services.router.dispatch.request import Request, TokenDelta
from services.router.dispatch.states import RequestEvent, RequestState
from services.router.placement.moves import MoveCause
from shared.engine.sampling_params import SamplingParams
from tests.e2e.stage import Stage, prompt, staged
from tests.unit.router.reading import deltas
from tests.waiting import DEADLINE_S

POOL = ("decode-0", "decode-1")
OTHER = dict(zip(POOL, reversed(POOL), strict=True))
KINDS = (
    {},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 0.7, "seed": 4, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"logprobs": 2, "min_tokens": 60, "prompt_logprobs": 1},
)
"""Of sampling."""


class Answer:
    """One answer, read as it comes."""

    def __init__(self, stage: Stage, number: int, max_tokens: int) -> None:
        kind = {"temperature": 0.0, "seed": 1, "ignore_eos": True, **KINDS[number % len(KINDS)]}
        self.deltas: list[TokenDelta] = []
        self.longest_pause_s = 0.0
        self.active: ActiveRequest = stage.dispatcher.submit(
            Request(
                uuid.uuid4().hex,
                tuple(prompt(40 + 17 * number, 37 + 2 * number)),
                SamplingParams(max_tokens=max_tokens, **kind),
                "t",
                arrived_at=time.perf_counter(),
            )
        )
        self.reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        last = 0.0
        async for delta in deltas(self.active):
            now = time.perf_counter()
            if last:
                self.longest_pause_s = max(self.longest_pause_s, now - last)
            last = now
            self.deltas.append(delta)

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def tops(self) -> list[list[int]]:
        """The most likely tokens at each position, as far as they were asked for."""
        return [[token for token, _ in entry.top] for delta in self.deltas for entry in delta.logprobs]

    async def ended(self) -> Answer:
        async with asyncio.timeout(DEADLINE_S):
            await self.reading
        await self.active.aclose()
        return self


async def undisturbed(stage: Stage, num: int, max_tokens: int) -> list[tuple[list[int], list[list[int]]]]:
    """What the answers are when nothing moves."""
    answers = await asyncio.gather(*(Answer(stage, number, max_tokens).ended() for number in range(num)))
    assert all(not answer.active.record.moves for answer in answers)
    return [(answer.tokens, answer.tops) for answer in answers]


async def keep_moving(stage: Stage, answer: Answer, counts: Counter[str], at_most: int) -> None:
    """Moves an answer to and fro while it runs."""
    active = answer.active
    for number in itertools.count(1):
        produced = len(active.produced)
        await stage.until(
            lambda seen=produced: (
                active.state.ended or (active.state is RequestState.DECODING and len(active.produced) > seen)
            )
        )
        if active.state.ended or number > at_most:
            return
        counts["begun"] += stage.dispatcher.move(
            active.request.request_id, OTHER[active.record.decode_worker], MoveCause.RESCUE
        )


async def moved_under_load(stage: Stage, num: int, max_tokens: int, moves_each: int) -> Counter[str]:
    """Moves answers that run together, compares them with undisturbed ones, and counts what became of the moves."""
    expected = await undisturbed(stage, num, max_tokens)
    await stage.idle()
    incarnations = {link.name: link.welcome.worker.incarnation for link in stage.fleet.links}
    counts: Counter[str] = Counter()
    answers = [Answer(stage, number, max_tokens) for number in range(num)]
    await asyncio.gather(*(keep_moving(stage, answer, counts, moves_each) for answer in answers))
    got = [((await answer.ended()).tokens, answer.tops) for answer in answers]
    assert got == expected
    for answer in answers:
        record = answer.active.record
        assert answer.active.state is RequestState.FINISHED
        assert record.num_failures == 0
        assert not any(entry.event is RequestEvent.RETRY for entry in record.entries)
        counts.update(entry.event.value for entry in record.entries)
    await stage.idle()  # an idle engine has checked its pool and its sequences
    assert {link.name: link.welcome.worker.incarnation for link in stage.fleet.links} == incarnations
    return counts


@pytest.mark.parametrize("num_prefill", [1])
async def test_answers_that_move_are_the_answers_that_stay(tmp_path, num_prefill):
    async with staged(tmp_path, num_prefill=num_prefill, num_decode=2) as stage:
        counts = await moved_under_load(stage, num=4, max_tokens=300, moves_each=5)
        assert counts["begun"] == counts["move"] >= 16
        assert counts["switched"] + counts["stayed"] == counts["move"]
        assert counts["switched"] >= 14
        assert sum(stage.load(name).num_blocks_given for name in POOL) > 0, "nothing was fetched from the old worker"
