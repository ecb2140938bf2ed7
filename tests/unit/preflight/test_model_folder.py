"""The model folder: whole, readable, and whether it fits."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from services.preflight.finding import Level
from services.preflight.model_folder import EngineNeed, check_tokenizer, check_weights
from shared.model.checkpoints import write_random_checkpoint

DEMO = Path("models/demo")
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4  # layers, K and V, heads, head_dim, fp32


@pytest.fixture
def need(tmp_path: Path) -> EngineNeed:
    write_random_checkpoint(tmp_path / "model", max_position_embeddings=512)
    return EngineNeed(tmp_path / "model", "cpu", 0.9, "fp32", "auto", 0, 0, 16)


def test_a_whole_model_that_fits_is_described(need: EngineNeed) -> None:
    finding = check_weights(need, 1 << 30)
    assert finding.level is Level.OK
    assert "LlamaForCausalLM" in finding.text
    assert f"KV {TOKEN_BYTES} B a token" in finding.text


def test_memory_for_the_weights_alone_is_not_enough(need: EngineNeed) -> None:
    finding = check_weights(need, 1000)
    assert finding.level is Level.FAIL
    assert "do not fit" in finding.text


def test_a_host_of_a_group_needs_room_for_its_part_alone(need: EngineNeed) -> None:
    weights = (need.model / "model.safetensors").stat().st_size
    need = replace(need, max_model_len=32)
    memory = weights // 2 + 32 * TOKEN_BYTES
    assert memory < weights
    assert check_weights(need, memory).level is Level.FAIL
    finding = check_weights(replace(need, num_hosts=2), memory)
    assert finding.level is Level.OK
    assert "for one of 2 hosts' parts" in finding.text


def test_room_for_short_sequences_alone_is_a_warning(need: EngineNeed) -> None:
    weights = (need.model / "model.safetensors").stat().st_size
    finding = check_weights(need, weights + 5 * 16 * TOKEN_BYTES)
    assert finding.level is Level.WARN
    assert "of 512 tokens" in finding.text
    assert check_weights(replace(need, max_model_len=32), weights + 5 * 16 * TOKEN_BYTES).level is Level.OK


@pytest.mark.parametrize("cut", [4, -100])
def test_a_file_that_was_cut_off_is_named(need: EngineNeed, cut: int) -> None:
    file = need.model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    finding = check_weights(need, 1 << 30)
    assert finding.level is Level.FAIL
    assert "model.safetensors is corrupt or truncated" in finding.text


def test_a_tensor_that_is_missing_is_named(need: EngineNeed, tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "small", num_layers=1)
    shutil.copy(tmp_path / "small/model.safetensors", need.model)
    finding = check_weights(need, 1 << 30)
    assert finding.level is Level.FAIL
    assert "is missing from the checkpoint: model.layers.1" in finding.text


def test_a_folder_that_is_not_there_is_a_failure(need: EngineNeed, tmp_path: Path) -> None:
    finding = check_weights(replace(need, model=tmp_path / "nowhere"), None)
    assert finding.level is Level.FAIL
    assert "No such file" in finding.text


def test_a_router_reads_the_tokenizer(need: EngineNeed) -> None:
    assert check_tokenizer(DEMO).level is Level.OK
    finding = check_tokenizer(need.model)
    assert finding.level is Level.FAIL
    assert "tokenizer.json is missing" in finding.text
