"""Hidden states that come with a prompt's first token are those of transformers, whatever runs beside it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shared.engine.messages import AddSequence, StepOutput
from shared.engine.runner.runner import RunnerConfig
from shared.engine.sequence import Goal
from shared.errors import Overloaded
from tests.demo import DEMO
from tests.integration.engine.engine_run import MAX_NUM_SEQS, EngineRun
from tests.integration.engine.families import write_family

PROMPTS = [[7 + (i * k) % 190 for i in range(length)] for k, length in ((37, 53), (11, 1), (5, 16), (13, 90))]


def hidden_states(folder: Path, prompt: list[int]) -> Any:
    """[num_tokens, hidden_size] fp32: transformers' last hidden states, behind the final norm."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([prompt])).last_hidden_state[0].numpy()


def pooled(run: EngineRun, prompts: list[list[int]], pooling: str) -> list[Any]:
    """Of prompts that run together, and beside answers."""
    beside = [run.sequence(prompt[:7], 30) for prompt in PROMPTS[:2]]
    asked = [run.sequence(prompt, 1, Goal.FIRST_TOKEN, pooling=pooling) for prompt in prompts]
    for sequence in (*beside, *asked):
        run.engine.submit(AddSequence(sequence))
    names = [sequence.sequence_id for sequence in asked]
    found: dict[str, Any] = {}
    while len(found) < len(names):
        for token in run.next(StepOutput).tokens:
            if token.sequence_id in names:
                found[token.sequence_id] = np.frombuffer(token.token.pooled, dtype="<f4")
            else:
                assert token.token.pooled == b""
    return [found[name] for name in names]


@pytest.fixture(params=["LlamaForCausalLM", "Qwen3ForCausalLM", "demo"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return DEMO if request.param == "demo" else write_family(tmp_path / "model", request.param)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_pooled_states_are_those_of_transformers(folder: Path, pooling: str) -> None:
    states = [hidden_states(folder, prompt) for prompt in PROMPTS]
    expected = [state[-1] if pooling == "last" else state.mean(axis=0) for state in states]
    for config, ahead in ((None, False), (RunnerConfig(MAX_NUM_SEQS, 160, static_decode=True), True)):
        with EngineRun(folder, config=config, ahead=ahead) as run:
            for vector, wanted in zip(pooled(run, PROMPTS, pooling), expected, strict=True):
                np.testing.assert_allclose(vector, wanted, atol=1e-4)
            if pooling == "last":  # of a prompt whose prefix is cached
                hits = run.scheduler.counters.num_prefix_hit_tokens
                (again,) = pooled(run, PROMPTS[:1], pooling)
                assert run.scheduler.counters.num_prefix_hit_tokens > hits
                np.testing.assert_allclose(again, expected[0], atol=1e-4)
        run.scheduler.check_integrity()


def test_a_mean_of_which_a_part_was_cached_is_no_answer(folder: Path) -> None:
    with EngineRun(folder) as run:
        run.generate(PROMPTS[0], max_tokens=1)
        with pytest.raises(Overloaded, match="before it was pooled"):
            pooled(run, PROMPTS[:1], "mean")


def test_a_mean_beside_prompt_logprobs_disturbs_neither(folder: Path) -> None:
    prompt = PROMPTS[3]
    with EngineRun(folder) as run:
        asked = run.sequence(prompt, 1, Goal.FIRST_TOKEN, pooling="mean", prompt_logprobs=0)
        run.engine.submit(AddSequence(asked))
        token = next(token for token in iter_tokens(run) if token.sequence_id == asked.sequence_id)
    assert [entry.token_id for entry in token.prompt_logprobs] == prompt[1:]
    vector = np.frombuffer(token.token.pooled, dtype="<f4")
    np.testing.assert_allclose(vector, hidden_states(folder, prompt).mean(axis=0), atol=1e-4)


def iter_tokens(run: EngineRun) -> Any:
    while True:
        yield from run.next(StepOutput).tokens
