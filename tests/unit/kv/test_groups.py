"""Which blocks of KV groups a sequence needs, and how many."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.kv.groups import STATE_WINDOW, UNBOUNDED, KVGroups, group_layers
from shared.kv.hashing import chain

BLOCK = 4
WINDOWS = st.lists(st.none() | st.integers(1, 30), min_size=1, max_size=4).map(tuple)


def seen(groups: KVGroups, num_tokens: int) -> set[int]:
    """Places of all positions that the token at `num_tokens` reads, of those computed before."""
    return {
        position // groups.block_size * groups.size + group
        for group, window in enumerate(groups.windows)
        for position in range(num_tokens)
        if window is None or position > num_tokens - window
    }


@given(WINDOWS, st.integers(0, 90))
def test_a_sequence_needs_what_its_next_token_reads(windows, num_tokens):
    groups = KVGroups(BLOCK, windows)
    needed, read = set(groups.seen_by_next(num_tokens)), seen(groups, num_tokens)
    assert read <= needed
    # And no more than the block that the next token itself begins in, where a window ends before it.
    assert all(place // groups.size == num_tokens // BLOCK for place in needed - read)


@given(WINDOWS, st.sets(st.integers(0, 60)), st.integers(0, 15))
def test_the_longest_prefix_is_the_last_at_which_every_group_can_go_on(windows, missing, num_blocks):
    groups = KVGroups(BLOCK, windows)
    whole = [length for length in range(1, num_blocks + 1) if not missing & seen(groups, length * BLOCK)]
    assert groups.longest(lambda place: place not in missing, num_blocks) == max(whole, default=0)


@given(WINDOWS, st.integers(1, 200), st.integers(1, 40))
def test_a_sequence_never_holds_more_than_is_counted(windows, num_tokens, step):
    groups = KVGroups(BLOCK, windows)
    most = 0
    for begin in range(0, num_tokens, step):
        end = min(begin + step, num_tokens)
        held = set(groups.seen_by_next(begin)) | {
            block * groups.size + group
            for block in range(begin // BLOCK, -(-end // BLOCK))
            for group in range(groups.size)
        }
        most = max(most, len(held))
    assert most <= groups.num_blocks(num_tokens, step) <= -(-num_tokens // BLOCK) * groups.size


@given(WINDOWS, st.integers(0, 300), st.integers(1, 40))
def test_the_longest_sequence_of_a_pool_fits_and_a_longer_one_does_not(windows, num_blocks, step):
    groups = KVGroups(BLOCK, windows)
    most = groups.max_tokens(num_blocks, step)
    assert most % BLOCK == 0
    assert groups.num_blocks(most, step) <= num_blocks
    if None in windows:
        assert most < UNBOUNDED
    if most < UNBOUNDED:
        assert groups.num_blocks(most + BLOCK, step) > num_blocks


@given(WINDOWS, st.integers(1, 200), st.integers(0, 50), st.integers(1, 40))
def test_what_a_pool_lacks_is_never_less_than_what_its_prefix_leaves(windows, num_tokens, num_cached, step):
    """Blocks that are held behind the prefix, of which those that the pool has are not taken."""
    groups, start = KVGroups(BLOCK, windows), min(num_cached, num_tokens // BLOCK) * BLOCK
    at_hand, most = set(groups.seen_by_next(start)), 0
    for begin in range(start, num_tokens, step):
        end = min(begin + step, num_tokens)
        rows = range(begin // BLOCK, -(-end // BLOCK))
        held = set(groups.seen_by_next(begin)) | {block * groups.size + g for block in rows for g in range(groups.size)}
        most = max(most, len(held - at_hand))
    assert most <= groups.num_missing(num_tokens, start, step) <= groups.num_blocks(num_tokens, step)


@given(st.integers(0, 90), st.integers(1, 40))
def test_a_step_writes_the_states_that_go_on(start, count):
    """Behind the newest token, and behind the last block that it fills."""
    groups, end = KVGroups(BLOCK, (None, STATE_WINDOW), 1), start + count
    written = groups.written_states(start, end)
    assert (end - 1) // BLOCK == written[-1]
    filled = [block for block in range(start // BLOCK, end // BLOCK) if (block + 1) * BLOCK > start]
    assert set(written) == {(end - 1) // BLOCK, *filled[-1:]}
    assert groups.seen_by_next(end)[-1] == written[-1] * groups.size + 1


@given(st.integers(1, 3), st.integers(1, 200), st.integers(1, 40))
def test_of_states_a_sequence_holds_the_one_it_reads_and_two_that_it_writes(num_states, num_tokens, step):
    groups = KVGroups(BLOCK, (None, *[STATE_WINDOW] * num_states), num_states)
    most = 0
    for begin in range(0, num_tokens, step):
        end = min(begin + step, num_tokens)
        held = (
            {(begin - 1) // BLOCK, *groups.written_states(begin, end)} if begin else set(groups.written_states(0, end))
        )
        most = max(most, -(-end // BLOCK) + len(held) * num_states)
    assert most <= groups.num_blocks(num_tokens, step) <= -(-num_tokens // BLOCK) * groups.size


def test_a_prefix_is_as_long_as_the_last_state_that_was_kept():
    groups = KVGroups(BLOCK, (None, STATE_WINDOW, STATE_WINDOW), 2)
    states = {1: (1, 2), 4: (1, 2), 6: (1,)}  # by block, the groups that have theirs

    def has(place: int) -> bool:
        block, group = divmod(place, 3)
        return group == 0 or group in states.get(block, ())

    assert [groups.longest(has, end) for end in range(9)] == [0, 0, 2, 2, 2, 5, 5, 5, 5]


def test_names_of_groups_differ_and_the_first_ones_are_those_of_one_group():
    tokens = list(range(13))
    plain, grouped = chain(b"root", tokens, BLOCK), chain(b"root", tokens, BLOCK, 3)
    assert grouped[::3] == plain
    assert len(set(grouped)) == len(grouped) == 9
    assert grouped[:6] == chain(b"root", tokens[:8], BLOCK, 3)


def gemma(num_layers: int) -> list[int | None]:
    return [512 if (layer + 1) % 6 else None for layer in range(num_layers)]


@pytest.mark.parametrize(
    ("windows", "sizes"),
    [
        ([None] * 5, [5]),
        ([4096] * 3, [3]),
        ([128, None] * 12, [12, 12]),
        (gemma(26), [4, 4, 4, 4, 4, 4, 2]),
        (gemma(34), [5, 5, 5, 5, 5, 5, 4]),
        (gemma(48), [8, 8, 8, 8, 8, 8]),
        ([4, None, None], [1, 1, 1]),
        ([4, None, 7, 4], [1, 1, 1, 1]),
        ([None] + [4] * 40, [41]),  # too many groups of one
    ],
)
def test_layers_with_one_window_share_groups_of_one_size(windows, sizes):
    groups = group_layers(windows)
    assert [len(layers) for layers in groups] == sizes
    assert sorted(layer for layers in groups for layer in layers) == list(range(len(windows)))
    if len(groups) > 1:
        kinds = [{windows[layer] for layer in layers} for layers in groups]
        assert all(len(kind) == 1 for kind in kinds)
        assert kinds[0] == {None}
