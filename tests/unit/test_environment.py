"""Variables that are no setting are refused by name, with the nearest that is one."""

from __future__ import annotations

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
