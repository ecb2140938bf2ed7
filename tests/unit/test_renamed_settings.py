"""Settings under their old names still count, and say what to write instead."""

from __future__ import annotations

from typing import ClassVar

import pytest

from services.router.settings import RouterSettings
from services.worker.settings import WorkerSettings
from shared.config import load_settings

WORKER = ["--name", "w", "--model", "m"]
ROUTER = ["--model", "m", "--decode", "d=h:1"]


def from_yaml(tmp_path, text: str) -> list[str]:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    return ["--config", str(path)]


@pytest.mark.parametrize("flags", [["--max-step-tokens", "64"], ["--max-step-tokens=64"]])
def test_an_old_flag(flags, caplog):
    assert load_settings(WorkerSettings, [*WORKER, *flags]).max_num_batched_tokens == 64
    assert caplog.messages == [
        "--max-step-tokens was renamed: use --max-num-batched-tokens. The old name works in this release only"
    ]


def test_an_old_variable(monkeypatch, caplog):
    monkeypatch.setenv("TANDEM_WORKER_MAX_STEP_TOKENS", "64")
    assert load_settings(WorkerSettings, WORKER).max_num_batched_tokens == 64
    assert len(caplog.messages) == 1
    assert "TANDEM_WORKER_MAX_STEP_TOKENS was renamed: use TANDEM_WORKER_MAX_NUM_BATCHED_TOKENS" in caplog.text


def test_an_old_key(tmp_path, caplog):
    settings = load_settings(WorkerSettings, [*WORKER, *from_yaml(tmp_path, "max_step_tokens: 64")])
    assert settings.max_num_batched_tokens == 64
    assert "max_step_tokens in the configuration file was renamed: use max_num_batched_tokens" in caplog.text


class Renamed(RouterSettings):
    """A router of which a nested setting had another name."""

    renamed: ClassVar = {"placement.indulgence": "placement.patience"}


def test_old_names_of_nested_settings(tmp_path, monkeypatch, caplog):
    old = from_yaml(tmp_path, "placement:\n  indulgence: 3\n  tier_peer: 0.4")
    settings = load_settings(Renamed, [*ROUTER, *old]).placement
    assert (settings.patience, settings.tier_peer) == (3.0, 0.4)
    monkeypatch.setenv("TANDEM_ROUTER_PLACEMENT__INDULGENCE", "4")
    assert load_settings(Renamed, [*ROUTER, *old]).placement.patience == 4.0
    flags = ["--placement.indulgence", "5"]
    assert load_settings(Renamed, [*ROUTER, *old, *flags]).placement.patience == 5.0
    assert "--placement.indulgence was renamed: use --placement.patience." in caplog.text


def test_the_new_name_counts_where_both_are_set(tmp_path, monkeypatch):
    both = from_yaml(tmp_path, "max_step_tokens: 64\nmax_num_batched_tokens: 128")
    assert load_settings(WorkerSettings, [*WORKER, *both]).max_num_batched_tokens == 128
    monkeypatch.setenv("TANDEM_WORKER_MAX_STEP_TOKENS", "256")
    monkeypatch.setenv("TANDEM_WORKER_MAX_NUM_BATCHED_TOKENS", "1024")
    assert load_settings(WorkerSettings, WORKER).max_num_batched_tokens == 1024


def test_new_names_warn_of_nothing(caplog):
    load_settings(WorkerSettings, [*WORKER, "--max-num-batched-tokens", "64"])
    assert caplog.messages == []
