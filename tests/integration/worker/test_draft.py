"""A worker's draft model: what is refused, and the memory that it takes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from services.worker import loaded_model
from services.worker.engine_parts import open_speculator
from services.worker.loaded_model import LoadedModel, load_model
from services.worker.settings import WorkerSettings
from shared.config import load_settings
from shared.errors import ConfigError, ModelLoadError
from shared.identity import DECODE
from shared.model.checkpoints import write_random_checkpoint
from shared.structure.compiler import StructureCompiler
from tests.demo import DEMO
from tests.integration.engine.families import write_family


def wanted(*flags: str) -> WorkerSettings:
    always = ("--name", "w", "--model", str(DEMO), "--dtype", "fp32", "--speculation", "auto")
    return load_settings(WorkerSettings, [*always, *flags]).for_roles(DECODE)


def load(*flags: str) -> LoadedModel:
    return load_model(wanted(*flags), lambda *_: None)


def test_a_draft_of_another_vocabulary_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, vocab_size=300)
    progress: list[tuple[int, ...]] = []
    with pytest.raises(ConfigError, match="vocabulary of 300 tokens, the model has 3072") as refused:
        load_model(wanted("--draft", str(tmp_path)), lambda *loaded: progress.append(loaded))
    assert (refused.value.field, progress) == ("draft", [])


def test_a_draft_with_states_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Qwen3_5ForCausalLM, whose layers have states") as refused:
        load("--draft", str(write_family(tmp_path / "draft", "qwen3.5", vocab_size=3072)))
    assert refused.value.field == "draft"


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load("--draft", str(tmp_path))


def test_the_draft_and_its_pool_take_of_the_same_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each block of the model's pool leaves room for one of the draft's, which has as many tokens."""
    write_random_checkpoint(tmp_path, vocab_size=3072, num_kv_heads=2, head_dim=16)
    memory = SimpleNamespace(available=400_000_000)
    monkeypatch.setattr(loaded_model.psutil, "virtual_memory", lambda: memory)
    alone, beside = load(), load("--draft", str(tmp_path))
    assert beside.draft is not None
    assert alone.draft is None
    own = beside.draft.layout.block_bytes
    assert beside.draft.num_blocks == beside.num_blocks
    assert beside.num_blocks == 40_000_000 // (alone.layout.block_bytes + own) < alone.num_blocks
    with pytest.raises(ConfigError, match="KV blocks of"):
        load("--draft", str(tmp_path), "--num-kv-blocks", str(400_000_000 // alone.layout.block_bytes))


def test_a_worker_with_a_draft_asks_it_too(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, vocab_size=3072)
    settings = wanted("--draft", str(tmp_path), "--num-kv-blocks", "40")
    model = load_model(settings, lambda *_: None)
    structures = StructureCompiler(lambda: None, [1])
    speculator = open_speculator(settings, SimpleNamespace(), structures, model.draft)
    assert speculator is not None
    assert speculator.methods == {"ngram", "grammar", "draft"}
