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
from tests.integration.engine.group_run import GroupRun
from tests.integration.engine.test_quantized import NUM_TOKENS, PROMPT, expected_of
from tests.unit.model.paged_run import greedy, prompt_logits


@pytest.mark.parametrize(
    ("architecture", "kinds", "of_weights"),
    [
        ("LlamaForCausalLM", ("Q8_0",), "int8"),
        ("LlamaForCausalLM", ("Q4_0",), "int4"),
        ("LlamaForCausalLM", ("Q5_0", "Q5_1"), ""),
        ("Qwen3ForCausalLM", ("Q4_K", "Q6_K", "Q4_K"), ""),
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
    if kinds == ("Q8_0",):
        with EngineRun(folder) as prefill, EngineRun(folder) as decode:
            assert hand_off(prefill, decode, PROMPT, max_tokens=NUM_TOKENS) == tokens
        with GroupRun(folder, Degrees(tensor=2)) as group:
            assert group.generate(PROMPT, max_tokens=NUM_TOKENS)[0] == tokens
