"""A checkpoint's head: its logits beside its equations, and heads that are refused."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.errors import ModelLoadError
from shared.kernels.batch import AttentionBatch
from shared.kernels.linear_spec import LinearSpec
from shared.kernels.pool_view import PoolView
from shared.kernels.quantized import quantize_rows
from shared.model.checkpoints import write_random_checkpoint
from shared.model.decoder import Decoder
from shared.model.families.registry import load_config
from shared.model.layers.head import num_listed
from shared.model.weights.head_checkpoint import has_head
from shared.model.weights.plan import Quantization
from tests.unit.kernels.isas import needs_library
from tests.unit.model.layer_equations import layer, normed

WITH_HEAD = {"num_nextn_predict_layers": 1}
NUM_TOKENS, BLOCK_SIZE = 37, 16
PREFIX = "model.layers.2."
EPSILON = 1e-6
LARGE = ("eh_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_random_checkpoint(tmp_path, extra_config=WITH_HEAD)
    return tmp_path


def rewrite(folder: Path, **changes: Tensor | None) -> None:
    """Tensors of the head, by name with __ for a dot; None takes one off."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(PREFIX + name.replace("__", "."), None)
        if tensor is not None:
            tensors[PREFIX + name.replace("__", ".")] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def by_equations(tensors: dict[str, Tensor], hidden: Tensor, following: Tensor) -> Tensor:
    """Section 2.2 of arXiv:2412.19437: h' = M [norm(embedding of token i + 1); norm(h_i)], one layer, the output
    projection. M's columns are in the order of the published weights: the token's first."""
    t = {name: tensor.double() for name, tensor in tensors.items()}
    own = {name.removeprefix(PREFIX): tensor for name, tensor in t.items() if name.startswith(PREFIX)}
    embedded = normed(t["model.embed_tokens.weight"][following], own["enorm.weight"], EPSILON)
    x = torch.cat((embedded, normed(hidden, own["hnorm.weight"], EPSILON)), -1) @ own["eh_proj.weight"].T
    x = layer(own, normed(x, own["input_layernorm.weight"], EPSILON), x, 8, base=10_000.0, epsilon=EPSILON)
    return normed(x, own["shared_head.norm.weight"], EPSILON) @ t["lm_head.weight"].T


@pytest.mark.parametrize("cuts", [(0, NUM_TOKENS), (0, 5, 6, 30, NUM_TOKENS)])
def test_a_heads_logits_are_those_of_its_equations(folder: Path, cuts: tuple[int, ...]):
    decoder, plain = (Decoder.load(folder, torch.float32, "cpu", has_head=has) for has in (True, False))
    assert decoder.head is not None
    pool, own = (
        PoolView.of(torch.zeros(layout.shape(4), dtype=torch.uint8), layout)
        for layout in (decoder.config.block_layout(BLOCK_SIZE, "float32", has_head=has) for has in (True, False))
    )
    tokens = (7 + 31 * torch.arange(NUM_TOKENS + 1)) % 128
    states, logits = [], []
    with torch.inference_mode():
        for begin, end in pairwise(cuts):
            batch = AttentionBatch.from_lists([end - begin], [end], [[2, 0, 3]], BLOCK_SIZE)
            rows, positions = torch.arange(end - begin), torch.arange(begin, end)
            hidden = decoder.hidden(tokens[begin:end], positions, pool, batch, rows)
            assert hidden.equal(plain.hidden(tokens[begin:end], positions, own, batch, rows)), (
                "its KV is another layer's"
            )
            states.append(hidden)
            following = tokens[begin + 1 : end + 1]
            logits.append(decoder.logits(decoder.head.forward(following, hidden, positions, pool, batch, rows)))
    expected = by_equations(load_file(folder / "model.safetensors"), torch.cat(states).double(), tokens[1:])
    torch.testing.assert_close(torch.cat(logits).double(), expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("kernels", ["torch", pytest.param("cpu", marks=needs_library)])
@pytest.mark.parametrize("tie", [False, True])
def test_guesses_are_chosen_among_the_first_tokens_by_weights_that_are_read_fast(
    tmp_path: Path, kernels: str, tie: bool
):
    """The C++ kernels read all but small weights in 4 bits, torch's ops would open these at each call. The answer's
    logits are what they are without a head."""
    sizes = {"vocab_size": 2112, "hidden_size": 256, "intermediate_size": 256, "tie": tie}
    config = write_random_checkpoint(tmp_path, extra_config=WITH_HEAD, **sizes)
    decoder, plain = (
        Decoder.load(tmp_path, torch.float32, "cpu", kernels=kernels, has_head=has) for has in (True, False)
    )
    head, count = decoder.head, num_listed(config.vocab_size)
    assert head is not None
    assert count == 1056
    layout = decoder.config.block_layout(BLOCK_SIZE, "float32", has_head=True)
    pool = PoolView.of(torch.zeros(layout.shape(4), dtype=torch.uint8), layout)
    batch = AttentionBatch.from_lists([NUM_TOKENS], [NUM_TOKENS], [[2, 0, 3]], BLOCK_SIZE)
    positions, tokens = torch.arange(NUM_TOKENS), (7 + 31 * torch.arange(NUM_TOKENS + 1)) % 2112
    with torch.inference_mode():
        hidden = decoder.hidden(tokens[:-1], positions, pool, batch, positions)
        assert decoder.logits(hidden).equal(plain.logits(hidden))
        logits = head.logits(head.forward(tokens[1:], hidden, positions, pool, batch, positions))
    assert logits.shape == (NUM_TOKENS, config.vocab_size)
    assert (logits[:, count:] == -torch.inf).all()
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"].clone()
    tensors.setdefault("lm_head.weight", embedding)
    if kernels == "cpu":
        for name in ("lm_head", *(PREFIX + name for name in LARGE)):
            tensor = tensors[f"{name}.weight"]
            tensors[f"{name}.weight"] = quantize_rows(tensor, LinearSpec("int4", 128, has_zeros=True)).dense()
    tensors["model.embed_tokens.weight"] = embedding
    expected = by_equations(tensors, hidden.double(), tokens[1:])
    torch.testing.assert_close(logits[:, :count].double(), expected[:, :count], atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_a_rounded_models_list_has_its_own_rows(tmp_path: Path, quantization: Quantization):
    write_random_checkpoint(tmp_path, extra_config=WITH_HEAD, vocab_size=2112, hidden_size=64)
    decoder = Decoder.load(tmp_path, torch.float32, "cpu", quantization=quantization, has_head=True)
    assert decoder.head is not None
    states = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        found, expected = decoder.head.logits(states), decoder.logits(states)
    torch.testing.assert_close(found[:, :1056], expected[:, :1056])
    assert (found[:, 1056:] == -torch.inf).all()


def test_a_small_vocabulary_is_listed_whole():
    assert [num_listed(size) for size in (320, 1024, 1500, 3072, 32_001)] == [320, 1024, 1024, 1536, 16_032]


def test_a_head_is_loaded_only_where_it_is_asked_for(folder: Path):
    assert has_head(folder, load_config(folder))
    assert Decoder.load(folder, torch.float32, "cpu").head is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enorm__weight": None}, r"1 tensor.*missing from the checkpoint: model\.layers\.2\.enorm\.weight"),
        ({"eh_proj__weight": torch.zeros(48, 96)}, r"eh_proj\.weight has shape \[48, 96\], expected \[32, 64\]"),
        (
            {"shared_head__norm__weight": torch.zeros(48)},
            r"norm\.weight has shape \[48\], expected \[32\]",
        ),
        ({"embed_tokens__weight": torch.zeros(100, 32)}, r"shape \[100, 32\], model\.embed_tokens\.weight \[128, 32\]"),
        (
            {"shared_head__head__weight": torch.zeros(128, 32)},
            r"head\.weight differs from lm_head\.weight",
        ),
    ],
)
def test_a_head_that_does_not_fit_is_refused_by_name(folder: Path, changes: dict[str, Tensor | None], message: str):
    rewrite(folder, **changes)
    with pytest.raises(ModelLoadError, match=message):
        Decoder.load(folder, torch.float32, "cpu", has_head=True)


def test_what_a_head_shares_with_its_model_may_be_there_twice(folder: Path):
    tensors = load_file(folder / "model.safetensors")
    rewrite(
        folder,
        embed_tokens__weight=tensors["model.embed_tokens.weight"].clone(),
        shared_head__head__weight=tensors["lm_head.weight"].clone(),
    )
    assert Decoder.load(folder, torch.float32, "cpu", has_head=True).head is not None


@pytest.mark.parametrize(
    "fields", [{"num_nextn_predict_layers": 0}, {}, {"sliding_window": 8, "use_sliding_window": True}]
)
def test_without_a_layer_that_can_guess_there_is_no_head(tmp_path: Path, fields: dict[str, object]):
    architecture = "Qwen2ForCausalLM" if "sliding_window" in fields else "LlamaForCausalLM"
    extra = {**({"max_window_layers": 0, **WITH_HEAD} if "sliding_window" in fields else {}), **fields}
    config = write_random_checkpoint(tmp_path, architecture, extra_config=extra)
    assert config.head is None
    assert not has_head(tmp_path, config)
