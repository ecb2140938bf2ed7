"""A small decoder run wholly with Triton's ops, interpreted, in an engine: the tokens that torch's ops give."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.engine.messages import AddSequence, StepOutput
from shared.engine.plan import SampledToken
from shared.engine.runner.draft import draft_layout, load_draft, open_draft
from shared.engine.runner.runner import RunnerConfig
from shared.engine.speculation.speculator import Speculator
from shared.model.checkpoints import write_random_checkpoint
from shared.model.families.registry import load_config
from tests.integration.engine.engine_run import BLOCK_SIZE, EngineRun
from tests.integration.engine.heads import write_knowing
from tests.unit.engine.speculation.drafters import KnowingDrafter

from .conftest import Run

PROMPT = [(7 * i * i + 3) % 128 for i in range(18)]
NONE: dict[tuple[int, ...], list[int]] = {}
LLAMA: tuple[str, dict[str, Any]] = ("LlamaForCausalLM", {})
WINDOWED = ("Qwen3ForCausalLM", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1})

DEEPSEEK = (
    "DeepseekV3ForCausalLM",
    {
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 10,
        "v_head_dim": 12,
        "q_lora_rank": 20,
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
    },
)


def engine_tokens(
    folder: Path, kernels: str, num_tokens: int, *, static: bool, guessed: Mapping[tuple[int, ...], list[int]] = NONE
) -> list[list[SampledToken]]:
    """Two prompts in chunks, one greedy and one sampled; `static` means padded buffers and steps launched ahead.
    `guessed`: by prompt, what a drafter takes for the answer."""
    config = RunnerConfig(max_num_seqs=3, max_seq_len=48, static_decode=static)
    speculator = Speculator([KnowingDrafter(guessed)], num_guesses=4) if guessed else None
    run = EngineRun(
        folder, num_blocks=8, max_num_batched_tokens=13, kernels=kernels, config=config, ahead=static,
        speculator=speculator,
    )  # fmt: skip
    try:
        assert run.decoder.kernels.name == kernels
        sequences = [
            run.sequence(PROMPT, num_tokens, logprobs=5),
            run.sequence(PROMPT[:5], num_tokens, temperature=0.8, top_p=0.9, seed=5, logprobs=5),
        ]
        found: dict[str, list[SampledToken]] = {item.sequence_id: [] for item in sequences}
        for item in sequences:
            run.engine.submit(AddSequence(item))
        while any(len(tokens) < num_tokens for tokens in found.values()):
            for token in run.next(StepOutput).tokens:
                found[token.sequence_id].append(token.token)
        if speculator is not None:
            assert speculator.counters.num_guesses["knowing"] > speculator.counters.num_accepted["knowing"] > 0
        return list(found.values())
    finally:
        run.close()


def model_tokens(folder: Path, kernels: str, num_tokens: int, source: str) -> list[list[int]]:
    """Two prompts, one greedy and one sampled with penalties, in padded steps launched ahead. What guesses, several
    tokens in a row: a head of the checkpoint, or the model itself as a draft; or nothing."""
    config = RunnerConfig(max_num_seqs=3, max_seq_len=48, static_decode=True, piecewise_tokens=13)
    speculator = None
    if source == "draft":
        decoder = load_draft(folder, torch.float32, load_config(folder).vocab_size, kernels)
        draft = open_draft(decoder, draft_layout(decoder, BLOCK_SIZE), 8, 3, config)
        draft.is_queued = True
        speculator = Speculator([], 3, draft)
    run = EngineRun(
        folder, num_blocks=8, max_num_batched_tokens=13, kernels=kernels, config=config, ahead=True,
        speculator=speculator, has_head=source == "head", num_guesses=3, is_queued=True,
    )  # fmt: skip
    try:
        ways = {}, {"temperature": 0.8, "top_p": 0.9, "seed": 5, "frequency_penalty": 0.3}
        sequences = [run.sequence(PROMPT[:count], num_tokens, **way) for count, way in zip((18, 5), ways, strict=True)]
        for item in sequences:
            run.engine.submit(AddSequence(item))
        found = run.collect([item.sequence_id for item in sequences])
        if source:
            counters = run.scheduler._speculator.counters
            assert sum(counters.num_guesses.values()) >= sum(counters.num_accepted.values()) > 0
        return found
    finally:
        run.close()


@pytest.mark.parametrize("source", [pytest.param(name, marks=pytest.mark.slow) for name in ("head", "draft")])
def test_a_model_that_guesses_in_a_row_changes_no_token(interpreted: Run, tmp_path: Path, source: str) -> None:
    folder = write_knowing(tmp_path / "model", num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16)
    expected = model_tokens(folder, "torch", 8, "")
    assert model_tokens(folder, "torch", 8, source) == expected
    assert interpreted(model_tokens, folder, "triton", 8, source) == expected


@pytest.mark.parametrize(
    ("family", "num_tokens", "static"),
    [
        pytest.param(WINDOWED, 4, True, marks=pytest.mark.slow),
        pytest.param(DEEPSEEK, 4, False, marks=pytest.mark.slow),
        *(pytest.param(f, 12, s, marks=pytest.mark.slow) for f in (LLAMA, WINDOWED) for s in (False, True)),
    ],
)
def test_two_layers_give_the_tokens_of_torch(
    interpreted: Run, tmp_path: Path, family: tuple[str, dict[str, Any]], num_tokens: int, static: bool
) -> None:
    architecture, extra = family
    write_random_checkpoint(
        tmp_path, architecture, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, extra_config=extra
    )
    found = interpreted(engine_tokens, tmp_path, "triton", num_tokens, static=static)
    assert_same(found, engine_tokens(tmp_path, "torch", num_tokens, static=False))


@pytest.mark.parametrize("family", [pytest.param(f, marks=pytest.mark.slow) for f in (LLAMA, WINDOWED, DEEPSEEK)])
def test_guesses_of_steps_ahead_change_no_token(
    interpreted: Run, tmp_path: Path, family: tuple[str, dict[str, Any]]
) -> None:
    """Of five tokens the third is guessed wrong."""
    architecture, extra = family
    write_random_checkpoint(
        tmp_path, architecture, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, extra_config=extra
    )
    expected = engine_tokens(tmp_path, "torch", 12, static=False)
    answers = [[token.token_id for token in tokens] for tokens in expected]
    known = {
        tuple(prompt): [token + (place % 5 == 2) for place, token in enumerate(answer)]
        for prompt, answer in zip((PROMPT, PROMPT[:5]), answers, strict=True)
    }
    assert_same(interpreted(engine_tokens, tmp_path, "triton", 12, static=True, guessed=known), expected)


def assert_same(found: list[list[SampledToken]], expected: list[list[SampledToken]]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert [token.token_id for token in ours] == [token.token_id for token in theirs]
        assert len({token.token_id for token in ours}) > 2
        for our, their in zip(ours, theirs, strict=True):
            assert our.logprob == pytest.approx(their.logprob, abs=1e-4)
            assert [p for _, p in our.top] == pytest.approx([p for _, p in their.top], abs=1e-4)
