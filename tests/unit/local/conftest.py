"""A spec and commands for clusters of fake processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.local.spec import ClusterSpec
from tests.unit.local.fakes import FakeCommands, fake_spec


@pytest.fixture
def commands(tmp_path: Path) -> FakeCommands:
    return FakeCommands(tmp_path / "journal")


@pytest.fixture
def spec(tmp_path: Path) -> ClusterSpec:
    return fake_spec(tmp_path)
