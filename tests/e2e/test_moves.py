"""Running answers move between decode workers: their tokens are those of answers that stay, and nothing is left."""

from __future__ import annotations

import asyncio
import signal
import time
import uuid
from collections import Counter

import pytest

from services.router.dispatch.active_request import ActiveRequest
from services.router.dispatch.record import RequestEvent, RequestRecord, RequestState
from services.router.dispatch.request import Request, TokenDelta
from services.router.placement.moves import MoveCause
from services.router.views.moves import MoveOutcome, move_accounts
from shared.engine.sampling_params import SamplingParams
from tests.e2e.stage import Stage, prompt, staged
from tests.unit.kernels.isas import needs_library
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
NUM_MOVES = 500
NUM_ANSWERS = 10
"""Of the longer test, at once."""


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
    """Moves an answer to and fro while it runs; a busy machine's worker that is suspected just then takes none."""
    active, num_begun = answer.active, 0
    while num_begun < at_most:
        produced = len(active.produced)
        await stage.until(
            lambda seen=produced: (
                active.state.ended or (active.state is RequestState.DECODING and len(active.produced) > seen)
            )
        )
        if active.state.ended:
            break
        num_begun += stage.dispatcher.move(
            active.request.request_id, OTHER[active.record.decode_worker], MoveCause.RESCUE
        )
    counts["begun"] += num_begun


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


async def test_answers_that_move_are_the_answers_that_stay_and_a_worker_that_ends_moves_its_own(tmp_path):
    """The second worker is gone before its answers end."""
    async with staged(tmp_path, num_decode=2, num_kv_blocks=600) as stage:
        counts = await moved_under_load(stage, num=4, max_tokens=450, moves_each=3)
        assert counts["begun"] == counts["move"] >= 10
        assert counts["switched"] + counts["stayed"] == counts["move"]
        assert counts["switched"] >= 8
        assert sum(stage.load(name).num_blocks_given for name in POOL) > 0, "nothing was fetched from the old worker"

        expected = await undisturbed(stage, 4, 700)
        await stage.idle()
        answers = [Answer(stage, number, 700) for number in range(4)]
        await stage.until(lambda: all(len(answer.active.produced) > 10 for answer in answers))
        drained = answers[0].active.record.decode_worker
        stage.cluster.children[drained].send_signal(signal.SIGTERM)
        assert await stage.cluster.children[drained].wait(DEADLINE_S) == 0
        assert any(not answer.active.state.ended for answer in answers), "it waited for the longest"
        got = [((await answer.ended()).tokens, answer.tops) for answer in answers]
        assert got == expected
        moves = [account for answer in answers for account in move_accounts(answer.active.record)]
        assert {(account.note.cause, account.note.source) for account in moves} == {(MoveCause.DRAIN, drained)}
        assert all(answer.active.record.num_failures == 0 for answer in answers)
        await stage.idle()


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        {"dtype": "fp32"},
        pytest.param({"dtype": "bf16", "deterministic": True}, marks=needs_library),
    ],
    ids=["fp32", "bf16-deterministic"],
)
@pytest.mark.parametrize("mode", ["disaggregated", "collocated"])
async def test_five_hundred_moves_under_load_change_no_token(tmp_path, mode, spec):
    num_prefill = 1 if mode == "disaggregated" else 0
    shape = {"num_prefill": num_prefill, "num_decode": 2, "mode": mode, "num_kv_blocks": 1200, **spec}
    async with staged(tmp_path, **shape) as stage:
        counts: Counter[str] = Counter()
        while counts["move"] < NUM_MOVES:
            left = -(-(NUM_MOVES - counts["move"]) // NUM_ANSWERS)
            counts += await moved_under_load(stage, NUM_ANSWERS, max_tokens=800, moves_each=min(left, 50))
        assert counts["switched"] + counts["stayed"] == counts["move"]
        assert counts["switched"] >= 0.9 * NUM_MOVES


class Striker:
    """Observes the records of a stage, and kills a worker of a move at an event of it."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._event: RequestEvent | None = None
        self._is_target = False
        self.killed = ""
        stage.dispatcher._observer = self

    def arm(self, event: RequestEvent, *, target: bool) -> None:
        self._event, self._is_target, self.killed = event, target, ""

    def noted(self, record: RequestRecord) -> None:
        if record.entries[-1].event is self._event:
            self._event = None
            self.killed = record.moves[-1].target if self._is_target else record.moves[-1].source
            self._stage.kill(self.killed)


async def struck(stage: Stage, striker: Striker, event: RequestEvent, *, target: bool) -> RequestRecord:
    """Several answers that move to and fro, with a worker killed at an event of a move; the record of that one."""
    expected = await undisturbed(stage, 3, 300)
    await stage.idle()
    striker.arm(event, target=target)
    answers = [Answer(stage, number, 300) for number in range(3)]
    await stage.until(lambda: all(len(answer.active.produced) > 20 for answer in answers))
    moved = answers[0].active
    others = (link.name for link in stage.fleet.decodes.values() if link.connected)
    to = next(name for name in others if name != moved.record.decode_worker)
    assert stage.dispatcher.move(moved.request.request_id, to, MoveCause.DRAIN)
    got = [((await answer.ended()).tokens, answer.tops) for answer in answers]
    assert striker.killed
    assert got == expected
    await stage.idle()
    return moved.record


@pytest.mark.slow
async def test_a_worker_that_dies_as_an_answer_moves_costs_no_token(tmp_path):
    async with staged(tmp_path, num_decode=3) as stage:
        striker = Striker(stage)
        record = await struck(stage, striker, RequestEvent.MOVE, target=True)
        assert [account.outcome for account in move_accounts(record)] == [MoveOutcome.STAYED]
        assert record.num_failures == 0
        record = await struck(stage, striker, RequestEvent.MOVE, target=False)
        assert [account.outcome for account in move_accounts(record)] == [MoveOutcome.CARRIED]
        assert record.num_failures == 1
        assert not any(entry.event is RequestEvent.RETRY for entry in record.entries)


@pytest.mark.slow
@pytest.mark.parametrize("event", [RequestEvent.MOVE, RequestEvent.SWITCHED, RequestEvent.CAUGHT_UP])
@pytest.mark.parametrize("target", [True, False])
@pytest.mark.parametrize("prefix_fetch", ["always", "never"])
async def test_a_worker_that_dies_at_any_moment_of_a_move_costs_no_token(tmp_path, event, target, prefix_fetch):
    """Without fetches the next worker computes for longer, and asks anew behind that."""
    async with staged(tmp_path, num_decode=3, prefix_fetch=prefix_fetch) as stage:
        record = await struck(stage, Striker(stage), event, target=target)
        assert record.num_failures <= 1
