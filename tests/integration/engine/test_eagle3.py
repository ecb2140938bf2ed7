"""A head from a folder apart (EAGLE-3): what it computes, that it changes no answer, and heads that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.engine.runner.runner import RunnerConfig
from shared.errors import ConfigError, ModelLoadError
from shared.kernels.batch import AttentionBatch
from shared.kernels.pool_view import PoolView
from shared.model.decoder import Decoder
from tests.integration.engine.engine_run import BLOCK_SIZE, EngineRun, hand_off
from tests.integration.engine.families import write_family
from tests.integration.engine.heads import write_eagle, write_knowing, write_knowing_eagle
from tests.integration.engine.test_greedy_against_transformers import load_transformers
from tests.integration.engine.test_heads import LONG, ON_A_GPU, PIECES, SAMPLED, STATIC, WAYS, guesses_of
from tests.integration.engine.test_speculation import LENGTH, PROMPTS, accepted, answers, assert_same, ids
from tests.unit.kernels.isas import needs_library
from tests.unit.model.layer_equations import layer, normed

COUNT = 45
EPSILON = 1e-5
FAMILIES = ("llama", "gpt-oss", "qwen3-next")
"""One group of KV, windows, states."""
SIZES = {"num_layers": 4, "vocab_size": 320, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2}


def write_model(folder: Path, family: str) -> Path:
    if family == "llama":
        return write_knowing(folder, num_layers=4)
    options = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "num_layers": 2}
    return write_family(folder, family, **{"vocab_size": 320, "hidden_size": 64, **options})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Models with their heads: of random weights, but for `knowing`."""
    root = tmp_path_factory.mktemp("eagle3")
    made = {}
    for family in FAMILIES:
        model = write_model(root / family, family)
        layers = [1, 1, 1] if family != "llama" else [1, 2, 3]
        head = write_eagle(root / f"{family}-head", model, 200, eagle_aux_hidden_state_layer_ids=layers)
        made[family] = model, head
    model = made["llama"][0]
    made["knowing"] = model, write_knowing_eagle(root / "knowing-head", model)
    return made


@pytest.fixture(scope="module")
def start(folders: dict[str, tuple[Path, Path]]) -> Iterator[Callable[..., EngineRun]]:
    """Engines with heads, closed at the end; with 0 guesses such as a prefill worker's, with None without a head."""
    runs: list[EngineRun] = []

    def begin(name: str, num_guesses: int | None = 4, **options: Any) -> EngineRun:
        model, head = folders[name]
        options = {"num_blocks": 400, "config": RunnerConfig(max_num_seqs=16), **options}
        if num_guesses is not None:
            options |= {"head_folder": head, "num_guesses": num_guesses}
        runs.append(EngineRun(model, **options))
        return runs[-1]

    yield begin
    for run in runs:
        run.end()


def by_equations(head: dict[str, Tensor], embedding: Tensor, read: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
    """Section 3.1 of arXiv:2503.01840 with its published weights: a layer whose attention reads [norm(embedding of
    token i + 1); norm(g_i)] and adds to g_i; (what it gives, its logits of the tokens that it knows)."""
    t = {name.removeprefix("midlayer."): tensor.double() for name, tensor in head.items()}
    embedded = normed(embedding[following], t["input_layernorm.weight"], EPSILON)
    x = torch.cat((embedded, normed(read, t["hidden_norm.weight"], EPSILON)), -1)
    head_dim = t["self_attn.k_proj.weight"].shape[0] // 2
    given = layer(t, x, read, head_dim, base=5000.0, epsilon=EPSILON)
    return given, normed(given, t["norm.weight"], EPSILON) @ t["lm_head.weight"].T


@pytest.mark.parametrize("kernels", ["torch", pytest.param("cpu", marks=needs_library)])
@pytest.mark.parametrize("cuts", [(0, COUNT), (0, 5, 6, 30, COUNT)])
def test_a_heads_logits_are_those_of_its_equations_over_states_of_transformers(folders, tmp_path, kernels, cuts):
    """In chunks of any size, by one call for all layers where kernels have that, and by the published names."""
    model = tmp_path / "model"
    sizes = {"vocab_size": 320, "hidden_size": 64, "num_heads": 2, "num_kv_heads": 2, "head_dim": 32}
    write_family(model, "LlamaForCausalLM", num_layers=5, **sizes)
    head = write_eagle(tmp_path / "head", model, 200, eagle_config={"eagle_aux_hidden_state_layer_ids": [3, 0, 1]},
                       eagle_aux_hidden_state_layer_ids=None)  # fmt: skip
    decoder = Decoder.load(model, torch.float32, "cpu", kernels=kernels, head_folder=head)
    assert (decoder._stack is not None) == (kernels == "cpu")
    layout = decoder.config.block_layout(BLOCK_SIZE, "float32", has_head=True)
    pool = PoolView.of(torch.zeros(layout.shape(4), dtype=torch.uint8), layout)
    tokens = (7 + 31 * torch.arange(COUNT + 1)) % 320
    states, logits = [], []
    with torch.inference_mode():
        for begin, end in pairwise(cuts):
            batch = AttentionBatch.from_lists([end - begin], [end], [[2, 0, 3]], BLOCK_SIZE)
            rows, positions = torch.arange(end - begin), torch.arange(begin, end)
            kept = torch.empty(end - begin, 3, 64)
            decoder.hidden(tokens[begin:end], positions, pool, batch, rows[-1:], kept=kept)
            read = decoder.head.joined(kept)
            given = decoder.head.forward(tokens[begin + 1 : end + 1], read, positions, pool, batch, rows)
            states.append(given)
            logits.append(decoder.head.logits(given))
        found = load_transformers(model)(tokens[None, :COUNT], output_hidden_states=True).hidden_states
    weights, embedding = load_file(head / "model.safetensors"), load_file(model / "model.safetensors")
    joined = torch.cat([found[count][0] for count in (4, 1, 2)], -1).double() @ weights["fc.weight"].double().T
    embedding = embedding["model.embed_tokens.weight"].double()
    expected, of_known = by_equations(weights, embedding, joined, tokens[1:])
    torch.testing.assert_close(torch.cat(states).double(), expected, atol=2e-3, rtol=2e-3)
    known = torch.arange(200) + weights["d2t"]
    logits = torch.cat(logits)
    assert logits.shape == (COUNT, 320)
    torch.testing.assert_close(logits[:, known].double(), of_known, atol=2e-3, rtol=2e-3)
    others = torch.ones(320, dtype=torch.bool).index_fill_(0, known, False)
    assert (logits[:, others] == -torch.inf).all()


@pytest.mark.parametrize("name", [*FAMILIES, "knowing"])
def test_a_head_apart_changes_nothing(start, name):
    show_that_it_changes_nothing(start, name)


@pytest.mark.parametrize("name", ["gpt-oss", "knowing"])
@pytest.mark.parametrize(
    "config", [pytest.param(STATIC, id="static", marks=pytest.mark.slow), pytest.param(PIECES, id="pieces")]
)
def test_a_head_apart_changes_nothing_beside_steps_ahead(start, name, config):
    show_that_it_changes_nothing(start, name, config=config, **ON_A_GPU)


def show_that_it_changes_nothing(start, name, **how):
    expected = answers(start(name, None), WAYS)
    for num_guesses in (1, 5):
        run = start(name, num_guesses, **how)
        assert_same(answers(run, WAYS), expected)
        num_guessed, num_right = accepted(run)
        assert num_guessed > 0
        if name == "knowing" and num_guesses == 1:
            assert num_right > 0.5 * num_guessed


@pytest.mark.parametrize("name", [*FAMILIES, "knowing"])
def test_a_handed_over_answer_is_the_same(start, name):
    prefill, decode = start(name, 0), start(name, 2)
    expected = answers(start(name, None), WAYS)
    for prompt, way, (tokens, _) in list(zip(PROMPTS, WAYS, expected, strict=False))[::2]:
        assert hand_off(prefill, decode, prompt, LENGTH, **way) == ids(tokens)
    assert accepted(decode)[0] > 0


@pytest.mark.parametrize(
    "options", [pytest.param({"num_blocks": 16}, marks=pytest.mark.slow), {"num_blocks": 16, "num_host_blocks": 100}]
)
def test_a_head_apart_changes_nothing_for_a_batch_that_is_preempted(start, options):
    run = start("knowing", 2, **options)
    prompts = [[5 + (i * (2 * k + 3)) % 300 for i in range(9 + 5 * k)] for k in range(11)]
    expected = start("knowing", None).generate(*prompts, max_tokens=LONG, **SAMPLED)
    assert run.generate(*prompts, max_tokens=LONG, **SAMPLED) == expected
    assert accepted(run)[1] > 0
    assert run.scheduler.counters.num_preemptions > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_behind_a_hand_off_or_a_prefix_the_head_guesses_what_it_would_have(start, name):
    """Its KV came with the blocks: a random head attends to all of it."""
    prompt = PROMPTS[8]
    whole, chunked, decode = start(name, 2, max_num_batched_tokens=512), start(name, 2), start(name, 2)
    logs = [guesses_of(run) for run in (whole, chunked, decode)]
    (expected,) = whole.generate(prompt, max_tokens=LENGTH)
    assert chunked.generate(prompt, max_tokens=LENGTH) == [expected]
    assert hand_off(start(name, 0), decode, prompt, LENGTH) == expected
    for log in logs[1:]:
        common = log.keys() & logs[0].keys()
        assert len(common) > LENGTH / 2
        assert {place: log[place] for place in common} == {place: logs[0][place] for place in common}


def test_other_names_and_an_embedding_of_its_own_are_read(folders, tmp_path):
    model, head = folders["llama"]
    plain = write_eagle(tmp_path / "plain", model)
    other = write_eagle(tmp_path / "other", model, layer="layers.0.", architectures=["Eagle3LlamaForCausalLM"])
    tensors = load_file(other / "model.safetensors")
    tensors["embed_tokens.weight"] = 2 * load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    save_file(tensors, other / "model.safetensors")
    one, two = (Decoder.load(model, torch.float32, "cpu", head_folder=folder).head for folder in (plain, other))
    assert one._pieces._modules.layers[0].qkv.in_size == 128
    assert two._embedding.equal(2 * one._embedding)
    assert two._hidden_norm.equal(one._hidden_norm)
    assert head.name == "llama-head"


@pytest.mark.parametrize(
    ("fields", "numbers"),
    [
        ({"hidden_size": 96}, ("hidden size of 96", "64")),
        ({"target_hidden_size": 128}, ("hidden size of 128", "64")),
        ({"vocab_size": 512}, ("vocabulary of 512", "320")),
        ({"num_key_value_heads": 1}, ("KV heads of 1", "2")),
        ({"head_dim": 32}, ("head dimension of 32", "8")),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, ("1, 2, 9 layers", "has 4")),
    ],
)
def test_a_head_of_another_model_is_refused_with_both_numbers(folders, tmp_path, fields, numbers):
    model, _ = folders["llama"]
    head = write_eagle(tmp_path / "head", model, **fields)
    with pytest.raises(ConfigError) as caught:
        Decoder.load(model, torch.float32, "cpu", head_folder=head)
    assert all(number in caught.value.message for number in numbers)
    assert caught.value.details["field"] == "draft"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers"),
        ({"fc_norm": True}, "fc_norm"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "eagle_aux_hidden_state_layer_ids"),
        ({"draft_vocab_size": 400}, "draft_vocab_size"),
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM is no head"),
    ],
)
def test_a_head_of_a_kind_that_is_not_served_is_refused_by_name(folders, tmp_path, fields, named):
    model, _ = folders["llama"]
    head = write_eagle(tmp_path / "head", model, **fields)
    with pytest.raises(ModelLoadError, match=named):
        Decoder.load(model, torch.float32, "cpu", head_folder=head)


@pytest.mark.parametrize("name", ["fc.weight", "midlayer.hidden_norm.weight", "lm_head.weight", "d2t"])
def test_a_missing_tensor_is_named(folders, tmp_path, name):
    model, _ = folders["llama"]
    head = write_eagle(tmp_path / "head", model, 200)
    tensors = load_file(head / "model.safetensors")
    del tensors[name]
    save_file(tensors, head / "model.safetensors")
    with pytest.raises(ModelLoadError, match=name):
        Decoder.load(model, torch.float32, "cpu", head_folder=head)


def test_tokens_beyond_the_vocabulary_are_refused(folders, tmp_path):
    model, _ = folders["llama"]
    head = write_eagle(tmp_path / "head", model, 200)
    tensors = load_file(head / "model.safetensors")
    tensors["d2t"][-1] = 121
    save_file(tensors, head / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"d2t must name 200 different tokens of 320, found 200 from .* to 320"):
        Decoder.load(model, torch.float32, "cpu", head_folder=head)


def test_the_layers_of_a_head_that_names_none_are_the_published_ones(tmp_path):
    model = write_family(tmp_path / "model", "LlamaForCausalLM", num_layers=10)
    head = write_eagle(tmp_path / "head", model, eagle_aux_hidden_state_layer_ids=None)
    assert "eagle_aux" in (head / "config.json").read_text()
    assert json.loads((head / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"] is None
    assert Decoder.load(model, torch.float32, "cpu", head_folder=head).head.behind == (2, 5, 7)
