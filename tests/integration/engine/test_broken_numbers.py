"""NaN and infinite numbers end the sequence that they belong to with an error that names their origin, and no other."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.engine.messages import AddSequence, SequenceFailed, StepOutput
from shared.engine.runner.runner import RunnerConfig
from shared.errors import NumericalFault
from tests.integration.engine.engine_run import EngineRun
from tests.integration.engine.families import write_family
from tests.waiting import DEADLINE_S

PROMPTS = [[5 + (i * k) % 150 for i in range(10 + 11 * k)] for k in range(1, 4)]
BROKEN_TOKEN = 210
NUM_TOKENS = 12


def break_weight(folder, name, row, value=float("nan")) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[name][row] = value
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A folder and what its model says to the prompts, which never is the token that will be broken."""
    folder = write_family(tmp_path_factory.mktemp("model"), "LlamaForCausalLM")
    with EngineRun(folder) as run:
        outputs = run.generate(*PROMPTS, max_tokens=NUM_TOKENS)
    assert all(BROKEN_TOKEN not in tokens for tokens in outputs)
    break_weight(folder, "model.embed_tokens.weight", BROKEN_TOKEN)
    return folder, outputs


@pytest.mark.parametrize(
    ("config", "ahead", "source"),
    [
        (RunnerConfig(), False, None),
        (RunnerConfig(max_num_seqs=8, static_decode=True), True, None),
        (RunnerConfig(debug_numerics=True), True, "embedding"),
    ],
)
def test_a_broken_sequence_ends_alone_and_the_engine_goes_on(sound, config, ahead, source):
    folder, expected = sound
    with EngineRun(folder, config=config, ahead=ahead) as run:
        mates = [run.sequence(prompt, NUM_TOKENS) for prompt in PROMPTS]
        poisoned = run.sequence([*PROMPTS[0], BROKEN_TOKEN, 8, 9], NUM_TOKENS)
        for item in (*mates[:2], poisoned, mates[2]):
            run.engine.submit(AddSequence(item))
        outputs = {item.sequence_id: [] for item in mates}
        failures = []
        while any(len(tokens) < NUM_TOKENS for tokens in outputs.values()) or not failures:
            match run.events.get(timeout=DEADLINE_S):
                case SequenceFailed() as failed:
                    failures.append(failed)
                case StepOutput(tokens=tokens):
                    for token in tokens:
                        outputs[token.sequence_id].append(token.token.token_id)
        after = run.generate(*PROMPTS, max_tokens=NUM_TOKENS)
    assert list(outputs.values()) == expected == after
    (failed,) = failures
    assert failed.sequence_id == poisoned.sequence_id
    assert isinstance(failed.error, NumericalFault)
    assert failed.error.details == {"position": len(PROMPTS[0]) + 3} | ({"source": source} if source else {})
    run.scheduler.check_integrity()
    assert run.pool.num_used == 0


@pytest.mark.parametrize(
    ("family", "weight", "row", "value", "source"),
    [
        ("LlamaForCausalLM", "model.layers.0.self_attn.v_proj.weight", 3, float("nan"), "layer 0 attention"),
        ("LlamaForCausalLM", "model.layers.1.self_attn.o_proj.weight", 5, float("inf"), "layer 1 attention"),
        ("LlamaForCausalLM", "model.layers.1.mlp.down_proj.weight", 0, float("nan"), "layer 1 feed-forward"),
        ("LlamaForCausalLM", "lm_head.weight", 17, float("inf"), "output head"),
        ("mixtral", "model.layers.1.block_sparse_moe.gate.weight", 2, float("nan"), "layer 1 feed-forward"),
        ("deepseek-v3", "model.layers.1.self_attn.q_b_proj.weight", 3, float("nan"), "layer 1 attention"),
    ],
)
def test_the_part_where_the_numbers_broke_is_named(tmp_path, family, weight, row, value, source):
    folder = write_family(tmp_path, family)
    break_weight(folder, weight, row, value)
    with (
        EngineRun(folder, config=RunnerConfig(debug_numerics=True)) as run,
        pytest.raises(NumericalFault, match=f"first in its {source}") as broken,
    ):
        run.generate(PROMPTS[0], max_tokens=2, temperature=1.0)
    assert broken.value.details["source"] == source


def test_an_infinite_logit_of_one_step_is_not_chosen(tmp_path):
    """Also where it is sampled from, with a token ahead of it already under way."""
    folder = write_family(tmp_path, "LlamaForCausalLM")
    break_weight(folder, "lm_head.weight", 17, torch.inf)
    for static in (False, True):
        config = RunnerConfig(max_num_seqs=2, static_decode=static)
        with EngineRun(folder, config=config, ahead=True) as run, pytest.raises(NumericalFault, match="token 21"):
            run.generate(PROMPTS[0], max_tokens=9, temperature=0.5, top_p=0.5)
