"""Misspelt and renamed settings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar

import pytest

from services.kvstore.settings import KVStoreSettings
from services.planner.settings import PlannerSettings
from services.router.settings import RouterSettings
from services.worker.settings import WorkerSettings
from shared.config import load_settings
from shared.environment import OTHER_VARIABLES, check_variables
from shared.errors import ConfigError

ALL = (RouterSettings, WorkerSettings, KVStoreSettings, PlannerSettings)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("TANDEM_ROUTER_QEUE_LIMIT", "TANDEM_ROUTER_QUEUE_LIMIT"),
        ("TANDEM_ROTUER_QUEUE_LIMIT", "TANDEM_ROUTER_QUEUE_LIMIT"),
        ("TANDEM_ROUTER_EDGE__LIMITS__WRITE_TIMEOUT", "TANDEM_ROUTER_EDGE__LIMITS__WRITE_TIMEOUT_S"),
        ("TANDEM_ROUTER_EDGE_API_KEYS", "TANDEM_ROUTER_EDGE__API_KEYS"),
        ("TANDEM_APIKEY", "TANDEM_API_KEY"),
        ("tandem_router_qeue_limit", "TANDEM_ROUTER_QUEUE_LIMIT"),
    ],
)
def test_a_misspelt_variable_names_the_nearest(monkeypatch, wrong, meant):
    monkeypatch.setenv(wrong, "3")
    with pytest.raises(ConfigError, match=f"{wrong} is no setting: did you mean {meant}\\?") as caught:
        load_settings(RouterSettings, ["--model", "m", "--decode", "d=h:1"])
    assert caught.value.field == wrong


def test_a_variable_near_to_none(monkeypatch):
    with pytest.raises(ConfigError, match=r"TANDEM_FOO is no setting: docs/reference.md"):
        check_variables((RouterSettings,), {"TANDEM_FOO": ""})


@pytest.mark.parametrize(
    "name",
    [
        "TANDEM_ROUTER_QUEUE_LIMIT",
        "tandem_router_queue_limit",
        "TANDEM_ROUTER_EDGE",  # a whole part as JSON
        "TANDEM_ROUTER_EDGE__TENANTS__acme__SHARE",
        "TANDEM_WORKER_MAX_STEP_TOKENS",  # another service's, with its old name
        "TANDEM_WORKER_QEUE",  # the worker says so
        "TANDEM_ROUTER_SERVICE_HOST",
        "TANDEM_ROUTER_SERVICE_PORT_HTTP",
        "TANDEM_ROUTER_PORT_8000_TCP_ADDR",
        *sorted(OTHER_VARIABLES),
    ],
)
def test_what_a_router_leaves_alone(name):
    check_variables((RouterSettings,), {name: "1"})


def test_links_of_kubernetes_are_known_by_their_values():
    check_variables((RouterSettings,), {"TANDEM_ROUTER_PORT": "tcp://10.0.0.1:80"})
    with pytest.raises(ConfigError, match="TANDEM_ROUTER_PORT"):
        check_variables((RouterSettings,), {"TANDEM_ROUTER_PORT": "80"})


def test_every_service_refuses_its_own():
    for cls in ALL:
        prefix = cls.model_config["env_prefix"]
        with pytest.raises(ConfigError, match=f"{prefix}NO_SUCH"):
            check_variables(ALL, {f"{prefix}NO_SUCH": "1"})


def test_what_slow_tests_set_are_settings():
    """A variable that is none keeps a cluster from starting, which a night may pass before anybody sees."""
    tests = Path(__file__).parents[1]
    texts = [path.read_text() for folder in ("chaos", "e2e", "k8s") for path in (tests / folder).rglob("*.py")]
    names = {
        name for text in texts for name in re.findall(r'setenv\("(TANDEM_(?:ROUTER|WORKER|KVSTORE|PLANNER)_\w+)"', text)
    }
    assert names
    check_variables(ALL, dict.fromkeys(names, "1"))


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


def test_a_choice_of_numbers_is_read_from_flags_variables_and_files(tmp_path, monkeypatch):
    assert load_settings(WorkerSettings, [*WORKER, "--block-size", "64"]).block_size == 64
    assert load_settings(WorkerSettings, [*WORKER, *from_yaml(tmp_path, "block_size: 32")]).block_size == 32
    monkeypatch.setenv("TANDEM_WORKER_BLOCK_SIZE", "32")
    assert load_settings(WorkerSettings, WORKER).block_size == 32
    with pytest.raises(ConfigError, match="16, 32 or 64"):
        load_settings(WorkerSettings, [*WORKER, "--block-size", "48"])


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


@pytest.mark.parametrize(
    ("content", "field"),
    [
        (b"log_level: \xff", "config"),
        (b"log_level: 2026-13-45", "config"),
        (b"8000: x", "8000"),
        (b"on: x", "True"),
        (b"_env_prefix: X_", "_env_prefix"),
        (b"_cli_parse_args: x", "_cli_parse_args"),
    ],
)
def test_a_file_of_other_things_than_settings_is_refused(tmp_path, content, field):
    (tmp_path / "file.yaml").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_settings(RouterSettings, ["--config", str(tmp_path / "file.yaml"), "--model", "m"])
    assert caught.value.field == field
