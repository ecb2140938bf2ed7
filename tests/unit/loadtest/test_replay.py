"""Replaying a trace at another scale keeps exactly its prefix structure."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import loadtest
from loadtest.workloads.conversation import ideal_cached_share
from loadtest.workloads.tokens import TokenSource
from loadtest.workloads.trace import BLOCK_LEN, Replay, TraceRequest
from loadtest.workloads.trace_json import read_json_trace
from shared.errors import ConfigError
from tests.examples import examples

SLICE = Path(loadtest.__file__).parent / "traces" / "mooncake_conversation_head.jsonl"
RNG = np.random.default_rng(0)


def prompts(replay: Replay, seed: int = 1) -> list[list[int]]:
    tokens = TokenSource(seed)
    return [tokens.prompt(c.turns[0].spans) for c in replay.conversations(RNG)]


def common_prefix_len(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("scale", [1, 8, 32, 64])
def test_lengths_are_divided_and_rounded_up(scale: int) -> None:
    requests = list(read_json_trace(SLICE))[:50]
    replay = Replay(requests, BLOCK_LEN, scale, 8)
    for request, conversation in zip(requests, replay.conversations(RNG), strict=True):
        turn = conversation.turns[0]
        assert turn.num_new_tokens == -(-request.num_prompt_tokens // scale)
        assert turn.num_output_tokens == -(-request.num_output_tokens // 8)
        assert len(turn.spans) == len(request.hash_ids)
        assert {span.num_tokens for span in turn.spans[:-1]} <= {BLOCK_LEN // scale}


def test_blocks_are_shared_in_the_replay_exactly_where_hash_ids_are_shared_in_the_trace() -> None:
    requests = list(read_json_trace(SLICE))
    blocks_of: dict[int, set[tuple[int, ...]]] = {}
    ids_of: dict[tuple[int, ...], set[int]] = {}
    for request, prompt in zip(requests, prompts(Replay(requests, BLOCK_LEN, 32, 8)), strict=True):
        for i, hash_id in enumerate(request.hash_ids[:-1]):
            block = tuple(prompt[16 * i : 16 * (i + 1)])
            blocks_of.setdefault(hash_id, set()).add(block)
            ids_of.setdefault(block, set()).add(hash_id)
    assert all(len(blocks) == 1 for blocks in blocks_of.values())
    assert all(len(ids) == 1 for ids in ids_of.values())


@examples(40)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=2, max_size=6),
    st.sampled_from([1, 16, 32, 64]),
    st.data(),
)
def test_two_prompts_share_as_many_tokens_as_their_ids_say(
    id_lists: list[list[int]], scale: int, data: st.DataObject
) -> None:
    requests = []
    for ids in id_lists:
        last = data.draw(st.integers(1, BLOCK_LEN))
        requests.append(TraceRequest(0.0, (len(ids) - 1) * BLOCK_LEN + last, 1, tuple(ids)))
    made = prompts(Replay(requests, BLOCK_LEN, scale))
    block = BLOCK_LEN // scale
    for a, prompt_a in zip(id_lists, made, strict=True):
        for b, prompt_b in zip(id_lists, made, strict=True):
            ids = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            shared = common_prefix_len(prompt_a, prompt_b)
            limit = min(len(prompt_a), len(prompt_b))
            # Behind the shared blocks, tokens differ but for a chance of one in the vocabulary each.
            assert min(ids * block, limit) <= shared <= min(ids * block + 8, limit)


def ideal(requests: list[TraceRequest], scale: int = 1) -> float:
    return ideal_cached_share(Replay(requests, BLOCK_LEN, scale).conversations(RNG))


def test_the_ideal_share_is_that_of_an_endless_cache_at_every_scale() -> None:
    requests = [TraceRequest(0, 1024, 1, (0, 1)), TraceRequest(1, 1024, 1, (0, 2)), TraceRequest(2, 512, 1, (2,))]
    assert ideal(requests) == pytest.approx(512 / 2560), "block 2 at a prompt's start is not block 2 behind block 0"
    requests[2] = TraceRequest(2, 1000, 1, (0, 2))
    assert ideal(requests) == ideal(requests, 8) == pytest.approx((512 + 1000) / 3048)
    whole = list(read_json_trace(SLICE))
    assert ideal(whole) == pytest.approx(ideal(whole, 32), abs=0.002) == pytest.approx(0.135, abs=0.01)


def test_a_scale_that_does_not_divide_the_block_and_an_empty_slice_are_refused() -> None:
    request = TraceRequest(0, 512, 1, (0,))
    with pytest.raises(ConfigError, match="scale must divide the trace's block of 512"):
        Replay([request], BLOCK_LEN, 30)
    with pytest.raises(ConfigError, match="scale_output"):
        Replay([request], BLOCK_LEN, 32, 0)
    with pytest.raises(ConfigError, match="has no requests"):
        Replay([], BLOCK_LEN)


def test_prompts_and_answers_that_no_model_reads_or_writes_are_refused_by_their_scale() -> None:
    most = 1 << 20
    assert Replay([TraceRequest(0, 2 * most, 4 * most)], 2, 2, 4).requests
    with pytest.raises(ConfigError, match=f"longest prompt has {2 * most + 1} tokens") as caught:
        Replay([TraceRequest(0, 2 * most + 1, 1)], 2, 2)
    assert caught.value.field == "scale"
    with pytest.raises(ConfigError, match="longest answer") as caught:
        Replay([TraceRequest(0, 1, most + 1)], 1)
    assert caught.value.field == "scale_output"
