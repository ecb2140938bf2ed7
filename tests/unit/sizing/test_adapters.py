"""Memory of adapters by class of rank, as arithmetic counts it and as kernels lay adapters out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shared.kernels.lora.reference import make_plain_lora
from shared.kernels.lora.step import PROJECTIONS
from shared.model.adapters.adapter import read_adapter
from shared.model.adapters.random_adapter import write_random_adapter
from shared.model.adapters.target_modules import values_of_rank
from shared.model.families.registry import load_config
from shared.sizing.adapter_memory import RANK_CLASSES, adapter_bytes, largest_class, rank_class, share_of_rank
from shared.sizing.devices import H200
from shared.sizing.load import Hardware
from shared.sizing.memory import room
from shared.sizing.shapes import DEEPSEEK_V3, LLAMA_3_8B, MIXTRAL_8X7B, decoder
from shared.sizing.spread import Spread
from tandem_cli.fit.shape import shape_of
from tests.integration.engine.families import write_family


def test_ranks_are_counted_by_the_next_class() -> None:
    assert [rank_class(rank) for rank in (1, 8, 9, 100, 256)] == [8, 8, 16, 128, 256]
    assert adapter_bytes(1000, 9, 2.0) == 32_000


def test_published_models_by_hand() -> None:
    # q and o 2 * 8192, k and v 2 * (4096 + 1024), three projections of 4096 and 14336.
    assert LLAMA_3_8B.adapter_values == 32 * (2 * 8192 + 2 * 5120 + 3 * 18_432)
    assert MIXTRAL_8X7B.adapter_values == 32 * (2 * 8192 + 2 * 5120 + 8 * 3 * 18_432)
    assert DEEPSEEK_V3.adapter_values == 0  # adapters of latent attention are not served


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "mixtral", "gpt-oss", "deepseek-v2", "glm4-moe", "phi3"])
def test_a_folders_shape_counts_what_an_adapter_of_it_has(tmp_path: Path, family: str) -> None:
    folder = write_family(tmp_path / "model", family)
    config = load_config(folder)
    assert shape_of(str(folder)).adapter_values == values_of_rank(config)
    if family == "deepseek-v2":
        assert values_of_rank(config) == 0
        return
    adapter = read_adapter(write_random_adapter(tmp_path / "adapter", config, rank=8), config)
    assert adapter.nbytes == adapter_bytes(values_of_rank(config), 8, 4)


def test_the_named_shapes_count_as_a_folder_of_the_same_sizes_does(tmp_path: Path) -> None:
    for family in ("LlamaForCausalLM", "mixtral"):
        config = load_config(write_family(tmp_path / family, family))
        found = shape_of(str(tmp_path / family))
        by_numbers = decoder(
            layers=config.num_layers, hidden=config.hidden_size, intermediate=config.intermediate_size,
            heads=config.num_heads, kv_heads=config.num_kv_heads, vocabulary=config.vocab_size, positions=256,
            head_dim=config.head_dim, experts=found.experts,
        )  # fmt: skip
        assert by_numbers.adapter_values == found.adapter_values


def test_laid_out_weights_are_no_larger(tmp_path: Path) -> None:
    config = load_config(write_family(tmp_path / "model", "LlamaForCausalLM"))
    adapter = read_adapter(write_random_adapter(tmp_path / "adapter", config, rank=5), config)
    laid = [
        make_plain_lora(layer[name], layer[name][0].a.shape[1], torch.empty(0)).nbytes
        for layer in adapter.layers
        for name in PROJECTIONS
    ]
    assert sum(laid) <= adapter_bytes(values_of_rank(config), 5, 4)


def test_the_largest_class_of_which_every_slot_is_filled() -> None:
    values, slots = LLAMA_3_8B.adapter_values, 16
    for rank in RANK_CLASSES:
        budget = slots * adapter_bytes(values, rank, 2)
        assert largest_class(values, slots, budget, 2) == rank
        assert largest_class(values, slots, budget - 1, 2) == (rank // 2 if rank > 8 else 0)
    assert largest_class(values, slots, slots * adapter_bytes(values, 8, 2), 2, least=16) == 0


def test_ranks_that_split_a_layer_share_and_others_may_have_all() -> None:
    assert [share_of_rank(1000, 1), share_of_rank(1000, 4), share_of_rank(1001, 4)] == [1000, 250, 251]
    assert share_of_rank(1000, 4, expert=2) == 1000


def test_a_worker_has_less_room_for_kv_by_its_adapters() -> None:
    hardware = Hardware()
    for tensor in (1, 2):
        plain = room(LLAMA_3_8B, H200, Spread(tensor, 1), hardware)
        kept = replace(hardware, adapter_slots=16, adapter_rank=60)
        found = room(LLAMA_3_8B, H200, Spread(tensor, 1), kept)
        bytes_each = 16 * adapter_bytes(LLAMA_3_8B.adapter_values, 64, 2) / tensor
        assert found.weight_bytes - plain.weight_bytes == pytest.approx(bytes_each)
        assert (plain.kv_tokens - found.kv_tokens) * plain.kv_bytes_per_token == pytest.approx(bytes_each, rel=1e-3)
