"""The reference page says of every setting what the service itself would say."""

from __future__ import annotations

import re
from types import ModuleType

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.router.settings import RouterSettings
from shared.config import ServiceSettings, load_settings
from tests.unit.scripts import load_script


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    return load_script("reference")


class Inner(BaseModel):
    """Settings within settings."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    new_share: float = Field(default=0.5, gt=0, le=1)
    """Of the rest."""


class Settings(RouterSettings):
    """The router's, and more."""

    new_limit_bytes: int = Field(default=1 << 20, ge=4096)
    """Most memory | of it."""
    inner: Inner = Inner(new_share=0.25)
    others: dict[str, Inner] = Field(default_factory=dict)
    """By name."""


def test_a_new_setting_appears_with_its_flag_variable_default_bounds_and_text(reference: ModuleType) -> None:
    found = {item.name: item for item in reference.settings_of(Settings)}
    assert found["new_limit_bytes"] == reference.Setting(
        "new_limit_bytes",
        "--new-limit-bytes",
        "TANDEM_ROUTER_NEW_LIMIT_BYTES",
        "`1048576 (1 MiB)`",
        "≥ 4096",
        "Most memory | of it.",
    )
    assert found["inner.new_share"] == reference.Setting(
        "inner.new_share", "--inner.new-share", "TANDEM_ROUTER_INNER__NEW_SHARE", "`0.25`", "> 0, ≤ 1", "Of the rest."
    )
    assert found["others.NAME.new_share"].flag == ""
    assert "inner" not in found


def test_every_flag_is_one_that_the_service_takes(
    reference: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for _, _, cls in reference.SERVICES:
        with pytest.raises(SystemExit):
            load_settings(cls, ["--help"])
        taken = set(re.findall(r"^  (--[a-z0-9.-]+)", capsys.readouterr().out, re.MULTILINE))
        assert {item.flag for item in reference.settings_of(cls)} - {""} == taken


def failing(cls: type[ServiceSettings]) -> str:
    """The names of all settings that are refused as the environment is."""
    with pytest.raises(ValidationError) as caught:
        cls()
    return " ".join(".".join(map(str, error["loc"])) for error in caught.value.errors())


def test_commands_and_targets_are_all_there(reference: ModuleType) -> None:
    page = reference.page()
    for heading in (
        "### `tandem serve [MODEL]`",
        "### `tandem cache pin PREFIX`",
        "| `bench-router` |",
        "`--example, --no-example`",
        "| `--mode` | auto, or disaggregated where prefill workers differ from decode workers |",
        "| `--prefill` | 1, or 0 in collocated mode |",
    ):
        assert heading in page


def test_the_page_in_the_repository_says_what_the_settings_are(reference: ModuleType) -> None:
    assert reference.main(["--check"]) == 0, "docs/reference.md is stale: .venv/bin/python .ci/reference.py"
