"""Weights: shards, headers, dtypes, fingerprints, and what of them a rank reads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.errors import ModelLoadError
from shared.model.checkpoints import write_random_checkpoint
from shared.model.decoder import Decoder
from shared.model.families.registry import load_config
from shared.model.layers.parameters import DecoderParameters
from shared.model.ranks.shard import Degrees, Shard
from shared.model.ranks.shard_weights import allocate_shard, load_shard
from shared.model.weights import tensor_reader
from shared.model.weights.checkpoint import Checkpoint
from shared.model.weights.loader import fingerprint
from shared.model.weights.plan import WeightPlan
from tests.integration.engine.families import EXPERTS
from tests.integration.engine.test_greedy_against_transformers import load_transformers
from tests.unit.model.loading import load_weights


def _views(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    config = load_config(folder)
    return DecoderParameters.allocate(config, dtype, "cpu").checkpoint_views(config)


def _edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a single-file checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_random_checkpoint(tmp_path, "Qwen2ForCausalLM")
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_random_checkpoint(tmp_path, max_shard_bytes=20_000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    return tmp_path


def test_pieces_read_ahead_are_those_of_the_files(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pieces a tensor, tensors of several files in turns, and one that is left in the middle."""
    monkeypatch.setattr(tensor_reader, "PIECE_BYTES", 300)
    with Checkpoint.of(sharded) as plain, Checkpoint.of(sharded, ahead=True) as ahead:
        for name, entry in plain.entries.items():
            num_rows = entry.shape[0]
            left = ahead.rows(name, 0, num_rows)
            next(left)
            for begin, end in ((0, num_rows), (num_rows // 3, num_rows), (0, 0)):
                expected = [(first, piece.clone()) for first, piece in plain.rows(name, begin, end)]
                found = [(first, piece.clone()) for first, piece in ahead.rows(name, begin, end)]
                assert [first for first, _ in found] == [first for first, _ in expected]
                assert all(a.equal(b) for (_, a), (_, b) in zip(found, expected, strict=True))
            assert ahead.whole(name).equal(plain.whole(name))


def test_a_file_that_ends_early_is_told_also_where_it_is_read_ahead(folder: Path) -> None:
    path = folder / "model.safetensors"
    with Checkpoint.of(folder, ahead=True) as checkpoint:
        name = max(checkpoint.entries, key=lambda name: checkpoint.entries[name].begin)
        os.truncate(path, path.stat().st_size - 4)
        with pytest.raises(ModelLoadError, match="truncated"):
            list(checkpoint.rows(name, 0, checkpoint.entries[name].shape[0]))


def test_shards_hold_the_same_model_as_one_file(sharded: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    whole = tmp_path_factory.mktemp("whole")
    write_random_checkpoint(whole)
    one, many = _views(whole), _views(sharded)
    load_weights(whole, one)
    load_weights(sharded, many)
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_progress_counts_stored_bytes_up_to_the_total(sharded: Path) -> None:
    seen: list[tuple[int, int]] = []
    Decoder.load(sharded, torch.bfloat16, "cpu", lambda loaded, total: seen.append((loaded, total)))
    stored = [tensor for file in sharded.glob("*.safetensors") for tensor in load_file(file).values()]
    total = sum(tensor.nbytes for tensor in stored)
    assert {entry[1] for entry in seen} == {total}
    assert [entry[0] for entry in seen] == sorted({entry[0] for entry in seen})
    assert seen[-1] == (total, total)
    assert len(seen) == len(stored)


def test_weights_are_converted_to_the_wanted_dtype(folder: Path) -> None:
    wide, narrow = _views(folder), _views(folder, torch.bfloat16)
    load_weights(folder, wide)
    load_weights(folder, narrow)
    assert all(torch.equal(narrow[name], wide[name].bfloat16()) for name in wide)


def test_missing_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelLoadError, match=shard.name) as caught:
        load_weights(sharded, _views(sharded))
    assert caught.value.details["file"] == shard.name


@pytest.mark.parametrize("index", ["{", '{"weight_map": []}', '{"weight_map": {"a": "../a.safetensors"}}'])
def test_broken_index_is_named(sharded: Path, index: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelLoadError) as caught:
        load_weights(sharded, _views(sharded))
    assert caught.value.details["file"] == "model.safetensors.index.json"


def test_a_tensor_that_the_index_omits_is_read_from_its_shard_as_transformers_does(sharded: Path) -> None:
    views, expected = _views(sharded), _views(sharded)
    load_weights(sharded, expected)
    index = sharded / "model.safetensors.index.json"
    fields = json.loads(index.read_text())
    omitted = next(name for name in fields["weight_map"] if name.endswith("q_proj.weight"))
    del fields["weight_map"][omitted]
    index.write_text(json.dumps(fields))
    load_weights(sharded, views)
    assert all(views[name].equal(expected[name]) for name in expected)
    theirs = load_transformers(sharded).state_dict()[omitted]
    assert any(theirs.equal(tensor) for file in sharded.glob("*.safetensors") for tensor in load_file(file).values())


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_truncated_file_is_named_before_anything_is_copied(sharded: Path, keep: int) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:keep])
    views = _views(sharded)
    for view in views.values():
        view.fill_(7)
    with pytest.raises(ModelLoadError, match="corrupt or truncated") as caught:
        load_weights(sharded, views)
    assert caught.value.details["file"] == shard.name
    assert all(bool((view == 7).all()) for view in views.values())


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [2]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}',
        b"[1]",
    ],
)
def test_corrupt_header_is_named(folder: Path, header: bytes) -> None:
    content = len(header).to_bytes(8, "little") + header + bytes(8)
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelLoadError, match="corrupt or truncated") as caught:
        load_weights(folder, _views(folder))
    assert caught.value.details["file"] == "model.safetensors"


def test_missing_tensors_are_counted_and_the_first_named(folder: Path) -> None:
    gone = [f"model.layers.1.self_attn.{name}_proj.{kind}" for name in "qkv" for kind in ("weight", "bias")]
    _edit(folder, lambda tensors: [tensors.pop(name) for name in gone])
    with pytest.raises(ModelLoadError, match=r"6 tensor.* is missing .*q_proj.weight.*…") as caught:
        load_weights(folder, _views(folder))
    assert caught.value.details["count"] == 6


def test_leftover_tensors_are_refused_but_rotary_buffers_ignored(folder: Path) -> None:
    _edit(
        folder,
        lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
    )
    load_weights(folder, _views(folder))
    _edit(folder, lambda tensors: tensors.update({"model.layers.9.mlp.up_proj.weight": torch.ones(4)}))
    with pytest.raises(ModelLoadError, match=r"not expected .*layers\.9"):
        load_weights(folder, _views(folder))


def test_wrong_shape_names_tensor_expected_and_found(folder: Path) -> None:
    _edit(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}))
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight has shape \[31\].*\[32\]") as caught:
        load_weights(folder, _views(folder))
    assert caught.value.details == {"tensor": "model.norm.weight", "expected": "[32]", "found": "[31]"}


def test_integer_weights_are_refused(folder: Path) -> None:
    _edit(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}))
    with pytest.raises(ModelLoadError, match="stored as I8"):
        load_weights(folder, _views(folder))


def test_output_projection_beside_a_tied_embedding_must_equal_it(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, tie=True)
    copy = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"].clone()
    _edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": copy}))
    Decoder.load(tmp_path, torch.bfloat16, "cpu")
    _edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": copy + 1}))
    with pytest.raises(ModelLoadError, match="differs") as caught:
        Decoder.load(tmp_path, torch.float32, "cpu")
    assert caught.value.field == "tie_word_embeddings"


def test_fingerprint_is_the_same_for_a_copy_with_other_times_and_path(sharded: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(sharded, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(dict(reversed(config.items()))))
    assert fingerprint(copy, "float32") == fingerprint(sharded, "float32")
    assert len(fingerprint(copy, "float32")) == 32


def test_fingerprint_sees_dtype_config_and_one_changed_value(folder: Path) -> None:
    seen = {fingerprint(folder, "float32"), fingerprint(folder, "bfloat16")}

    def nudge(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.down_proj.weight"][3, 5] += 1e-3

    _edit(folder, nudge)
    seen.add(fingerprint(folder, "float32"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    seen.add(fingerprint(folder, "float32"))
    assert len(seen) == 4


def test_fingerprint_samples_head_middle_and_tail_of_a_large_tensor(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    values = torch.zeros(1 << 20)
    seen = set()
    for position in (None, 0, 1 << 19, (1 << 20) - 1):
        if position is not None:
            values[position] += 1
        save_file({"a": values}, tmp_path / "model.safetensors")
        seen.add(fingerprint(tmp_path, "float32"))
    assert len(seen) == 4


def test_tensors_that_no_rank_reads_are_no_fault(tmp_path: Path) -> None:
    """Layers behind the decoder's own, which predict further."""
    extra = {**EXPERTS["deepseek-v3"][1], "num_nextn_predict_layers": 0}
    sizes = {"num_heads": 4, "num_kv_heads": 4}
    write_random_checkpoint(tmp_path, "DeepseekV3ForCausalLM", num_layers=3, extra_config=extra, **sizes)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**content, "num_hidden_layers": 2, "num_nextn_predict_layers": 1})
    )
    _load_shard(tmp_path, Shard(load_config(tmp_path), Degrees(2), 1))


def test_a_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    config = write_random_checkpoint(tmp_path, "LlamaForCausalLM", num_layers=1, num_heads=4, num_kv_heads=2)
    shard = Shard(config, Degrees(2), 0)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match="truncated"):
        _load_shard(tmp_path, shard)


_MODES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

_PROGRAM = """
import torch
from pathlib import Path
from shared.model.decoder import Decoder

decoder = Decoder.load(Path("models/demo"), torch.float32, "cpu")
kept = torch.ones(16 << 20)
print(next(line.split()[1] for line in open("/proc/self/smaps_rollup") if line.startswith("AnonHugePages")))
"""


def huge_kib(**environment: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(
    not _MODES.exists() or "[madvise]" not in _MODES.read_text(),
    reason="the system gives large pages to all or to none",
)
def test_large_tensors_lie_on_large_pages_unless_the_environment_says_no():
    assert huge_kib() >= 32 << 10
    assert huge_kib(THP_MEM_ALLOC_ENABLE="0") == 0


def _load_shard(folder: Path, shard: Shard) -> None:
    with Checkpoint.of(folder) as checkpoint:
        plan = WeightPlan.make(checkpoint, shard.config)
        load_shard(checkpoint, shard, plan, allocate_shard(shard, torch.float32))
