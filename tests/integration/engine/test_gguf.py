"""GGUF files beside transformers, which computes with the same weights opened to fp32."""

from __future__ import annotations

import json

import pytest
import torch

from shared.model.checkpoints import write_random_checkpoint
from shared.model.decoder import Decoder
from shared.model.gguf.folder import gguf_folder
from shared.model.ranks.shard import Degrees
from tests.gguf_files import write_model
from tests.integration.engine.engine_run import EngineRun, hand_off
from tests.integration.engine.families import EXPERTS, OTHERS, write_family
from tests.integration.engine.group_run import GroupRun
from tests.integration.engine.test_quantized import NUM_TOKENS, PROMPT, expected_of
from tests.unit.model.paged_run import greedy, prompt_logits


@pytest.mark.parametrize(
    ("architecture", "kinds", "of_weights"),
    [
        ("LlamaForCausalLM", ("Q8_0",), "int8"),
        ("LlamaForCausalLM", ("Q4_0",), "int4"),
        ("LlamaForCausalLM", ("Q5_0", "Q5_1"), "int8"),
        ("Qwen3ForCausalLM", ("Q4_K", "Q6_K", "Q4_K"), "int4+int8"),
        ("LlamaForCausalLM", ("Q4_K",), "int4"),
        pytest.param("LlamaForCausalLM", ("F32",), "", marks=pytest.mark.slow),
        pytest.param("Qwen2ForCausalLM", ("Q8_0", "Q4_0"), "int4+int8", marks=pytest.mark.slow),
    ],
)
def test_a_file_gives_the_logits_and_tokens_of_its_opened_weights(tmp_path, architecture, kinds, of_weights):
    wide = "Q4_K" in kinds
    size = {"hidden_size": 256, "intermediate_size": 256} if wide else {"hidden_size": 64, "intermediate_size": 128}
    write_random_checkpoint(
        tmp_path / "source", architecture, num_heads=4, num_kv_heads=2, head_dim=size["hidden_size"] // 4,
        num_layers=1 if wide else 2, vocab_size=256, **size,
    )  # fmt: skip
    path, opened = tmp_path / "model.gguf", tmp_path / "opened"
    write_model(tmp_path / "source", kinds, path, opened)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"own": True}))
    expected, tokens = expected_of(opened)
    folder = gguf_folder(path, tmp_path / "cache")
    assert json.loads((folder / "tokenizer.json").read_text()) == {"own": True}
    decoder = Decoder.load(folder, torch.float32, "cpu")
    assert decoder.quantization == of_weights
    found = prompt_logits(decoder, PROMPT, 20)
    assert (found - expected).abs().max() <= 1e-3 * expected.abs().max()
    assert greedy(decoder, PROMPT, NUM_TOKENS)[0] == tokens
    if kinds in (("Q8_0",), ("Q4_K",)):
        with EngineRun(folder) as prefill, EngineRun(folder) as decode:
            assert hand_off(prefill, decode, PROMPT, max_tokens=NUM_TOKENS) == tokens
        with GroupRun(folder, Degrees(tensor=2)) as group:
            assert group.generate(PROMPT, max_tokens=NUM_TOKENS)[0] == tokens


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("family", "kinds", "rope"),
    [
        ("LlamaForCausalLM", ("Q8_0",), LLAMA3),
        ("Qwen3ForCausalLM", ("Q8_0",), YARN),
        ("LlamaForCausalLM", ("IQ4_NL",), {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}),
        ("qwen3-moe", ("Q8_0", "Q4_0"), None),
        ("mixtral", ("Q4_0",), LLAMA3),
        ("LlamaForCausalLM", ("Q2_K", "Q3_K", "IQ4_XS"), None),
    ],
)
def test_scaled_positions_experts_and_further_types_give_the_logits_of_the_opened_model(tmp_path, family, kinds, rope):
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64} if "Q2_K" in kinds else {}
    more = {"extra_config": {**EXPERTS[family][1], "mlp_only_layers": []}} if family == "qwen3-moe" else {}
    write_family(tmp_path / "source", family, **sizes, **more, vocab_size=256, rope=rope)
    write_model(tmp_path / "source", kinds, tmp_path / "model.gguf", tmp_path / "opened")
    (tmp_path / "tokenizer.json").write_text("{}")
    expected, tokens = expected_of(tmp_path / "opened")
    decoder = Decoder.load(gguf_folder(tmp_path / "model.gguf", tmp_path / "cache"), torch.float32, "cpu")
    assert (prompt_logits(decoder, PROMPT, 20) - expected).abs().max() <= 1e-3 * expected.abs().max()
    assert greedy(decoder, PROMPT, NUM_TOKENS)[0] == tokens


GPT_OSS_ROPE = {**YARN, "original_max_position_embeddings": 64, "truncate": False}
GEMMA2 = {**OTHERS["gemma2"][1], "query_pre_attn_scalar": 16, "final_logit_softcapping": 5.0}
GEMMA3 = {**OTHERS["gemma3"][1], "query_pre_attn_scalar": 16}
OLDER_GEMMA3 = {
    "query_pre_attn_scalar": 16,
    "sliding_window": 11,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    },
}
"""As files were written that leave out the layers with windows and their positions' base."""


@pytest.mark.parametrize(
    ("family", "kinds", "settings"),
    [
        ("gemma3", ("Q4_0", "Q8_0"), {"tie": True, "extra_config": GEMMA3}),
        ("gemma3", ("Q8_0",), {"tie": True, "num_layers": 7, "extra_config": OLDER_GEMMA3}),
        pytest.param(
            "gemma3", ("F32",), {"extra_config": {**GEMMA3, "final_logit_softcapping": 5.0}}, marks=pytest.mark.slow
        ),
        ("gemma2", ("Q4_0", "Q8_0"), {"tie": True, "extra_config": GEMMA2}),
        ("phi3", ("Q8_0", "Q4_0"), {}),
        pytest.param("phi3", ("Q5_0",), {"extra_config": {"sliding_window": 11}}, marks=pytest.mark.slow),
        ("granite", ("Q8_0", "Q4_0"), {"tie": True}),
        ("olmo2", ("Q8_0", "Q4_0"), {}),
        ("glm4", ("Q8_0", "Q4_0"), {}),
        ("gpt-oss", ("MXFP4", "Q8_0"), {"rope": GPT_OSS_ROPE}),
        ("smollm3", ("Q8_0", "Q4_0"), {"tie": True, "num_layers": 4, "extra_config": {}}),
    ],
)
def test_further_architectures_give_the_logits_and_tokens_of_the_opened_model(tmp_path, family, kinds, settings):
    write_family(tmp_path / "source", family, **{"vocab_size": 256, "intermediate_size": 128, **settings})
    write_model(tmp_path / "source", kinds, tmp_path / "model.gguf", tmp_path / "opened")
    (tmp_path / "tokenizer.json").write_text("{}")
    expected, tokens = expected_of(tmp_path / "opened")
    folder = gguf_folder(tmp_path / "model.gguf", tmp_path / "cache")
    decoder = Decoder.load(folder, torch.float32, "cpu")
    assert (prompt_logits(decoder, PROMPT, 20) - expected).abs().max() <= 1e-3 * expected.abs().max()
    assert greedy(decoder, PROMPT, NUM_TOKENS)[0] == tokens
    if family in ("gemma3", "phi3", "gpt-oss"):  # with numbers added, and with fused projections
        with GroupRun(folder, Degrees(tensor=2)) as group:
            assert group.generate(PROMPT, max_tokens=NUM_TOKENS)[0] == tokens
