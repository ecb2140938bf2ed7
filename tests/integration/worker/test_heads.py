"""A worker with a checkpoint's head: when it is loaded, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.worker.engine_parts import open_speculator
from services.worker.loaded_model import LoadedModel, load_model, wants_head
from services.worker.settings import WorkerSettings
from shared.config import load_settings
from shared.engine.runner.runner import Runner, RunnerConfig
from shared.errors import ConfigError
from shared.identity import BOTH, DECODE, PREFILL, Roles
from shared.model.checkpoints import write_random_checkpoint
from shared.model.families.registry import load_config
from shared.structure.compiler import StructureCompiler
from tests.integration.engine.heads import write_knowing


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
    for speculation in ("heads", "auto"):
        model = load(folder, speculation, roles=roles)
        assert model.layout.num_layers == plain.layout.num_layers + 1
        assert model.roots != plain.roots
        runner = Runner(model.decoder, model.layout, 8, RunnerConfig(max_num_seqs=2))
        structures = StructureCompiler(lambda: pytest.fail("no tokenizer"), (), 320)
        speculator = open_speculator(wanted(folder, speculation, roles=roles), runner, structures, None, roles)
        assert speculator is not None
        assert ("heads" in speculator.methods) == (roles != PREFILL)


def test_without_a_head_auto_serves_and_heads_is_refused_by_name(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "plain")
    write_random_checkpoint(tmp_path / "told", extra_config={"num_nextn_predict_layers": 1})
    told = tmp_path / "told" / "config.json"
    (tmp_path / "plain" / "config.json").write_text(told.read_text())
    assert not load(tmp_path / "plain", "auto").has_head
    with pytest.raises(ConfigError, match=r"has no head: no tensor model\.layers\.2\.\*") as refused:
        load(tmp_path / "plain", "heads")
    assert refused.value.field == "speculation"
    write_random_checkpoint(tmp_path / "untold")
    with pytest.raises(ConfigError, match="no num_nextn_predict_layers"):
        load(tmp_path / "untold", "heads")


def test_a_draft_beside_a_head_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="has a head, which guesses in its place") as refused:
        load(folder, "auto", "--draft", str(folder))
    assert refused.value.field == "draft"


def test_a_worker_of_several_processes_or_on_a_gpu_has_no_head(folder: Path) -> None:
    config = load_config(folder)
    for flags, message in ((("--tp", "2"), "is 2 processes"), (("--device", "cuda"), "guesses nothing")):
        assert not wants_head(wanted(folder, "auto", *flags), config, DECODE)
        with pytest.raises(ConfigError, match=message):
            wants_head(wanted(folder, "heads", *flags), config, DECODE)
    assert wants_head(wanted(folder, "heads", "--device", "cuda", roles=PREFILL), config, PREFILL)
