"""An answer is the same whatever a checkpoint's head guesses of it, and a good one's guesses come true."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.engine.plan import NoToken, SampledToken
from shared.engine.runner.runner import RunnerConfig
from shared.engine.sampling_params import MOST_GUESSES, Speculation
from shared.engine.speculation.head_model import HeadGuess
from shared.engine.speculation.ngram import NgramDrafter
from shared.kernels.batch import AttentionBatch
from shared.kernels.pool_view import PoolView
from shared.model.decoder import Decoder
from shared.model.families.registry import load_config
from shared.model.text.tokenizer import Tokenizer
from shared.structure.compiler import StructureCompiler
from tests.demo import DEMO
from tests.integration.engine.engine_run import BLOCK_SIZE, EngineRun, hand_off
from tests.integration.engine.families import write_family
from tests.integration.engine.heads import FAMILIES, write_knowing, write_with_random_head
from tests.integration.engine.test_greedy_against_transformers import load_transformers
from tests.integration.engine.test_speculation import LENGTH, PROMPTS, accepted, answers, assert_same, ids

LONG = 48
"""Output tokens with which the batch outgrows 16 blocks."""
SAMPLED = {"temperature": 1.5, "seed": 9, "top_p": 0.95}
WAYS: list[dict[str, Any]] = [
    {"logprobs": 2},
    SAMPLED,
    {"temperature": 1.2, "seed": 12, "top_k": 30, "min_p": 0.02},
    {"temperature": 0.8, "seed": 13, "frequency_penalty": 0.5, "bad_sequences": ((30,), (16, 282), (5, 6, 7))},
    {"logit_bias": ((16, 3.0), (30, -100.0)), "bad_sequences": ((18,),)},
    {"stop_token_ids": (18, 40, 77, 160), "temperature": 1.4, "seed": 17},
    {"prompt_logprobs": 1},
]
"""Without structures, which need a tokenizer."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("heads")
    made = {name: write_knowing(root / name, name) for name in FAMILIES}
    fields = FAMILIES["deepseek-v3"][1]
    made["random"] = write_family(root / "random", "deepseek-v3", vocab_size=320, extra_config=fields)
    made["demo"] = write_with_random_head(root / "demo", DEMO)
    return made


@pytest.fixture(scope="module")
def start(folders: dict[str, Path]) -> Iterator[Callable[..., EngineRun]]:
    """Engines, closed at the end."""
    runs: list[EngineRun] = []

    def begin(name: str, num_guesses: int | None = MOST_GUESSES, **options: Any) -> EngineRun:
        folder = folders[name]
        if name == "demo":
            config, tokenizer = load_config(folder), Tokenizer.load(folder)
            structures = StructureCompiler(lambda: tokenizer, config.eos_token_ids, config.vocab_size)
            options |= {"structures": structures, "eos": frozenset(config.eos_token_ids)}
        options = {"num_blocks": 400, "config": RunnerConfig(max_num_seqs=16), "has_head": True, **options}
        runs.append(EngineRun(folder, num_guesses=num_guesses, **options))
        return runs[-1]

    yield begin
    for run in runs:
        run.end()


def plain(start: Callable[..., EngineRun], name: str, **options: Any) -> EngineRun:
    return start(name, 0, has_head=False, **options)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_guesses", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4)), MOST_GUESSES])
def test_a_head_that_knows_changes_nothing_and_is_right(start, family, num_guesses):
    run = start(family, num_guesses)
    assert_same(answers(run, WAYS), answers(plain(start, family), WAYS))
    num_guessed, num_right = accepted(run)
    assert num_right > 0.5 * num_guessed > 0


ON_A_GPU: dict[str, Any] = {"ahead": True, "is_queued": True}
"""As on a GPU: steps are launched ahead, and guesses of a step are made in a row."""
STATIC = RunnerConfig(max_num_seqs=16, static_decode=True)
PIECES = RunnerConfig(max_num_seqs=16, static_decode=True, piecewise_tokens=20)
"""As its graphs."""


@pytest.mark.parametrize("family", ["llama", "deepseek-v3"])
@pytest.mark.parametrize(
    "config", [pytest.param(STATIC, id="static", marks=pytest.mark.slow), pytest.param(PIECES, id="pieces")]
)
def test_a_head_that_knows_changes_nothing_beside_steps_ahead_and_is_right(start, family, config):
    expected = answers(plain(start, family), WAYS)
    for num_guesses in (1, 4):
        run = start(family, num_guesses, config=config, **ON_A_GPU)
        assert_same(answers(run, WAYS), expected)
        num_guessed, num_right = accepted(run)
        assert num_right > 0.5 * num_guessed > 0


def test_steps_ahead_are_waited_for_where_a_heads_guesses_are_worth_that(start):
    """By what is measured: whatever that says, the answer is the same."""
    run, prompts = start("llama", None, config=PIECES, **ON_A_GPU), PROMPTS[:3]
    expected = plain(start, "llama").generate(*prompts, max_tokens=120, **SAMPLED)
    assert run.generate(*prompts, max_tokens=120, **SAMPLED) == expected


@pytest.mark.parametrize("family", ["qwen3-next", "qwen3.5", pytest.param("qwen3.5-moe", marks=pytest.mark.slow)])
def test_the_layer_of_a_model_with_states_is_that_of_transformers(tmp_path, family):
    """Its own layer as a model of one: what it reads is its projection of both normed halves, the token's first."""
    folder = write_family(tmp_path / "model", family, vocab_size=320)
    decoder = Decoder.load(folder, torch.float32, "cpu", has_head=True)
    layout = decoder.config.block_layout(BLOCK_SIZE, "float32", has_head=True)
    count, generator = 37, torch.Generator().manual_seed(1)
    hidden = torch.randn(count, 64, generator=generator)
    tokens = torch.randint(0, 320, (count,), generator=generator)
    pool = PoolView.of(torch.zeros(layout.shape(4), dtype=torch.uint8), layout)
    batch = AttentionBatch.from_lists([count], [count], [[2, 0, 3]], BLOCK_SIZE).with_groups(())
    with torch.inference_mode():
        rows = torch.arange(count)
        logits = decoder.logits(decoder.head.forward(tokens, hidden, rows, pool, batch, rows))

    fields, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    own = {name: tensor for name, tensor in tensors.items() if name in ("model.embed_tokens.weight", "lm_head.weight")}
    layer = {name: tensor for name, tensor in tensors.items() if name.startswith("mtp.layers.0.")}
    own |= {name.replace("mtp.", "model."): tensor for name, tensor in layer.items()}
    own["model.norm.weight"] = tensors["mtp.norm.weight"]
    (tmp_path / "layer").mkdir()
    fields |= {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    (tmp_path / "layer" / "config.json").write_text(json.dumps(fields))
    save_file(own, tmp_path / "layer" / "model.safetensors", metadata={"format": "pt"})
    halves = [
        x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + tensors[f"mtp.pre_fc_norm_{name}.weight"])
        for x, name in ((tensors["model.embed_tokens.weight"][tokens], "embedding"), (hidden, "hidden"))
    ]
    with torch.inference_mode():
        read = torch.cat(halves, -1) @ tensors["mtp.fc.weight"].T
        expected = load_transformers(tmp_path / "layer")(inputs_embeds=read[None]).logits[0]
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)


def test_a_head_without_sense_changes_nothing(start):
    """All ways to choose tokens, structures among them."""
    run = start("demo")
    assert_same(answers(run), answers(plain(start, "demo")))
    assert accepted(run)[0] > 0
    assert_same(answers(start("demo", None)), answers(plain(start, "demo")))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"num_blocks": 16}, marks=pytest.mark.slow),
        pytest.param({"num_blocks": 16, "num_host_blocks": 100}, marks=pytest.mark.slow),
        {"num_blocks": 16, "num_host_blocks": 100, "config": PIECES, **ON_A_GPU},
    ],
)
def test_a_head_changes_nothing_for_a_batch_that_is_preempted(start, options):
    run = start("llama", 2, **options)
    prompts = [[5 + (i * (2 * k + 3)) % 300 for i in range(9 + 5 * k)] for k in range(11)]
    expected = plain(start, "llama").generate(*prompts, max_tokens=LONG, **SAMPLED)
    assert run.generate(*prompts, max_tokens=LONG, **SAMPLED) == expected
    assert accepted(run)[1] > 0
    assert run.scheduler.counters.num_preemptions > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_handed_over_answer_is_the_same_and_guessed_from_the_first_steps_on(start, family):
    prefill, decode = start(family, 0), start(family, 4)
    expected = answers(plain(start, family), WAYS)
    for prompt, way, (tokens, _) in zip(PROMPTS, WAYS, expected, strict=False):
        assert hand_off(prefill, decode, prompt, LENGTH, **way) == ids(tokens)
    assert prefill.scheduler._speculator is None
    num_guessed, num_right = accepted(decode)
    assert num_right > 0.5 * num_guessed > 0


def test_damaged_blocks_are_computed_again_with_the_heads_layer(start):
    prefill, decode = start("llama", 0), start("llama", 4)
    (expected,) = plain(start, "llama").generate(PROMPTS[6], max_tokens=LENGTH)
    assert hand_off(prefill, decode, PROMPTS[6], LENGTH, corrupt=1) == expected
    assert accepted(decode)[1] > 0


def guesses_of(run: EngineRun) -> dict[int, int]:
    """What the head guesses first behind each length from now on; the dict grows."""
    found: dict[int, int] = {}
    heads = run.runner.heads
    guess = heads.guess

    def remembered(guesses: Sequence[HeadGuess]) -> list[tuple[SampledToken | NoToken, ...]]:
        result = guess(guesses)
        for item, tokens in zip(guesses, result, strict=True):
            if item.token_id is None:
                found[item.specs[0].position] = tokens[0].token_id
        return result

    heads.guess = remembered
    return found


def test_behind_a_hand_off_a_prefix_or_a_preemption_the_head_guesses_what_it_would_have(start):
    """Its KV came with the blocks: a random head attends to all of it."""
    prompt = PROMPTS[8]
    whole, chunked, decode = start("random", 2, max_num_batched_tokens=512), start("random", 2), start("random", 2)
    graphs = start("random", 2, config=PIECES, **ON_A_GPU)
    logs = [guesses_of(run) for run in (whole, chunked, decode, graphs)]
    (expected,) = whole.generate(prompt, max_tokens=LENGTH)
    assert chunked.generate(prompt, max_tokens=LENGTH) == graphs.generate(prompt, max_tokens=LENGTH) == [expected]
    assert hand_off(start("random", 0), decode, prompt, LENGTH) == expected
    for log in logs[1:]:
        common = log.keys() & logs[0].keys()
        assert len(common) > LENGTH / 2
        assert {place: log[place] for place in common} == {place: logs[0][place] for place in common}
    again = guesses_of(whole)
    assert whole.generate(prompt, max_tokens=LENGTH) == [expected]
    assert whole.scheduler.counters.num_prefix_hit_tokens >= len(prompt) // BLOCK_SIZE * BLOCK_SIZE - BLOCK_SIZE
    assert {place: again[place] for place in again} == {place: logs[0][place] for place in again}


def test_nothing_that_was_guessed_wrong_is_in_a_sealed_block(start):
    """The blocks of a prompt and answer have the bytes that a prompt of all these tokens gives, but for rounding."""
    run, other = start("random", 4), start("random", 0)
    prompt = PROMPTS[8]
    (tokens,) = run.generate(prompt, max_tokens=LENGTH)
    assert accepted(run)[0] > accepted(run)[1]
    other.generate([*prompt, *tokens], max_tokens=1)
    compared = 0
    for block_hash in other.pool._findable:
        mine, theirs = run.pool.find(block_hash), other.pool.find(block_hash)
        if mine is None or theirs is None:
            continue
        a, b = (r.runner.kv_blocks[place].view(torch.float32) for r, place in ((run, mine), (other, theirs)))
        torch.testing.assert_close(a, b, atol=2e-3, rtol=2e-3)
        compared += 1
    assert compared >= (len(prompt) + LENGTH) // BLOCK_SIZE - 1


def test_beside_other_guesses_and_at_the_end_of_the_pool_a_head_changes_nothing(start):
    run = start("llama", num_blocks=9, max_num_batched_tokens=24)
    run.scheduler._speculator._drafters = [NgramDrafter()]
    expected = plain(start, "llama").generate(PROMPTS[3], max_tokens=80)
    assert run.generate(PROMPTS[3], max_tokens=80) == expected


def test_a_request_says_whether_and_how_far_the_head_guesses(start):
    run = start("llama")
    expected = answers(plain(start, "llama"), WAYS[:1])
    assert_same(answers(run, [{**WAYS[0], "speculation": Speculation("ngram")}]), expected)
    assert accepted(run) == (0, 0)
    assert_same(answers(run, [{**WAYS[0], "speculation": Speculation("heads", 1)}]), expected)
    num_guessed, num_right = accepted(run)
    assert num_right > 0.5 * num_guessed > 0


def test_a_head_that_gives_no_numbers_guesses_nothing_and_changes_nothing(start):
    run = start("llama")
    run.decoder.head._hidden_norm.fill_(float("nan"))
    expected = plain(start, "llama").generate(PROMPTS[3], max_tokens=LENGTH)
    assert run.generate(PROMPTS[3], max_tokens=LENGTH) == expected
    assert accepted(run) == (0, 0)
    sealed = [run.pool.find(block_hash) for block_hash in run.pool._findable]
    assert len(sealed) >= (len(PROMPTS[3]) + LENGTH) // BLOCK_SIZE - 1
    assert run.runner.kv_blocks[sealed].view(torch.float32).isfinite().all()
