"""What the command says of itself, and how it ends: in its own flags, with the status that the guide names."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from services.cli.main import DISTRIBUTION
from shared.errors import InvalidRequest, Unauthenticated
from tests.unit.cli.conftest import RunTandem
from tests.unit.cli.scripted_router import ScriptedRouter


def test_the_version(tandem: RunTandem) -> None:
    result = tandem("--version")
    assert (result.status, result.out) == (0, f"tandem {metadata.version(DISTRIBUTION)}\n")


def test_serve_and_up_are_one_command(tandem: RunTandem) -> None:
    help_of = {name: tandem(name, "--help").out.replace(f"tandem {name} ", "tandem X ") for name in ("serve", "up")}
    assert help_of["serve"] == help_of["up"]
    assert "--state-dir" in help_of["up"]


def test_completion_can_be_shown(tandem: RunTandem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    result = tandem("--show-completion", "bash")
    assert result.status == 0
    assert "_TANDEM_COMPLETE" in result.out


@pytest.mark.parametrize("command", ["status", "generate"])
def test_without_a_key_the_flag_is_named_and_the_status_is_2(
    tandem: RunTandem, router: ScriptedRouter, command: str
) -> None:
    router.responses = []
    router.error = Unauthenticated("an API key is needed: send `Authorization: Bearer KEY`", field="authorization")
    result = tandem(command, *(["x"] if command == "generate" else []))
    assert result.status == 2
    assert "tandem: an API key is needed: give it with --api-key, or in TANDEM_API_KEY" in result.err
    assert "Bearer" not in result.err


def test_a_fields_flag_is_named(tandem: RunTandem, router: ScriptedRouter) -> None:
    router.responses = []
    router.error = InvalidRequest("max_tokens must be at least 1, got 0", field="max_tokens")
    result = tandem("generate", "x", "-n", "0")
    assert result.status == 2
    assert "max_tokens must be at least 1, got 0 (--max-tokens)" in result.err


def test_a_local_settings_flag_is_named(tandem: RunTandem) -> None:
    result = tandem("serve", "--num-kv-blocks", "-1")
    assert result.status == 2
    assert "num_kv_blocks: Input should be greater than or equal to 0 (got -1)" in result.err
    assert "(--num-kv-blocks)" in result.err


def test_a_misspelt_variable_of_the_commands_own(tandem: RunTandem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_APIKEY", "k")
    result = tandem("status")
    assert (result.status, result.out) == (2, "")
    assert result.err == "tandem: environment variable TANDEM_APIKEY is no setting: did you mean TANDEM_API_KEY?\n"


def test_a_folder_that_cannot_be_written_gets_a_sentence(tandem: RunTandem, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    free = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0")
    result = tandem("serve", "--state-dir", str(tmp_path / "file" / "state"), *free)
    assert result.status == 2
    assert result.err.endswith("name a folder that you may write to, or start in one (--state-dir)\n")
    assert "Traceback" not in result.err
