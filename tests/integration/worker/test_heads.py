"""A worker with a checkpoint's head: when it is loaded, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from services.worker.engine_parts import open_speculator
from services.worker.loaded_model import LoadedModel, load_model, wants_head
from services.worker.settings import WorkerSettings
from shared.config import load_settings
from shared.engine.runner.runner import Runner, RunnerConfig
from shared.errors import ConfigError, ModelLoadError
from shared.fingerprints import headed_fingerprint
from shared.identity import BOTH, DECODE, PREFILL, Roles
from shared.model.checkpoints import write_random_checkpoint
from shared.model.families.registry import load_config
from shared.structure.compiler import StructureCompiler
from tests.integration.engine.families import write_family
from tests.integration.engine.heads import write_eagle, write_knowing


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_knowing(tmp_path_factory.mktemp("knowing") / "model")


def wanted(folder: Path, speculation: str, *flags: str, roles: Roles = DECODE) -> WorkerSettings:
    always = ("--name", "w", "--model", str(folder), "--dtype", "fp32", "--speculation", speculation)
    return load_settings(WorkerSettings, [*always, "--num-kv-blocks", "20", *flags]).for_roles(roles)


def load(folder: Path, speculation: str, *flags: str, roles: Roles = DECODE) -> LoadedModel:
    return load_model(wanted(folder, speculation, *flags, roles=roles), lambda *_: None, roles=roles)


@pytest.mark.parametrize("roles", [PREFILL, DECODE, BOTH])
def test_all_workers_have_blocks_with_the_heads_layer_and_name_them_so(folder: Path, roles: Roles) -> None:
    plain = load(folder, "ngram", roles=roles)
    model = load(folder, "heads", roles=roles)
    assert model.layout.num_layers == plain.layout.num_layers + 1
    assert model.fingerprint == headed_fingerprint(plain.fingerprint)
    # What a router makes of a welcome.
    assert model.roots == replace(plain.roots, model_fingerprint=model.fingerprint)
    runner = Runner(model.decoder, model.layout, 8, RunnerConfig(max_num_seqs=2))
    structures = StructureCompiler(lambda: pytest.fail("no tokenizer"), (), 320)
    speculator = open_speculator(wanted(folder, "heads", roles=roles), runner, structures, None, roles)
    assert speculator is not None
    assert ("heads" in speculator.methods) == (roles != PREFILL)
    assert load(folder, "auto", roles=roles).roots == plain.roots


def test_without_a_head_heads_is_refused_by_name(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "plain")
    write_random_checkpoint(tmp_path / "told", extra_config={"num_nextn_predict_layers": 1})
    told = tmp_path / "told" / "config.json"
    (tmp_path / "plain" / "config.json").write_text(told.read_text())
    with pytest.raises(ConfigError, match=r"has no head: no tensor model\.layers\.2\.\*") as refused:
        load(tmp_path / "plain", "heads")
    assert refused.value.field == "speculation"
    write_random_checkpoint(tmp_path / "untold")
    with pytest.raises(ConfigError, match="no num_nextn_predict_layers"):
        load(tmp_path / "untold", "heads")


def test_a_worker_of_several_processes_has_no_head_nor_one_on_a_gpu_for_a_model_with_states(
    tmp_path: Path, folder: Path
) -> None:
    config = load_config(folder)
    with pytest.raises(ConfigError, match="is 2 processes"):
        wants_head(wanted(folder, "heads", "--tp", "2"), config, DECODE)
    assert wants_head(wanted(folder, "heads", "--device", "cuda"), config, DECODE)
    with_states = write_family(tmp_path, "qwen3-next")
    for roles in (DECODE, BOTH):
        with pytest.raises(ConfigError, match="layers keep states"):
            wants_head(wanted(with_states, "heads", "--device", "cuda", roles=roles), load_config(with_states), roles)
    settings = wanted(with_states, "heads", "--device", "cuda", roles=PREFILL)
    assert wants_head(settings, load_config(with_states), PREFILL)


@pytest.mark.parametrize("roles", [PREFILL, DECODE])
def test_a_head_apart_is_a_layer_of_all_workers_blocks_and_part_of_their_name(
    tmp_path: Path, folder: Path, roles: Roles
) -> None:
    layers = {"eagle_aux_hidden_state_layer_ids": [1, 1, 1]}
    one, other = (write_eagle(tmp_path / str(count), folder, count, **layers) for count in (200, 190))
    plain, own = (load(folder, speculation, roles=roles) for speculation in ("ngram", "heads"))
    model = load(folder, "heads", "--draft", str(one), roles=roles)
    assert model.layout.num_layers == plain.layout.num_layers + 1
    assert model.draft is None
    assert model.decoder.head is not None
    assert model.decoder.head.behind == (1, 1, 1)
    names = {item.fingerprint for item in (plain, own, model)}
    names.add(load(folder, "heads", "--draft", str(other), roles=roles).fingerprint)
    assert len(names) == 4
    assert model.fingerprint == load(folder, "heads", "--draft", str(one), roles=BOTH).fingerprint


def test_a_head_apart_that_does_not_fit_is_refused_at_the_start(tmp_path: Path, folder: Path) -> None:
    head = write_eagle(tmp_path / "head", folder, vocab_size=512, eagle_aux_hidden_state_layer_ids=[1, 1, 1])
    with pytest.raises(ConfigError, match="vocabulary of 512, the model has 320"):
        load(folder, "heads", "--draft", str(head))
    with pytest.raises(ConfigError, match="take speculation heads"):
        load(folder, "auto", "--draft", str(head))
    with pytest.raises(ModelLoadError, match="LlamaForCausalLM is no head"):
        load(folder, "heads", "--draft", str(folder))


def test_a_model_with_states_has_its_own_head_and_speculates(tmp_path: Path) -> None:
    hybrid = write_knowing(tmp_path / "hybrid", "qwen3-next")
    plain, model = (load(hybrid, speculation) for speculation in ("ngram", "heads"))
    assert model.layout.num_layers == plain.layout.num_layers + 1
    assert model.layout.num_states > 0
    assert model.fingerprint == headed_fingerprint(plain.fingerprint)
