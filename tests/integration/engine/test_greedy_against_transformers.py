"""64 greedy tokens, fp32: collocated = prefix-cached = disaggregated = transformers, for every family."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.engine.runner.runner import RunnerConfig
from tests.demo import DEMO
from tests.integration.engine.engine_run import EngineRun, hand_off
from tests.integration.engine.families import EXPERTS, FAMILIES, OTHERS, STATES, write_family

NUM_TOKENS = 64


def load_transformers(folder: Path) -> Any:
    """The same checkpoint in transformers, fp32."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM

    # transformers' other ways to multiply experts refuse rows that are not whole vectors.
    eager = {"experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **eager).eval()


def transformers_greedy(
    folder: Path, prompt: list[int], num_tokens: int = NUM_TOKENS, *, use_cache: bool = True
) -> list[int]:
    model = load_transformers(folder)
    tokens = torch.tensor([prompt])
    with torch.inference_mode():
        output = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=num_tokens, min_new_tokens=num_tokens,
            do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=use_cache,
        )  # fmt: skip
    return output[0, len(prompt) :].tolist()


FIRST = ("LlamaForCausalLM", "qwen3-moe", "deepseek-v3", "gpt-oss", "qwen3-next")
REST = [name for name in (*FAMILIES, *EXPERTS, *OTHERS, *STATES, "demo") if name not in FIRST]


@pytest.fixture(params=[*FIRST, *(pytest.param(name, marks=pytest.mark.slow) for name in REST)])
def folder(request, tmp_path):
    if request.param == "demo":
        return DEMO
    return write_family(tmp_path / "model", request.param)


def test_every_way_through_the_engine_gives_the_tokens_of_transformers(folder):
    prompt = [7 + (i * 37) % 190 for i in range(53)]
    expected = transformers_greedy(folder, prompt)
    with EngineRun(folder) as prefill, EngineRun(folder) as decode:
        collocated = decode.generate(prompt, max_tokens=NUM_TOKENS)[0]
        cached = decode.generate(prompt, max_tokens=NUM_TOKENS)[0]
        assert decode.scheduler.counters.num_prefix_hit_tokens == 48
        decode.pool.clear_cache()
        disaggregated = hand_off(prefill, decode, prompt, max_tokens=NUM_TOKENS)
        again = hand_off(prefill, decode, prompt, max_tokens=NUM_TOKENS)
        decode.pool.clear_cache()
        repaired = hand_off(prefill, decode, prompt, max_tokens=NUM_TOKENS, corrupt=1)
    assert collocated == expected
    assert cached == expected
    assert disaggregated == expected
    assert again == expected
    assert repaired == expected


@pytest.mark.parametrize(
    "family",
    [
        "LlamaForCausalLM",
        "qwen3-moe",
        "deepseek-v3",
        *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS),
    ],
)
def test_batch_mates_chunks_and_preemption_do_not_change_tokens(tmp_path, family):
    folder = write_family(tmp_path / "model", family)
    prompts = [[5 + (i * k) % 200 for i in range(20 + 9 * k)] for k in range(1, 5)]
    with (
        EngineRun(folder, num_blocks=64, max_num_batched_tokens=512) as roomy,
        EngineRun(folder, num_blocks=9, max_num_batched_tokens=17) as tight,
    ):
        alone = [roomy.generate(prompt, max_tokens=40)[0] for prompt in prompts]
        together = tight.generate(*prompts, max_tokens=40)
        preemptions = tight.scheduler.counters.num_preemptions
    assert together == alone
    assert preemptions > 0


def test_blocks_that_pass_through_buffers_arrive_the_same(tmp_path):
    folder = write_family(tmp_path / "model", "LlamaForCausalLM")
    prompt = [5 + (i * 3) % 200 for i in range(53)]
    config = RunnerConfig(max_num_seqs=8, staged_transfer=True)
    with EngineRun(folder, config=config) as prefill, EngineRun(folder, config=config) as decode:
        whole = hand_off(prefill, decode, prompt, max_tokens=NUM_TOKENS)
        decode.pool.clear_cache()
        repaired = hand_off(prefill, decode, prompt, max_tokens=NUM_TOKENS, corrupt=1)
    assert whole == repaired == transformers_greedy(folder, prompt)


def test_sampled_tokens_are_the_same_by_any_way(tmp_path):
    folder = write_family(tmp_path / "model", "LlamaForCausalLM")
    prompt = [5 + (i * 3) % 200 for i in range(40)]
    settings = {"temperature": 0.9, "top_p": 0.95, "seed": 1234, "repetition_penalty": 1.1}
    with EngineRun(folder) as prefill, EngineRun(folder) as decode:
        collocated = decode.generate(prompt, max_tokens=32, **settings)[0]
        decode.pool.clear_cache()
        disaggregated = hand_off(prefill, decode, prompt, max_tokens=32, **settings)
        other = decode.generate(prompt, max_tokens=32, **{**settings, "seed": 99})[0]
    assert disaggregated == collocated
    assert other != collocated
