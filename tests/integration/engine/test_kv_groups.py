"""Models with windows: tokens of transformers by every way, and no byte of KV behind a window."""

from __future__ import annotations

import pytest
import torch

from shared.engine.messages import AddSequence, EngineLoad, ReserveSequence, SequenceReserved, StepOutput
from shared.engine.runner.runner import RunnerConfig
from shared.engine.sequence import Goal
from shared.errors import PromptTooLong
from shared.kv.hashing import chain
from tests.integration.engine.engine_run import BLOCK_SIZE, EngineRun, hand_off
from tests.integration.engine.families import OWN_ROPES, write_family
from tests.integration.engine.test_greedy_against_transformers import load_transformers, transformers_greedy

SLIDING, FULL = "sliding_attention", "full_attention"
PROMPT = [7 + (i * 37) % 190 for i in range(83)]
NUM_TOKENS = 34
"""More than the longest window of SHAPES: the last ones see nothing of the prompt there."""
SHAPES = {
    "a window smaller than a block": ("gpt-oss", [SLIDING, FULL] * 2, 5),
    "a window of one token": ("gemma3", [SLIDING, FULL, SLIDING], 1),
    "first layers of another kind": ("gemma3", [FULL, FULL, SLIDING, SLIDING, SLIDING], 21),
    "windows alone": ("gpt-oss", [SLIDING, SLIDING], 19),
    "a window of whole blocks": ("ministral", [SLIDING, SLIDING, FULL, SLIDING], 2 * BLOCK_SIZE),
}


def checkpoint(folder, shape: str):
    family, kinds, window = SHAPES[shape]
    extra = {"layer_types": kinds, "sliding_window": window, "rms_norm_eps": 1e-5}
    if family == "gpt-oss":
        extra |= {"num_local_experts": 3, "num_experts_per_tok": 2, "attention_bias": True}
    elif family == "gemma3":
        extra |= {"query_pre_attn_scalar": 20, "rope_parameters": OWN_ROPES}
    return write_family(
        folder, family, num_layers=len(kinds), hidden_size=48, num_heads=3, num_kv_heads=1, extra_config=extra
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_every_way_through_the_engine_gives_the_tokens_of_transformers(tmp_path, shape):
    folder = checkpoint(tmp_path / "model", shape)
    # Its cache of a window of one token would keep all tokens.
    expected = transformers_greedy(folder, PROMPT, NUM_TOKENS, use_cache="one token" not in shape)
    with EngineRun(folder) as prefill, EngineRun(folder) as decode:
        assert prefill.layout.windows != (None,)
        found = {"collocated": decode.generate(PROMPT, max_tokens=NUM_TOKENS)[0]}
        found["cached"] = decode.generate(PROMPT, max_tokens=NUM_TOKENS)[0]
        assert decode.scheduler.counters.num_prefix_hit_tokens == 80
        decode.pool.clear_cache()
        found["disaggregated"] = hand_off(prefill, decode, PROMPT, max_tokens=NUM_TOKENS)
        found["again"] = hand_off(prefill, decode, PROMPT, max_tokens=NUM_TOKENS)
        decode.pool.clear_cache()
        found["repaired"] = hand_off(prefill, decode, PROMPT, max_tokens=NUM_TOKENS, corrupt=1)
    assert found == dict.fromkeys(found, expected)


@pytest.mark.parametrize(
    "shape",
    [
        "a window smaller than a block",
        *(
            pytest.param(x, marks=pytest.mark.slow)
            for x in ("first layers of another kind", "a window of whole blocks")
        ),
    ],
)
def test_preemption_changes_no_token(tmp_path, shape):
    """Of the shapes whose sequences grow into a full pool: the others hold too little."""
    folder = checkpoint(tmp_path / "model", shape)
    prompts = [[5 + (i * k) % 200 for i in range(20 + 9 * k)] for k in range(1, 5)]
    with EngineRun(folder, max_num_batched_tokens=512) as roomy:
        alone = [roomy.generate(prompt, max_tokens=40)[0] for prompt in prompts]
    for num_host_blocks in (0, 200):
        with EngineRun(folder, 6, 17, num_host_blocks=num_host_blocks, output_quantile=0.0) as tight:
            together = tight.generate(*prompts, max_tokens=40)
            counters = tight.scheduler.counters
        assert together == alone, num_host_blocks
        assert counters.num_preemptions > 0
        assert (counters.num_swapped_in > 0) == (num_host_blocks > 0)


@pytest.mark.parametrize("config", [{"static_decode": True}, {"piecewise_tokens": 24}, {"staged_transfer": True}])
def test_padded_steps_over_groups_give_the_same_tokens(tmp_path, config):
    folder = checkpoint(tmp_path / "model", "first layers of another kind")
    prompts = [PROMPT[:30], PROMPT[11:60], PROMPT[3:20]]
    with EngineRun(folder) as plain:
        expected = plain.generate(*prompts, max_tokens=40)
    with EngineRun(folder, config=RunnerConfig(max_num_seqs=8, **config)) as padded:
        assert padded.generate(*prompts, max_tokens=40) == expected


def test_a_prefix_without_its_windows_is_no_hit(tmp_path):
    """Another conversation that shares the first blocks begins behind the last ones whose windows are still cached."""
    folder = checkpoint(tmp_path / "model", "first layers of another kind")
    with EngineRun(folder) as run:
        expected = transformers_greedy(folder, [*PROMPT[:64], 3, 4, 5], 16)
        run.generate(PROMPT, max_tokens=1)
        sequence = run.sequence([*PROMPT[:64], 3, 4, 5], 16)
        groups = run.scheduler.groups
        names = chain(sequence.hash_root, sequence.token_ids, groups.block_size, groups.size)
        last_of_window = [place for place in groups.seen_behind(4) if groups.windows[place % groups.size]][-1]
        run.pool.forget(run.pool.match([names[last_of_window]]))
        run.engine.submit(AddSequence(sequence))
        assert run.collect([sequence.sequence_id])[0] == expected
        assert run.scheduler.counters.num_prefix_hit_tokens == 48


def test_a_hand_off_sends_full_layers_and_the_last_blocks_of_windows(tmp_path):
    """gpt-oss's turns of windows of 128 tokens, 8,192 tokens of prompt: the bytes of the count on paper."""
    folder = write_family(
        tmp_path / "model", "gpt-oss", num_layers=2, num_heads=2, num_kv_heads=1, hidden_size=32,
        max_position_embeddings=16_384,
        extra_config={"layer_types": [SLIDING, FULL], "sliding_window": 128, "num_local_experts": 2,
                      "num_experts_per_tok": 1, "attention_bias": True, "intermediate_size": 32},
    )  # fmt: skip
    num_tokens = 8192
    prompt = [3 + i % 200 for i in range(num_tokens)]
    with EngineRun(folder, 600, 2048) as prefill, EngineRun(folder, 600, 2048) as decode:
        receiving = decode.sequence(prompt, 2)
        decode.engine.submit(ReserveSequence(receiving))
        needed = decode.next(SequenceReserved).needed
        sending = prefill.sequence(prompt, 2, Goal.FIRST_TOKEN, frozenset(place for place, _ in needed))
        prefill.engine.submit(AddSequence(sending))
        sent, most, first = 0, 0, None
        while first is None:
            event = prefill.next(StepOutput, EngineLoad)
            if isinstance(event, EngineLoad):
                most = max(most, event.num_total_blocks - event.num_free_blocks)
                continue
            sent += len(event.blocks)
            first = event.tokens[0] if event.tokens else None
    block_bytes, layout = prefill.layout.block_bytes, prefill.layout
    of_layer = layout.format.layer_bytes(1)
    on_paper = of_layer * (num_tokens + 128)  # one layer keeps all tokens, one the last 127, in 8 blocks
    assert (sent, block_bytes) == (len(needed), of_layer * BLOCK_SIZE)
    assert sent * block_bytes == on_paper
    assert sent * block_bytes <= 0.55 * of_layer * num_tokens * 2
    # While it is computed, the window's blocks are those of a chunk and of the window before it.
    assert most <= num_tokens // BLOCK_SIZE + (2048 + 128) // BLOCK_SIZE + 1


@torch.no_grad()
def in_chunks(folder, prompt, num_tokens, size=1024):
    """Greedy tokens of transformers behind a prompt that is read in chunks: of windows its cache keeps no more."""
    model, cache, answer = load_transformers(folder), None, []
    chunks = [prompt[begin : begin + size] for begin in range(0, len(prompt), size)]
    while len(answer) < num_tokens:
        given = torch.tensor([chunks.pop(0) if chunks else answer[-1:]])
        read = model(given, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = read.past_key_values
        answer += [] if chunks else [int(read.logits[0, -1].argmax())]
    return answer


def test_a_long_prompt_is_answered_in_a_pool_of_an_eighth_and_holds_no_more_memory_behind_its_window(tmp_path):
    """32,768 tokens in steps of 1,024, a window of 40: from the second step on 64 blocks that are computed, and the 3
    that the window reaches back to."""
    sizes = {"num_layers": 2, "max_position_embeddings": 40_000, "extra_config": {"sliding_window": 40}}
    folder = write_family(tmp_path / "model", "MistralForCausalLM", **sizes)
    prompt, used = [3 + (i * i * 7 + i // 5) % 200 for i in range(32_768)], []
    expected = in_chunks(folder, prompt, 16)
    with EngineRun(folder, 256, 1024) as run, EngineRun(folder, 256, 1024) as other:
        launch = run.runner.launch

        def watched(plan):
            used.append(run.pool.num_used)
            return launch(plan)

        run.runner.launch = watched
        assert run.generate(prompt, max_tokens=16)[0] == expected
        assert used[:32] == [64, *[67] * 31]
        assert all(count <= 4 for count in used[32:])
        run.pool.clear_cache()
        assert hand_off(other, run, prompt, max_tokens=16) == expected
    # What does not fit beside the window is refused, not computed for ever.
    with EngineRun(folder, 66, 1024) as tight, pytest.raises(PromptTooLong):
        tight.generate(prompt, max_tokens=1)
