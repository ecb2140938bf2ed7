"""Models with layers that keep a state: tokens of transformers by every way, and one state in a hand-off."""

from __future__ import annotations

from contextlib import closing

import pytest

from shared.engine.messages import AddSequence, ReserveSequence, SequenceReserved, StepOutput
from shared.engine.sequence import Goal
from shared.kernels.delta import reference
from shared.kv.hashing import chain
from shared.model.families.registry import load_config
from shared.model.ranks.shard import Degrees
from tests.integration.engine.engine_run import BLOCK_SIZE, EngineRun, hand_off
from tests.integration.engine.families import HYBRID_EXPERTS, STATES, write_family
from tests.integration.engine.group_run import GroupRun
from tests.integration.engine.test_greedy_against_transformers import NUM_TOKENS, transformers_greedy
from tests.unit.collectives.in_threads import needs_library

STATE, FULL = "linear_attention", "full_attention"
PROMPT = [7 + (i * 37) % 190 for i in range(83)]
SHAPES = {
    "every fourth layer attends": ("qwen3-next", [STATE, STATE, STATE, FULL] * 2, 2, 4, 8, 12, 4),
    "one key head for odd values": ("qwen3-next", [FULL, STATE, STATE], 1, 3, 5, 7, 3),
    "no convolution to speak of": ("qwen3.5", [STATE, FULL, STATE], 3, 3, 6, 4, 1),
    "a state over several blocks": ("qwen3.5", [STATE, STATE, FULL], 3, 6, 8, 29, 4),
    "whole vectors, for the C++ kernels": ("qwen3-next", [STATE, STATE, FULL], 4, 8, 16, 48, 4),
    "one expert": ("qwen3.5-moe", [STATE, FULL], 2, 2, 8, 8, 2),
    "a decay for each channel": ("kimi-linear", [STATE, STATE, FULL, STATE], 3, 3, 5, 5, 4),
    "channels in whole vectors": ("kimi-linear", [STATE, STATE, FULL], 8, 8, 16, 16, 4),
    "channels in long vectors": ("kimi-linear", [FULL, STATE], 2, 2, 80, 80, 2),
}
VECTORS, CHANNELS = "whole vectors, for the C++ kernels", "channels in whole vectors"
FIRST = ("a state over several blocks", VECTORS, CHANNELS)
SPLITS = [
    (Degrees(2), False),
    (Degrees(2, expert=2), True),
    *(
        pytest.param(degrees, own, marks=pytest.mark.slow)
        for degrees, own in ((Degrees(2), True), (Degrees(2, expert=2), False), (Degrees(4), False), (Degrees(4), True))
    ),
    pytest.param(Degrees(1, 3), False, marks=pytest.mark.slow),
    pytest.param(Degrees(2, 2), False, marks=pytest.mark.slow),
]
"""Ways to split the model of `VECTORS` over ranks, and whether each has a pool of its own."""
SPLIT_CHANNELS = [
    Degrees(2),
    *(
        pytest.param(degrees, marks=pytest.mark.slow)
        for degrees in (Degrees(2, expert=2), Degrees(4), Degrees(1, 3), Degrees(2, 2))
    ),
]
"""Likewise, the model of `CHANNELS`, whose ranks share a pool."""


def checkpoint(folder, shape: str, **sizes):
    family, kinds, keys, values, key_dim, value_dim, kernel = SHAPES[shape]
    extra: dict[str, object] = {
        "layer_types": kinds,
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": value_dim,
        "linear_conv_kernel_dim": kernel,
        "partial_rotary_factor": 0.5,
    }
    if family == "kimi-linear":
        own = {"linear_num_heads": keys, "linear_head_dim": key_dim, "linear_conv_kernel_dim": kernel}
        extra = {**STATES[family][1], **own, "layer_types": kinds}
    elif family != "qwen3.5":
        extra |= HYBRID_EXPERTS | ({"num_experts": 1, "num_experts_per_tok": 1} if shape == "one expert" else {})
    sizes = {"hidden_size": 48, "num_heads": 3, "num_kv_heads": 1, **sizes}
    return write_family(folder, family, num_layers=len(kinds), extra_config=extra, **sizes)


@pytest.fixture(
    params=[*FIRST, *(pytest.param(shape, marks=pytest.mark.slow) for shape in SHAPES if shape not in FIRST)]
)
def folder(request, tmp_path):
    return checkpoint(tmp_path / "model", request.param)


@pytest.mark.parametrize("step", [pytest.param(24, marks=pytest.mark.slow), 7])
def test_every_way_through_the_engine_gives_the_tokens_of_transformers(folder, step):
    expected = transformers_greedy(folder, PROMPT)
    with EngineRun(folder, 64, step) as prefill, EngineRun(folder, 64, step) as decode:
        assert prefill.layout.num_states > 0
        found = {"collocated": decode.generate(PROMPT, max_tokens=NUM_TOKENS)[0]}
        before = decode.scheduler.counters.num_prefix_hit_tokens
        found["cached"] = decode.generate(PROMPT, max_tokens=NUM_TOKENS)[0]
        # The last chunk that ends behind a full block ends behind the prompt's last one.
        assert decode.scheduler.counters.num_prefix_hit_tokens - before == 80
        decode.pool.clear_cache()
        found["disaggregated"] = hand_off(prefill, decode, PROMPT, max_tokens=NUM_TOKENS)
        found["again"] = hand_off(prefill, decode, PROMPT, max_tokens=NUM_TOKENS)
        for name, corrupt in (("repaired", 1), ("without its state", -1)):
            decode.pool.clear_cache()
            found[name] = hand_off(prefill, decode, PROMPT, max_tokens=NUM_TOKENS, corrupt=corrupt)
    assert found == dict.fromkeys(found, expected)


@needs_library
@pytest.mark.parametrize("shape", [VECTORS, CHANNELS])
def test_the_cpp_kernels_compute_the_shape_that_is_named_for_them(tmp_path, monkeypatch, shape):
    """Prompt and answer: none of the model's calls is left to torch's operations."""
    folder = checkpoint(tmp_path / "model", shape)
    expected = transformers_greedy(folder, PROMPT, 4)

    def left(*_):
        raise AssertionError("left to torch's operations")

    monkeypatch.setattr(reference, "delta_attention", left)
    with EngineRun(folder, kernels="cpu") as run:
        assert run.generate(PROMPT, max_tokens=4)[0] == expected


@pytest.fixture(scope="module")
def in_parts(tmp_path_factory):
    """A model whose states have four parts, and what transformers answers to PROMPT."""
    folder = checkpoint(tmp_path_factory.mktemp("parts") / "model", VECTORS, num_heads=8, num_kv_heads=4)
    return folder, transformers_greedy(folder, PROMPT)


@needs_library
@pytest.mark.parametrize(("degrees", "own_pools"), SPLITS)
def test_ranks_give_the_tokens_of_transformers_and_take_each_others_states(in_parts, degrees, own_pools):
    folder, expected = in_parts
    with EngineRun(folder) as one, closing(GroupRun(folder, degrees, own_pools=own_pools)) as group:
        assert one.layout == group.layout
        found = {"collocated": group.generate(PROMPT, max_tokens=NUM_TOKENS)[0]}
        before = group.scheduler.counters.num_prefix_hit_tokens
        found["cached"] = group.generate(PROMPT, max_tokens=NUM_TOKENS)[0]
        assert group.scheduler.counters.num_prefix_hit_tokens - before == 80
        found["to one"] = hand_off(group, one, PROMPT, max_tokens=NUM_TOKENS)
        one.pool.clear_cache()
        found["again to one"] = hand_off(group, one, PROMPT, max_tokens=NUM_TOKENS, corrupt=1)
        group.pool.clear_cache()
        found["from one"] = hand_off(one, group, PROMPT, max_tokens=NUM_TOKENS)
    assert found == dict.fromkeys(found, expected)


@pytest.fixture(scope="module")
def channels(tmp_path_factory):
    """A model whose states lie beside latents in eight parts, and what transformers answers to PROMPT."""
    folder = checkpoint(tmp_path_factory.mktemp("channels") / "model", CHANNELS, num_heads=8)
    return folder, transformers_greedy(folder, PROMPT)


@needs_library
@pytest.mark.parametrize("degrees", SPLIT_CHANNELS)
def test_ranks_split_states_that_lie_beside_latents(channels, degrees):
    folder, expected = channels
    with EngineRun(folder) as one, closing(GroupRun(folder, degrees)) as group:
        assert group.decoder.config.num_state_parts == 8
        found = {"collocated": group.generate(PROMPT, max_tokens=NUM_TOKENS)[0]}
        found["cached"] = group.generate(PROMPT, max_tokens=NUM_TOKENS)[0]
        if one.layout == group.layout:
            found["to one"] = hand_off(group, one, PROMPT, max_tokens=NUM_TOKENS)
            group.pool.clear_cache()
            found["from one"] = hand_off(one, group, PROMPT, max_tokens=NUM_TOKENS)
    assert found == dict.fromkeys(found, expected)


@needs_library
def test_ranks_in_twos_and_in_fours_take_each_others_states(in_parts):
    folder, expected = in_parts
    with closing(GroupRun(folder, Degrees(2))) as two, closing(GroupRun(folder, Degrees(4), own_pools=True)) as four:
        for here, there in ((two, four), (four, two)):
            there.pool.clear_cache()
            assert hand_off(here, there, PROMPT, max_tokens=NUM_TOKENS) == expected


@pytest.mark.parametrize("length", [1, 15, 16, *(pytest.param(n, marks=pytest.mark.slow) for n in (17, 32))])
def test_prompts_about_a_block_give_the_tokens_of_transformers(tmp_path, length):
    folder = checkpoint(tmp_path / "model", VECTORS)
    prompt = PROMPT[:length]
    expected = transformers_greedy(folder, prompt)
    with EngineRun(folder) as prefill, EngineRun(folder) as decode:
        assert decode.generate(prompt, max_tokens=NUM_TOKENS)[0] == expected
        decode.pool.clear_cache()
        assert hand_off(prefill, decode, prompt, max_tokens=NUM_TOKENS) == expected


def test_prompts_and_answers_of_a_batch_do_not_change_each_other(folder):
    """Prompts come while answers are written, and are cut at odd places."""
    prompts = [[5 + (i * k) % 200 for i in range(9 * k)] for k in range(1, 6)]
    expected = [transformers_greedy(folder, prompt, 24) for prompt in prompts]
    with EngineRun(folder, max_num_batched_tokens=13) as run:
        assert run.generate(*prompts, max_tokens=24) == expected


@pytest.mark.parametrize(
    ("shape", "num_host_blocks"),
    [
        pytest.param("every fourth layer attends", 0, marks=pytest.mark.slow),
        pytest.param("every fourth layer attends", 400, marks=pytest.mark.slow),
        pytest.param("a decay for each channel", 0, marks=pytest.mark.slow),
        ("a decay for each channel", 400),
    ],
)
def test_preemption_changes_no_token(tmp_path, shape, num_host_blocks):
    folder = checkpoint(tmp_path / "model", shape)
    prompts = [[5 + (i * k) % 200 for i in range(20 + 9 * k)] for k in range(1, 5)]
    num_tokens = 120  # a state does not grow: only long answers fill the pool
    with EngineRun(folder, max_num_batched_tokens=512) as roomy:
        alone = [roomy.generate(prompt, max_tokens=num_tokens)[0] for prompt in prompts]
    groups = load_config(folder).block_layout(BLOCK_SIZE, "float32").groups
    blocks = -(-groups.num_blocks(len(prompts[-1]) + num_tokens, 17) // groups.size) + 1
    with EngineRun(folder, blocks, 17, num_host_blocks=num_host_blocks, output_quantile=0.0) as tight:
        together = tight.generate(*prompts, max_tokens=num_tokens)
        counters = tight.scheduler.counters
    assert together == alone
    assert counters.num_preemptions > 0
    assert (counters.num_swapped_in > 0) == (num_host_blocks > 0)


def test_a_prefix_without_its_state_is_no_hit(tmp_path):
    """Another conversation that shares the first blocks begins behind the last one whose state is still cached."""
    folder = checkpoint(tmp_path / "model", "every fourth layer attends")
    with EngineRun(folder, max_num_batched_tokens=64) as run:
        prompt = [*PROMPT[:64], 3, 4, 5]
        expected = transformers_greedy(folder, prompt, 16)
        for length in (32, 64):
            run.generate(PROMPT[:length], max_tokens=1)
        before = run.scheduler.counters.num_prefix_hit_tokens
        sequence = run.sequence(prompt, 16)
        groups = run.scheduler.groups
        names = chain(sequence.hash_root, sequence.token_ids, groups.block_size, groups.size)
        run.pool.forget(run.pool.match([names[groups.seen_behind(4)[-1]]]))
        run.engine.submit(AddSequence(sequence))
        assert run.collect([sequence.sequence_id])[0] == expected
        assert run.scheduler.counters.num_prefix_hit_tokens - before == 32


@pytest.mark.parametrize("kv_dtype", ["int8", "bfloat16"])
def test_states_lie_beside_kv_of_other_forms(tmp_path, kv_dtype):
    """Of KV in fewer bits blocks are smaller, and states the same."""
    folder = checkpoint(tmp_path / "model", "one key head for odd values")
    with EngineRun(folder, kv_dtype=kv_dtype) as prefill, EngineRun(folder, kv_dtype=kv_dtype) as decode:
        collocated = decode.generate(PROMPT, max_tokens=NUM_TOKENS)[0]
        decode.pool.clear_cache()
        assert hand_off(prefill, decode, PROMPT, max_tokens=NUM_TOKENS) == collocated


def test_a_hand_off_sends_the_blocks_of_full_layers_and_one_state(tmp_path):
    """Qwen3-Next's turns of three layers with a state and one with attention: the bytes of the count on paper."""
    folder = checkpoint(tmp_path / "model", "every fourth layer attends")
    num_tokens = 400
    prompt = [3 + i % 200 for i in range(num_tokens)]
    with EngineRun(folder, 64, 64) as prefill, EngineRun(folder, 64, 64) as decode:
        receiving = decode.sequence(prompt, 2)
        decode.engine.submit(ReserveSequence(receiving))
        needed = decode.next(SequenceReserved).needed
        sending = prefill.sequence(prompt, 2, Goal.FIRST_TOKEN, frozenset(place for place, _ in needed))
        prefill.engine.submit(AddSequence(sending))
        sent, tokens = 0, ()
        while not tokens:
            stepped = prefill.next(StepOutput)
            sent, tokens = sent + len(stepped.blocks), stepped.tokens
    layout, config = prefill.layout, prefill.decoder.config
    of_states = -(-6 * config.delta.state_bytes // layout.block_bytes)
    assert layout.num_states == of_states
    assert sent == len(needed) == num_tokens // BLOCK_SIZE + of_states
    assert layout.block_bytes == 2 * layout.format.layer_bytes(BLOCK_SIZE)
    everything = 8 * layout.format.layer_bytes(num_tokens)
    assert sent * layout.block_bytes <= 0.4 * everything
