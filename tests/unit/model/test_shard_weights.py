"""What a rank's reader of a checkpoint passes over, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shared.errors import ModelLoadError
from shared.model.checkpoints import write_random_checkpoint
from shared.model.config.model_config import ModelConfig
from shared.model.ranks.shard import Degrees, Shard
from shared.model.ranks.shard_weights import allocate_shard, load_shard
from tests.integration.engine.families import EXPERTS


def test_tensors_that_no_rank_reads_are_no_fault(tmp_path: Path) -> None:
    """Layers behind the decoder's own, which predict further."""
    extra = {**EXPERTS["deepseek-v3"][1], "num_nextn_predict_layers": 0}
    sizes = {"num_heads": 4, "num_kv_heads": 4}
    write_random_checkpoint(tmp_path, "DeepseekV3ForCausalLM", num_layers=3, extra_config=extra, **sizes)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**content, "num_hidden_layers": 2, "num_nextn_predict_layers": 1})
    )
    shard = Shard(ModelConfig.load(tmp_path), Degrees(2), 1)
    load_shard(tmp_path, shard, allocate_shard(shard, torch.float32))


def test_a_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    config = write_random_checkpoint(tmp_path, "LlamaForCausalLM", num_layers=1, num_heads=4, num_kv_heads=2)
    shard = Shard(config, Degrees(2), 0)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match="truncated"):
        load_shard(tmp_path, shard, allocate_shard(shard, torch.float32))
