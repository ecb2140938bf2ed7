"""Adapters over the ranks of a group: each reads its slices, and together they give what one decoder gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared.collectives.rank_links import RankLinks
from shared.kernels.lora.rows import LoraRows
from shared.kernels.lora.step import StepLoras
from shared.model.adapters.random_adapter import write_random_adapter
from shared.model.checkpoints import write_random_checkpoint
from shared.model.decoder import Decoder
from shared.model.families.registry import load_config
from shared.model.layers.expert_placement import Placement
from shared.model.ranks.rank_decoder import RankDecoder
from shared.model.ranks.shard import Degrees
from tests.integration.engine.families import write_family
from tests.unit.collectives.in_threads import needs_library, run_group
from tests.unit.model.test_rank_decoder import CHUNKS, batch_of, empty_pool

pytestmark = needs_library

SHAPES = {
    "llama": ("LlamaForCausalLM", {"num_heads": 8, "num_kv_heads": 4, "head_dim": 32}),
    "one KV head": ("LlamaForCausalLM", {"num_heads": 4, "num_kv_heads": 1, "head_dim": 32}),
    "fused, no whole vectors": (
        "Phi3ForCausalLM",
        {"num_heads": 12, "num_kv_heads": 4, "head_dim": 10, "hidden_size": 120, "intermediate_size": 102},
    ),
}


def loras_of(decoder: Decoder, folders: list[Path]) -> StepLoras:
    """The first sequence of the step is the base model's, the others have an adapter each in turns."""
    packed = tuple(decoder.pack_adapter(decoder.read_adapter(folder)) for folder in folders)
    of_each = [-1, 0, 1, 0]
    of_rows = [slot for slot, (count, _) in zip(of_each, CHUNKS, strict=True) for _ in range(count)]
    return StepLoras(packed, LoraRows.of(of_rows, 2), LoraRows.of(of_each, 2), decoder.kernels)


@pytest.mark.parametrize("degrees", [Degrees(2), Degrees(4), Degrees(1, 2), Degrees(2, 2)], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_the_ranks_give_what_one_decoder_gives(tmp_path: Path, name: str, degrees: Degrees) -> None:
    architecture, sizes = SHAPES[name]
    write_random_checkpoint(tmp_path / "base", architecture, num_layers=3, **sizes)
    assert_ranks_give_the_same(tmp_path, degrees)


@pytest.mark.parametrize("degrees", [Degrees(2), Degrees(2, expert=2), Degrees(4, expert=2), Degrees(1, 2)], ids=str)
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_ranks_have_their_experts_additions(tmp_path: Path, name: str, degrees: Degrees) -> None:
    """Whole experts, and columns of them."""
    write_family(tmp_path / "base", name, num_heads=8, num_kv_heads=4)
    assert_ranks_give_the_same(tmp_path, degrees)


def test_copies_of_hot_experts_have_the_additions_of_the_expert(tmp_path: Path) -> None:
    write_family(tmp_path / "base", "mixtral", num_heads=8, num_kv_heads=4)
    config = load_config(tmp_path / "base")
    placement = tuple(((0, 1, 2), (0, 3, 4)) for _ in range(config.num_layers))
    assert_ranks_give_the_same(tmp_path, Degrees(2, expert=2), placement)


def assert_ranks_give_the_same(tmp_path: Path, degrees: Degrees, placement: Placement = ()) -> None:
    base = tmp_path / "base"
    folders = [
        write_random_adapter(tmp_path / str(seed), load_config(base), rank=3 + 20 * seed, seed=seed)
        for seed in range(2)
    ]
    whole = Decoder.load(base, torch.float32, "cpu")
    step, expected_pool, pool = batch_of(CHUNKS, 0), empty_pool(whole), empty_pool(whole)
    arguments = (step.token_ids, step.positions)
    with torch.inference_mode():
        plain = whole.forward(*arguments, empty_pool(whole), step.batch, step.logit_rows)
        loras = loras_of(whole, folders)
        expected = whole.forward(*arguments, expected_pool, step.batch, step.logit_rows, loras=loras)
    assert (expected - plain).abs().amax(1)[1:].min() > 0.01 * float(plain.abs().max())

    def work(links: RankLinks) -> Tensor:
        with torch.inference_mode():
            decoder = RankDecoder.load_rank(base, torch.float32, "auto", degrees, links, None, placement)
            own = loras_of(decoder, folders)
            return decoder.forward(*arguments, pool, step.batch, step.logit_rows, loras=own)

    found = run_group(degrees.tensor, degrees.pipeline, work)[0]
    tolerance = 3e-5 * float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(pool.rows, expected_pool.rows, rtol=0, atol=tolerance)


def test_every_rank_knows_the_adapter_by_the_digest_of_the_whole(tmp_path: Path) -> None:
    base = tmp_path / "base"
    write_random_checkpoint(base, "LlamaForCausalLM", num_heads=4, num_kv_heads=2, head_dim=32)
    folder = write_random_adapter(tmp_path / "adapter", load_config(base))
    whole = Decoder.load(base, torch.float32, "cpu").read_adapter(folder)

    def work(links: RankLinks) -> tuple[str, int]:
        found = RankDecoder.load_rank(base, torch.float32, "auto", Degrees(2), links).read_adapter(folder)
        return found.digest, found.nbytes

    ranks = run_group(2, 1, work)
    assert [digest for digest, _ in ranks] == [whole.digest] * 2
    assert all(nbytes < whole.nbytes for _, nbytes in ranks)
