"""The scheduler's order of work, step by step."""

from __future__ import annotations

import pytest

from shared.engine.finish_reason import FinishReason
from shared.engine.messages import SequenceEnded, StepOutput
from shared.engine.plan import SampledToken, StepResult
from shared.engine.scheduler.lifecycle import TRY_AGAIN
from shared.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from shared.engine.sequence import Goal, Status
from shared.errors import Overloaded
from shared.kv.pool import BlockPool
from shared.sizing.step_time import chunk_pairs
from tests.unit.engine.builders import EOS, sequence


def scheduler(num_blocks=16, max_num_seqs=4, max_num_batched_tokens=8):
    return Scheduler(BlockPool(num_blocks, 4), SchedulerConfig(max_num_seqs, max_num_batched_tokens))


def step(s, *tokens):
    plan = s.schedule()
    shape = [(item.sequence_id, item.start, len(item.token_ids)) for item in plan.sequences]
    given = iter(tokens)
    sampled = tuple(SampledToken(next(given, 9)) for item in plan.sequences for _ in item.samples)
    return shape, s.apply(plan, StepResult(sampled))


def test_a_long_prompt_is_computed_in_chunks_of_the_budget_and_sampled_at_its_end():
    s = scheduler()
    s.add(sequence("a", list(range(2, 22))))
    assert step(s) == ([("a", 0, 8)], step_outcome())
    assert step(s)[0] == [("a", 8, 8)]
    shape, outcome = step(s, 42)
    assert shape == [("a", 16, 4)]
    assert [(t.sequence_id, t.token.token_id, t.finish_reason) for t in outcome.tokens] == [("a", 42, None)]
    assert step(s)[0] == [("a", 20, 1)]


def step_outcome():
    return StepOutput()


def test_decodes_go_first_and_chunks_take_what_is_left_of_the_budget():
    s = scheduler(max_num_batched_tokens=8)
    s.add(sequence("a", [2, 3, 4]))
    step(s)
    s.add(sequence("b", list(range(2, 22))))
    assert step(s)[0] == [("a", 3, 1), ("b", 0, 7)]


def test_a_repeated_prompt_computes_only_what_follows_its_last_full_block():
    s = scheduler()
    s.add(sequence("a", list(range(2, 12)), max_tokens=1))
    while s.has_work:
        step(s)
    again = sequence("b", list(range(2, 12)), max_tokens=1)
    s.add(again)
    assert step(s)[0] == [("b", 8, 2)]
    assert again.num_cached_tokens == 8
    assert (s.counters.num_prompt_tokens, s.counters.num_prefix_hit_tokens) == (20, 8)


def test_what_the_pool_has_of_a_waiting_prompt_is_not_counted_as_queued():
    s = scheduler()
    s.add(sequence("a", list(range(2, 12)), max_tokens=1))
    assert (s.sequences.work.num_queued_tokens, s.sequences.work.num_queued_pairs) == (10, chunk_pairs(10, 0))
    while s.has_work:
        step(s)
    again = sequence("b", list(range(2, 14)))
    s.add(again)
    assert again.num_computed_tokens == 0  # it holds nothing yet
    assert (s.sequences.work.num_queued_tokens, s.sequences.work.num_queued_pairs) == (4, chunk_pairs(4, 8))
    s.pool.clear_cache()  # what was counted on may go
    step(s)
    assert (s.sequences.work.num_queued_tokens, s.sequences.work.num_queued_pairs) == (4, chunk_pairs(4, 8))
    assert again.num_cached_tokens == 0


def test_a_prompt_of_whole_blocks_still_computes_its_last_block_to_have_logits():
    s = scheduler()
    for name in ("a", "b"):
        s.add(sequence(name, list(range(2, 10)), max_tokens=1))
        shape, _ = step(s)
    assert shape == [("b", 4, 4)]


def test_out_of_blocks_the_youngest_goes_and_comes_back_without_losing_tokens():
    s = scheduler(num_blocks=6, max_num_batched_tokens=32)
    a, b = sequence("a", [2] * 7, max_tokens=14), sequence("b", [3] * 7, max_tokens=8)
    s.add(a)
    s.add(b)
    produced = {"a": 0, "b": 0}
    for _ in range(60):
        if not s.has_work:
            break
        for token in step(s)[1].tokens:
            produced[token.sequence_id] += 1
        s.check_integrity()
    assert produced == {"a": 14, "b": 8}
    assert s.counters.num_preemptions > 0
    assert s.pool.num_used == 0


def test_reserving_takes_blocks_for_the_prompt_and_one_token_and_names_those_that_must_arrive():
    s = scheduler(num_blocks=4)
    a = sequence("a", list(range(2, 10)))
    assert s.reserve(a) == [0, 1]
    assert s.pool.num_used == 3
    with pytest.raises(Overloaded) as refused:
        s.reserve(sequence("b", [2] * 8))
    assert refused.value.details["limit"] == 0  # the free one is kept for what `a` will produce
    assert s.pool.num_used == 3


def test_a_joined_sequence_decodes_from_its_first_token_and_its_blocks_become_prefix():
    s = scheduler()
    a = sequence("a", list(range(2, 12)))
    s.reserve(a)
    assert not s.has_work
    s.join("a", 50, {0: 1, 1: 2, 2: 3}, None)
    assert step(s, 51)[0] == [("a", 10, 1)]
    assert a.token_ids[10:] == [50, 51]
    assert s.pool.num_cached == 2
    assert s.pool.checksum_of(a.block_ids[1]) == 2


def test_blocks_from_the_first_bad_one_on_are_computed_here():
    s = scheduler(max_num_batched_tokens=32)
    s.reserve(sequence("a", list(range(2, 14))))
    s.join("a", 50, {0: 1, 1: 2, 2: 3}, 1)
    assert s.pool.num_cached == 1
    assert step(s)[0] == [("a", 4, 9)]
    assert s.pool.num_cached == 3


def test_a_first_token_that_ends_the_request_leaves_its_blocks_as_prefix():
    s = scheduler()
    s.reserve(sequence("a", list(range(2, 12))))
    s.join("a", EOS, {0: 1, 1: 2, 2: 3}, None)
    assert not s.has_work
    assert (s.pool.num_used, s.pool.num_cached) == (0, 2)


def test_a_prefill_sequence_ships_each_needed_block_once_as_soon_as_it_is_sealed():
    s = scheduler(max_num_batched_tokens=6)
    s.add(sequence("a", list(range(2, 13)), goal=Goal.FIRST_TOKEN, ship_blocks=frozenset({1, 2})))
    assert [ship.index for ship in step(s)[1].blocks] == []
    shape, outcome = step(s, 42)
    assert shape == [("a", 6, 5)]
    assert [ship.index for ship in outcome.blocks] == [1, 2]  # the last one is not full
    assert s.pool.num_used == 2  # held for the shipper alone
    s.release([ship.block_id for ship in outcome.blocks])
    assert s.pool.num_used == 0


@pytest.mark.parametrize(
    ("ship_blocks", "chunks"), [({0, 1, 2, 3, 4, 5}, [8, 8, 4, 5]), ({5}, [8, 8, 4, 5]), (set(), [8, 8, 8, 1])]
)
def test_the_last_chunk_of_a_prompt_whose_blocks_are_sent_is_short(ship_blocks, chunks):
    s = Scheduler(BlockPool(16, 4), SchedulerConfig(4, 8, max_last_chunk=5))
    s.add(sequence("a", list(range(2, 27)), goal=Goal.FIRST_TOKEN, ship_blocks=frozenset(ship_blocks)))
    shapes = []
    while s.has_work:
        shapes += step(s)[0]
    assert [count for _, _, count in shapes] == chunks


def test_a_last_chunk_leaves_the_rest_of_its_step_to_other_prompts():
    s = Scheduler(BlockPool(16, 4), SchedulerConfig(4, 12, max_last_chunk=4))
    for name in ("a", "b"):
        s.add(sequence(name, [ord(name)] * 12, goal=Goal.FIRST_TOKEN, ship_blocks=frozenset({0})))
    assert step(s)[0] == [("a", 0, 8), ("b", 0, 4)]
    assert step(s)[0] == [("a", 8, 4), ("b", 4, 4)]
    assert step(s)[0] == [("b", 8, 4)]


def test_waiting_sequences_do_not_start_when_their_blocks_would_starve_the_running_ones():
    s = scheduler(num_blocks=4, max_num_batched_tokens=32)
    s.add(sequence("a", [2] * 8, max_tokens=4))
    step(s)
    b = sequence("b", [3] * 8)
    s.add(b)
    step(s)
    assert b.status is Status.WAITING


def test_a_prompt_without_room_is_looked_up_again_once_there_is_more(monkeypatch):
    pool = BlockPool(8, 4)
    s = Scheduler(pool, SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, output_quantile=0))
    s.add(sequence("a", [2] * 20, max_tokens=100))
    s.add(sequence("b", [3] * 4, max_tokens=100))
    step(s)  # six of eight blocks
    looked_up, match = [], pool.match
    monkeypatch.setattr(pool, "match", lambda hashes: looked_up.append(len(hashes)) or match(hashes))
    c = sequence("c", [4] * 12)
    s.add(c)
    for _ in range(3):
        step(s)
    assert looked_up == [2, 2], "as it came, and at its first turn"
    s.abort("a")
    step(s)
    assert (c.status, looked_up[2:]) == (Status.RUNNING, [2, 2])


def test_a_prompt_without_room_starts_once_others_hold_its_prefix_although_there_is_no_more_room():
    pool = BlockPool(8, 16)
    held = pool.allocate(2)  # as by a sequence whose blocks arrive
    s = Scheduler(pool, SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=128, output_quantile=0))
    s.add(sequence("a", [2] * 8, max_tokens=100))
    step(s)
    b = sequence("b", [4] * 80)
    s.add(b)
    step(s)
    for block, block_hash in zip(held, b.block_hashes, strict=False):
        pool.seal(block, block_hash)
    for _ in range(TRY_AGAIN):
        assert b.status is Status.WAITING
        step(s)
    assert b.status is Status.RUNNING
    assert b.num_cached_tokens == 32


@pytest.mark.parametrize(
    ("sampling", "tokens", "finish"),
    [
        ({"max_tokens": 3}, [5, 6, 7], "length"),
        ({"max_tokens": 9}, [5, EOS], "stop"),
        ({"max_tokens": 3, "ignore_eos": True}, [EOS, EOS, EOS], "length"),
        ({"max_tokens": 9, "min_tokens": 2}, [5, EOS], "stop"),
        ({"max_tokens": 9, "stop_token_ids": (7,)}, [5, 7], "stop"),
    ],
)
def test_a_sequence_ends_at(sampling, tokens, finish):
    s = scheduler()
    s.add(sequence("a", [2, 3], **sampling))
    finishes = [step(s, token)[1].tokens[0].finish_reason for token in tokens]
    assert finishes == [None] * (len(tokens) - 1) + [FinishReason(finish)]
    assert not s.has_work


def test_ends_are_banned_until_min_tokens():
    s = scheduler()
    s.add(sequence("a", [2, 3], max_tokens=9, min_tokens=2, stop_token_ids=(7,)))
    assert s.schedule().sequences[0].samples[0].banned_token_ids == (EOS, 7)


def test_blocks_that_come_into_the_pool_meanwhile_end_the_chunk_before_them_and_are_not_computed():
    s = scheduler(num_blocks=32)
    prompt = list(range(2, 36))  # 8 full blocks of 4 and 2 tokens
    s.add(sequence("a", prompt, max_tokens=1))
    assert step(s)[0] == [("a", 0, 8)]
    running = s.sequences.get("a")
    arrived = s.pool.allocate(3)
    for block_id, block_hash in zip(arrived, running.block_hashes[5:8], strict=True):
        s.pool.seal(block_id, block_hash)
    s.pool.release(arrived)
    s.take_started()
    assert step(s)[0] == [("a", 8, 8)]
    assert step(s)[0] == [("a", 16, 4)]
    shape, outcome = step(s, 42)
    assert shape == [("a", 32, 2)]
    assert len(outcome.tokens) == 1
    assert s.take_started() == [("a", 12)]
    assert s.counters.num_prefix_hit_tokens == 12
    assert s.take_ended() == [SequenceEnded(tuple(running.block_hashes[:8]), range(8))]
    s.check_integrity()
    assert s.pool.num_used == 0


def test_a_handed_over_prompt_is_not_among_the_blocks_that_a_sequence_leaves():
    s = scheduler()
    given = sequence("a", [2, 3, 4, 5, 6], max_tokens=4)
    s.reserve(given)
    s.join("a", 9, {}, None)
    while s.has_work:
        step(s)
    assert s.take_ended() == [SequenceEnded(tuple(given.block_hashes[:2]), range(1, 2))]


def test_log_probabilities_of_a_prompt_are_its_tokens_wherever_chunks_begin():
    s = scheduler(max_num_batched_tokens=3)
    prompt = [*range(20, 30)]
    a = sequence("a", prompt, prompt_logprobs=0)
    s.add(a)
    found: list[tuple[SampledToken, ...]] = []
    while not found:
        plan = s.schedule()
        (item,) = plan.sequences
        targets = tuple(SampledToken(token_id, -0.5) for token_id in item.targets)
        outcome = s.apply(plan, StepResult(tuple(SampledToken(9) for _ in item.samples), (targets,)))
        found = [token.prompt_logprobs for token in outcome.tokens]
    assert [[each.token_id for each in tokens] for tokens in found] == [prompt[1:]]
