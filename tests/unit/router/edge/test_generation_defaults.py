"""What a model's authors recommend for sampling."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.router.edge.text.generation_defaults import NO_DEFAULTS, GenerationDefaults
from shared.errors import ModelLoadError


def test_only_sampling_is_taken_from_the_file(tmp_path: Path) -> None:
    assert GenerationDefaults.load(tmp_path) == NO_DEFAULTS
    content = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 5, "eos_token_id": 1, "min_p": None}
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert GenerationDefaults.load(tmp_path).given == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


@pytest.mark.parametrize(("name", "value"), [("temperature", "hot"), ("top_k", 1.5), ("top_p", 2), ("min_p", True)])
def test_a_wrong_value_stops_the_start_with_its_name(tmp_path: Path, name: str, value: object) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({name: value}))
    with pytest.raises(ModelLoadError) as caught:
        GenerationDefaults.load(tmp_path)
    assert caught.value.field == name
