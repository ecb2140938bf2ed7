"""The chart's ServiceAccounts suffice for what their services ask, with planner and gateway, and grant nothing more."""

from __future__ import annotations

import secrets

import pytest

from tests.k8s.accounts import Rights, create_accounts, rights
from tests.k8s.api_server import ApiServer

pytestmark = pytest.mark.slow

POOLS = ("demo-decode", "demo-prefill")
PICKER_AND_ROUTER: Rights = [("", "pods", "list", ()), ("", "pods", "watch", ())]
"""A router is its own endpoint picker, which finds the other routers by DNS: a gateway adds no right."""
EXPECTED: dict[str, Rights] = {
    "router": PICKER_AND_ROUTER,
    "worker": [],
    "kvstore": [],
    "redis": [],
    "planner": [
        ("", "events", "create", ()),
        ("", "pods", "list", ()),
        ("", "pods", "patch", ()),
        ("apps", "deployments/scale", "get", POOLS),
        ("apps", "deployments/scale", "patch", POOLS),
        ("coordination.k8s.io", "leases", "create", ()),
        ("coordination.k8s.io", "leases", "get", ("demo-planner",)),
        ("coordination.k8s.io", "leases", "update", ("demo-planner",)),
    ],
}


@pytest.fixture(scope="module")
def release(api_server: ApiServer) -> str:
    """A namespace with the release's accounts."""
    namespace = f"accounts-{secrets.token_hex(4)}"
    api_server.request("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
    create_accounts(api_server, namespace)
    return namespace


@pytest.mark.parametrize("component", EXPECTED)
def test_an_account_may_do_this_and_nothing_else(api_server: ApiServer, release: str, component: str):
    found = [(*right, tuple(sorted(names))) for *right, names in rights(api_server, release, f"demo-{component}")]
    assert found == EXPECTED[component]
