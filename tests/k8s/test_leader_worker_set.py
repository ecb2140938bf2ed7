"""What the chart renders for a worker over several Nodes is what a real API server takes as one."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import yaml

from tests.k8s.api_server import ApiServer
from tests.unit.helm.charts import Manifest, find_helm
from tests.waiting import DEADLINE_S

pytestmark = pytest.mark.slow

CRD = Path(__file__).with_name("leader_worker_set.yaml")
GROUP: Mapping[str, Any] = {
    "name": "c", "role": "collocated", "replicas": 2, "parallelism": {"tensor": 8}, "devicesPerNode": 4,
    "resources": {"requests": {"cpu": 2, "memory": "4Gi"}},
}  # fmt: skip
STRICT = "fieldValidation=Strict"
STRICT_SINCE = 25


@pytest.fixture(scope="module")
def definition(api_server: ApiServer) -> str:
    """The path below which sets are made, once the server serves it."""
    made = yaml.safe_load(CRD.read_text())
    kinds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    api_server.request("POST", kinds, made)
    end = time.monotonic() + DEADLINE_S
    while True:
        status = api_server.request("GET", f"{kinds}/{made['metadata']['name']}").get("status", {})
        if ("Established", "True") in [(each["type"], each["status"]) for each in status.get("conditions") or ()]:
            return "/apis/leaderworkerset.x-k8s.io/v1/namespaces"
        assert time.monotonic() < end, status
        time.sleep(0.05)


@pytest.fixture(scope="module")
def rendered() -> Manifest:
    """Of a group of eight ranks on Nodes of four."""
    return find_helm().manifests(values={"pools": [GROUP]}).one("LeaderWorkerSet", "c")


def test_the_server_takes_the_set_strictly(
    api_server: ApiServer, definition: str, namespace: str, rendered: Manifest
) -> None:
    """The definition is installed in any case. Servers from before strict validation are not asked for more."""
    if int(api_server.request("GET", "/version")["minor"].rstrip("+")) < STRICT_SINCE:
        pytest.skip(f"this server is older than 1.{STRICT_SINCE}, the first with strict validation")
    mine = {**rendered, "metadata": {**rendered["metadata"], "namespace": namespace}}
    path = f"{definition}/{namespace}/leaderworkersets?{STRICT}"
    made = api_server.request("POST", path, mine)
    assert made["spec"] == rendered["spec"]
    for field, wrong in (("restartPolicy", "Never"), ("sizes", 2)):
        template = {**mine["spec"]["leaderWorkerTemplate"], field: wrong}
        bad = {**mine, "spec": {**mine["spec"], "leaderWorkerTemplate": template}}
        with pytest.raises(HTTPError) as refused:
            api_server.request("POST", path, bad)
        assert field in json.load(refused.value)["message"]


@pytest.mark.parametrize("template", ["leaderTemplate", "workerTemplate"])
def test_the_server_takes_its_pods(api_server: ApiServer, namespace: str, rendered: Manifest, template: str) -> None:
    pod = rendered["spec"]["leaderWorkerTemplate"][template]
    account = {"metadata": {"name": pod["spec"]["serviceAccountName"]}}
    api_server.request("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts", account)
    made = {"apiVersion": "v1", "kind": "Pod", **pod, "metadata": {**pod["metadata"], "name": "one"}}
    path = f"/api/v1/namespaces/{namespace}/pods?dryRun=All&{STRICT}"
    assert api_server.request("POST", path, made)["metadata"]["name"] == "one"
