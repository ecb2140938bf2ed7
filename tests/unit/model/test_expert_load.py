"""Counts of experts in a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.model.config.model_config import ModelConfig
from shared.model.ranks.expert_load import ExpertLoad
from tests.integration.engine.families import write_family

COUNTS = {1: [5, 0, 7, 1, 2, 3]}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """Two layers of six experts, the first dense."""
    return ModelConfig.load(write_family(tmp_path_factory.mktemp("load"), "qwen3-moe"))


def test_what_is_written_is_read(tmp_path: Path, config: ModelConfig) -> None:
    path = tmp_path / "load.json"
    assert ExpertLoad.read(path, config) == ExpertLoad(2, 6, {}), "no file: nothing measured"
    load = ExpertLoad.read(path, config).and_then(COUNTS)
    load.write(path)
    assert ExpertLoad.read(path, config) == load == ExpertLoad(2, 6, COUNTS)
    assert load.by_layer == [None, COUNTS[1]]
    assert [file.name for file in tmp_path.iterdir()] == ["load.json"], "no unfinished file is left"


def test_older_counts_fade(config: ModelConfig) -> None:
    first = ExpertLoad.none(config).and_then(COUNTS)
    assert first.and_then({1: [1, 1, 1, 1, 1, 1]}).tokens == {1: [3, 1, 4, 1, 2, 2]}
    assert first.and_then({}).tokens == {1: [2, 0, 3, 0, 1, 1]}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"num_layers": 9, "num_experts": 6, "tokens": {}}, "a model with 9 layers, this one has 2"),
        (
            {"num_layers": 2, "num_experts": 8, "tokens": {"1": [0] * 8}},
            "a model with 8 experts in a layer, this one has 6",
        ),
        ({"num_layers": 2, "num_experts": 6, "tokens": {"0": [0] * 6}}, "layer 0, which has no experts"),
        ({"num_layers": 2, "num_experts": 6, "tokens": {"2": [0] * 6}}, "layer 2, which has no experts"),
        ({"num_layers": 2, "num_experts": 6, "tokens": {"1": [0] * 5}}, "no such file"),
        ({"num_layers": 2, "num_experts": 6, "tokens": {"1": [0, 0, 0, 0, 0, -1]}}, "no such file"),
        ({"num_layers": 2, "num_experts": 6, "tokens": {"one": [0] * 6}}, "no such file"),
        ({"num_layers": "2", "num_experts": 6, "tokens": {}}, "no such file"),
        ([], "no such file"),
        (None, "cannot be read"),
    ],
)
def test_a_file_of_another_model_or_of_none_is_refused(
    tmp_path: Path, config: ModelConfig, content: object, said: str
) -> None:
    path = tmp_path / "load.json"
    path.write_text("{" if content is None else json.dumps(content))
    with pytest.raises(ConfigError, match=said) as refused:
        ExpertLoad.read(path, config)
    assert refused.value.field == "expert_load"
