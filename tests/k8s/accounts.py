"""The chart's ServiceAccounts and what they may do, without anything that runs."""

from __future__ import annotations

import json
from typing import Any

from tests.k8s.api_server import ApiServer
from tests.unit.helm.charts import find_helm

RENDERED_FOR = "serving"
"""The namespace that `Helm.render` names."""
VALUES = {"planner": {"enabled": True}, "gateway": {"enabled": True}}
PATHS = {
    "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/rolebindings",
}

Rights = list[tuple[str, str, str, tuple[str, ...]]]
"""(API group, resource, verb, names; () for all)."""


def create_accounts(api: ApiServer, namespace: str) -> None:
    """Creates the accounts and roles of the release `demo` with planner and gateway, and nothing else of it."""
    manifests = [each for each in find_helm().manifests(values=VALUES) if each["kind"] in PATHS]
    for manifest in json.loads(json.dumps(manifests).replace(f'"{RENDERED_FOR}"', f'"{namespace}"')):
        api.request("POST", PATHS[manifest["kind"]].format(namespace), manifest)


def planner_rules() -> list[dict[str, Any]]:
    """What the chart grants the planner of the release `demo`."""
    rules: list[dict[str, Any]] = find_helm().manifests(values=VALUES).one("Role", "planner")["rules"]
    return rules


def rights(api: ApiServer, namespace: str, account: str) -> Rights:
    """What the account may do there, beyond asking who it is and what it may do."""
    body = {"apiVersion": "authorization.k8s.io/v1", "spec": {"namespace": namespace}}
    token = api.token_for(namespace, account)
    review = api.request("POST", "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", body, token=token)
    assert not review["status"]["incomplete"]
    return sorted(
        (group, resource, verb, tuple(rule.get("resourceNames") or ()))
        for rule in review["status"]["resourceRules"]
        for group in rule["apiGroups"]
        if group not in ("authorization.k8s.io", "authentication.k8s.io")
        for resource in rule["resources"]
        for verb in rule["verbs"]
    )
