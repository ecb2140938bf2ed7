"""Any order of add, reserve, join, launch, collect, abort and release leaves pool and sequences sound, lets every step
read its own KV and nobody else's, and ends with no block used."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from shared.engine.plan import NoToken, SampledToken, StepPlan, StepResult
from shared.engine.sampling_params import MOST_GUESSES
from shared.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from shared.engine.scheduler.sequence_table import OpenWork
from shared.engine.sequence import Goal, Status
from shared.engine.speculation.ngram import NgramDrafter
from shared.engine.speculation.speculator import Speculator
from shared.errors import Overloaded
from shared.kv.groups import NO_BLOCK, KVGroups
from shared.kv.pool import BlockPool
from shared.sizing.step_time import StepWork, chunk_pairs
from tests.examples import examples
from tests.unit.engine.block_memory import BlockMemory
from tests.unit.engine.builders import sequence
from tests.unit.engine.speculation.drafters import HostileDrafter

BLOCK = 4
BROKEN = 6
"""Stands for a row of logits that nothing can be chosen from."""
PROMPTS = st.lists(st.integers(2, 3), min_size=1, max_size=30) | st.integers(1, 30).map(lambda count: [2] * count)
"""Many share a prefix."""
WINDOWS = [(None,), (None,), (None, 5), (None, 1), (None, None, 3, 9), (6,), (1, 10)]
STATES = [((None, 2), 1), ((None, 2, 2), 2), ((None, 6, 2), 1)]
GROUPS = [KVGroups(BLOCK, windows) for windows in WINDOWS] + [KVGroups(BLOCK, *states) for states in STATES]


class SchedulerMachine(RuleBasedStateMachine):
    """Prompts share prefixes on purpose: tokens are drawn from a few values."""

    receiving = Bundle("receiving")

    @initialize(
        num_blocks=st.integers(8, 24),
        max_seqs=st.integers(1, 6),
        budget=st.integers(1, 20),
        quantile=st.sampled_from([0.0, 0.5, 1.0]),
        guess=st.integers(1, 12),
        num_slots=st.sampled_from([0, 4, 12, 40]),
        target_s=st.sampled_from([0.0, 3.0]),
        max_overtaken_s=st.sampled_from([0.0, 5.0, 1e9]),
        unsent_share=st.sampled_from([0.1, 1.0]),
        last_chunk=st.sampled_from([0, 1, 4, 9]),
        drafting=st.sampled_from(["", "hostile", "ngram"]),
        groups=st.sampled_from(GROUPS),
    )
    def start(
        self,
        num_blocks,
        max_seqs,
        budget,
        quantile,
        guess,
        num_slots,
        target_s,
        max_overtaken_s,
        unsent_share,
        last_chunk,
        drafting,
        groups,
    ):
        self.groups = groups
        num_blocks *= self.groups.size
        self.pool = BlockPool(num_blocks, BLOCK)
        self.now = 0.0
        config = SchedulerConfig(
            max_seqs,
            budget,
            quantile,
            guess,
            num_slots,
            target_s,
            max_overtaken_s=max_overtaken_s,
            max_unsent_share=unsent_share,
            max_last_chunk=last_chunk,
        )
        drafter = HostileDrafter() if drafting == "hostile" else NgramDrafter()
        self.guesses = bool(drafting)
        speculator = Speculator([drafter], num_guesses=MOST_GUESSES) if drafting else None
        self.scheduler = Scheduler(self.pool, config, lambda: self.now, groups=self.groups, speculator=speculator)
        self.memory = BlockMemory(num_blocks, num_slots, groups)
        self.needed: dict[str, list[int]] = {}
        self.all: dict[str, object] = {}
        self.max_tokens_total = self.groups.max_tokens(num_blocks - self.groups.size, budget)
        self.count = 0
        self.live: dict[str, object] = {}
        self.shipped: list[tuple[int, bytes]] = []
        self.flying: deque[tuple[StepPlan, list[int]]] = deque()

    def new(self, tokens, max_tokens, **kwargs):
        self.count += 1
        tokens = tokens[: self.max_tokens_total - 1]
        item = sequence(
            f"s{self.count}", tokens, max_tokens=min(max_tokens, self.max_tokens_total - len(tokens)), **kwargs
        )
        self.all[item.sequence_id] = item
        return item

    @rule(tokens=PROMPTS, max_tokens=st.integers(1, 12))
    def add(self, tokens, max_tokens):
        item = self.new(tokens, max_tokens)
        self.scheduler.add(item)
        self.live[item.sequence_id] = item

    @rule(tokens=PROMPTS, receiver=st.sampled_from([b"x", b"y"]))
    def add_prefill(self, tokens, receiver):
        item = self.new(tokens, 4, goal=Goal.FIRST_TOKEN, receiver=receiver)
        seen = self.groups.seen_by_next(item.num_tokens)
        item.ship_blocks = frozenset(seen) & frozenset(range(1, 8 * self.groups.size))
        self.scheduler.add(item)
        self.live[item.sequence_id] = item

    @rule(target=receiving, tokens=PROMPTS)
    def reserve(self, tokens):
        item = self.new(tokens, 6)
        used = self.pool.num_used
        try:
            needed = self.scheduler.reserve(item)
        except Overloaded:
            assert self.pool.num_used == used
            return multiple()
        self.live[item.sequence_id] = item
        held = item.num_computed_tokens // BLOCK * self.groups.size
        seen = self.groups.seen_by_next(item.num_tokens)
        if self.groups.is_plain:
            assert needed == [place for place in seen if place >= held]
        assert set(needed) <= set(seen)
        assert needed == sorted(needed)
        assert [place for place, block_id in enumerate(item.block_ids[: seen[-1] + 1]) if block_id >= 0] == seen
        self.needed[item.sequence_id] = needed
        arriving = {item.block_ids[index] for index in needed}
        assert all(self.pool.is_writable(block_id) for block_id in arriving)
        self.memory.receive(item, needed, whole=False)
        for plan, _ in self.flying:
            assert not arriving & written_by(plan, self.groups).keys(), (
                "a step that runs writes to a block that will be received"
            )
        return item

    @rule(item=consumes(receiving), token=st.integers(1, 5), bad=st.booleans())
    def join(self, item, token, bad):
        if item.status is not Status.RECEIVING:
            return  # aborted before
        needed = self.needed[item.sequence_id]
        worst = needed[0] if bad and needed else None
        self.memory.receive(item, needed, whole=worst is None)
        self.scheduler.join(item.sequence_id, token, dict.fromkeys(needed, 7), worst)

    @rule(data=st.data())
    def abort(self, data):
        if self.live:
            sequence_id = data.draw(st.sampled_from(sorted(self.live)))
            self.scheduler.abort(sequence_id)
            assert not self.scheduler.abort(sequence_id)

    @rule(tokens=st.lists(st.integers(1, BROKEN), min_size=1, max_size=8))
    def step(self, tokens):
        while self.flying:
            self.collect()
        self.launch(tokens)
        self.collect()

    @rule(tokens=st.lists(st.integers(1, BROKEN), min_size=1, max_size=8))
    def launch(self, tokens):
        if len(self.flying) < 2:
            self.launch_step(tokens)

    def launch_step(self, tokens) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan.num_tokens <= self.scheduler.config.max_num_batched_tokens
        for item in plan.sequences:
            assert item.token_ids
            assert len(item.block_ids) // self.groups.size * BLOCK >= item.end
            self.check_pending(item)
        written = written_by(plan, self.groups)
        assert all(map(self.pool.is_writable, written)), "a step writes to a shared or sealed block"
        for before, _ in self.flying:
            for block_id, name in written_by(before, self.groups).items():
                assert written.get(block_id, name) == name, "two sequences write to one block"
        if not plan.is_empty:
            self.flying.append((plan, tokens))
            self.memory.launch(plan, self.all)
        return plan

    def check_pending(self, item) -> None:
        if item.pending is not None:
            before = [other.sequence_id for other in self.flying[-1][0].sequences for _ in other.samples]
            assert before[item.pending] == item.sequence_id
            assert item.token_ids == (0,)

    @rule()
    def collect(self):
        if not self.flying:
            return
        plan, tokens = self.flying.popleft()
        count = sum(len(item.samples) for item in plan.sequences)
        drawn = [tokens[i % len(tokens)] for i in range(count)]
        self.check_guesses(plan)
        sampled = tuple(NoToken() if token == BROKEN else SampledToken(token) for token in drawn)
        self.now += 1.0
        outcome = self.scheduler.apply(plan, StepResult(sampled), float(len(plan.sequences)))
        for ship in outcome.blocks:
            assert ship.index in range(1, 8 * self.groups.size)
            self.shipped.append((ship.block_id, ship.receiver))
        for failed in self.scheduler.take_failed():
            assert self.live[failed.sequence_id].status is Status.FINISHED

    def check_guesses(self, plan) -> None:
        for item in plan.sequences:
            if item.guesses:
                sequence = self.all[item.sequence_id]
                assert item.pending is None, "a guess follows a token that is not known"
                assert item.end < sequence.max_tokens_total, "a token behind the longest answer was guessed"
                for count, spec in enumerate(item.samples):
                    assert spec.position == item.start + 1 + count
            else:
                assert len(item.samples) <= 1

    @rule()
    def release_one(self):
        if self.shipped:
            block_id, receiver = self.shipped.pop()
            self.scheduler.release([block_id], receiver)

    def release_all(self):
        while self.shipped:
            self.release_one()

    @invariant()
    def sound(self):
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check_integrity()
        self.check_work()
        for item in self.live.values():
            if item.status is Status.RUNNING and not item.num_in_flight_tokens:
                self.check_windows(item)
        for plan, _ in self.flying:
            assert all(map(self.pool.is_writable, written_by(plan, self.groups))), (
                "a step that runs writes to a block given back"
            )
        for item in list(self.live.values()):
            if item.status is Status.FINISHED:
                assert not item.block_ids or item.num_in_flight_tokens > 0
                del self.live[item.sequence_id]

    def check_work(self) -> None:
        """Load reports have what is to be computed of each sequence."""
        live = [item for item in self.live.values() if item.status is not Status.FINISHED]
        decodes = [item for item in live if item.status is Status.RUNNING and item.num_uncomputed_tokens == 1]
        prompts = [item for item in live if item not in decodes and item.status is not Status.RECEIVING]
        promised = [item for item in live if item not in decodes and item.goal is Goal.COMPLETION]
        waiting = [item.num_missing_tokens for item in prompts if item.status is Status.WAITING]
        partly = [item.num_uncomputed_tokens for item in prompts if item.status is Status.RUNNING]
        missing = [item for item in prompts if item.num_missing_tokens > 1]
        assert self.scheduler.sequences.work == OpenWork(
            sum(waiting) + sum(partly),
            sum(chunk_pairs(item.num_missing_tokens, item.num_tokens - item.num_missing_tokens) for item in missing),
            StepWork(len(decodes), sum(item.num_tokens for item in decodes)),
            StepWork(len(promised), sum(item.num_tokens for item in promised)),
        )

    def check_windows(self, item) -> None:
        """No block stays behind what the newest token sees; only guesses that were wrong leave blocks far ahead."""
        size = self.groups.size
        for group, window in self.groups.windowed:
            first = self.groups.first_seen(window, item.num_computed_tokens)
            behind = item.block_ids[group : first * size : size]
            assert set(behind) <= {NO_BLOCK}, f"{item.sequence_id} keeps blocks behind its windows"
        if not self.guesses:
            most = self.groups.num_blocks(max(1, len(item.block_ids) // size * BLOCK), BLOCK)
            assert item.num_held_blocks <= most, f"{item.sequence_id} has more blocks than it needs"

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for item in list(self.live.values()):
            if item.status is Status.RECEIVING:
                self.scheduler.abort(item.sequence_id)
        for _ in range(2000):
            if len(self.flying) == 2:
                self.collect()
            self.release_all()
            if not self.scheduler.has_work:
                break
            plan = self.launch_step([3])
            assert self.flying, "work is left and nothing holds blocks, but no step was planned"
            if plan.is_empty:
                self.collect()
        while self.flying:
            self.collect()
        self.release_all()
        assert not self.scheduler.has_work, "a sequence never ended"
        assert self.pool.num_used == 0, "a block leaked"


def written_by(plan: StepPlan, groups: KVGroups) -> dict[int, str]:
    """Blocks that a step writes to, with whose they are."""
    written: dict[int, str] = {}
    for item in plan.sequences:
        states = groups.written_states(item.start, item.start + 1 if item.guesses else item.end)
        assert len(item.guess_states) == groups.num_states * len(item.guesses)
        for block_id in item.guess_states:
            assert block_id not in written, "two states are written to one block"
            written[block_id] = item.sequence_id
        for index in range(item.start // BLOCK * groups.size, -(-item.end // BLOCK) * groups.size):
            if groups.is_state(index % groups.size) and index // groups.size not in states:
                continue
            assert item.block_ids[index] not in written, "two sequences write to one block"
            written[item.block_ids[index]] = item.sequence_id
    return written


TestScheduler = pytest.mark.slow(SchedulerMachine.TestCase)
TestScheduler.settings = examples(100, stateful_step_count=30)
