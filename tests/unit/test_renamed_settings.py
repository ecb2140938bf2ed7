"""Settings under their old names still count, and say what to write instead."""

from __future__ import annotations

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


def test_old_names_of_nested_settings(tmp_path, monkeypatch, caplog):
    old = from_yaml(tmp_path, "placement:\n  jitter: 0.3\n  patience: 2")
    settings = load_settings(RouterSettings, [*ROUTER, *old]).placement
    assert (settings.tie_margin, settings.patience) == (0.3, 2.0)
    monkeypatch.setenv("TANDEM_ROUTER_PLACEMENT__JITTER", "0.4")
    assert load_settings(RouterSettings, [*ROUTER, *old]).placement.tie_margin == 0.4
    flags = ["--placement.jitter", "0.5"]
    assert load_settings(RouterSettings, [*ROUTER, *old, *flags]).placement.tie_margin == 0.5
    assert "--placement.jitter was renamed: use --placement.tie-margin." in caplog.text


def test_the_new_name_counts_where_both_are_set(tmp_path, monkeypatch):
    both = from_yaml(tmp_path, "max_step_tokens: 64\nmax_num_batched_tokens: 128")
    assert load_settings(WorkerSettings, [*WORKER, *both]).max_num_batched_tokens == 128
    monkeypatch.setenv("TANDEM_WORKER_MAX_STEP_TOKENS", "256")
    monkeypatch.setenv("TANDEM_WORKER_MAX_NUM_BATCHED_TOKENS", "1024")
    assert load_settings(WorkerSettings, WORKER).max_num_batched_tokens == 1024


def test_new_names_warn_of_nothing(caplog):
    load_settings(WorkerSettings, [*WORKER, "--max-num-batched-tokens", "64"])
    assert caplog.messages == []
