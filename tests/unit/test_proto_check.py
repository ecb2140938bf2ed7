"""The check of `proto/` notices what would break a peer, and lets additions pass."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import ModuleType

import pytest

from tests.unit.scripts import ROOT, load_script

INFERENCE, TYPES = "tandem/v1/inference.proto", "tandem/v1/types.proto"


@pytest.fixture(scope="module")
def check() -> ModuleType:
    return load_script("proto_check")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    return tmp_path / "proto"


def change(folder: Path, file: str, old: str, new: str) -> None:
    text = (folder / file).read_text()
    assert text.count(old) == 1, old
    (folder / file).write_text(text.replace(old, new))


def test_the_definitions_pass_and_are_the_baseline(check: ModuleType, folder: Path) -> None:
    assert check.faults(folder) == []
    assert check.image(folder) == (folder / check.BASELINE).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        (TYPES, "string grammar = 5;", "string grammar = 15;", "grammar"),
        (TYPES, "string regex = 3;", "bytes regex = 3;", "regex"),
        (TYPES, "string regex = 3;", "string expression = 3;", "regex"),
        (TYPES, "  uint32 min_tokens = 10; ", "  // uint32 min_tokens = 10; ", "min_tokens"),
        (TYPES, "  FINISH_REASON_LENGTH = 2;", "  FINISH_REASON_LENGTH = 4;", "2"),
        (INFERENCE, "  rpc ListModels(", "  // rpc ListModels(", "ListModels"),
    ],
    ids=["number", "type", "name", "removed", "enum value", "call"],
)
def test_a_breaking_change_is_named(check: ModuleType, folder: Path, file: str, old: str, new: str, said: str) -> None:
    change(folder, file, old, new)
    assert any(said in line and file in line for line in check.faults(folder))
