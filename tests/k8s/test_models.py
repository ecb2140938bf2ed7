"""A release of several models on a real API server, without anything that runs: what an upgrade makes and changes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.k8s.api_server import ApiServer
from tests.k8s.programs import ROOT, find

ONE: dict[str, Any] = {"model": {"uri": "hf://org/name", "size": "1Gi"}}
STORY = {"uri": "hf://org/story@v1", "size": "1Gi", "pools": [{"name": "all", "role": "collocated", "replicas": 2}]}
SHARED = {"replicas": 2, "volume": {"enabled": True, "size": "1Gi", "sharedClaim": "blocks"}}


def helm(api_server: ApiServer, folder: Path, namespace: str, command: str, values: dict[str, Any]) -> None:
    """Raises AssertionError with what helm said."""
    (folder / "values.yaml").write_text(yaml.safe_dump(values))
    given = ["--namespace", namespace, "--kubeconfig", api_server.kubeconfig, "--values", folder / "values.yaml"]
    done = subprocess.run(
        [find("helm"), command, "demo", ROOT / "helm" / "tandem", *given],
        env={**os.environ, "HELM_CACHE_HOME": f"{folder}/helm", "HELM_CONFIG_HOME": f"{folder}/helm"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def generations(api_server: ApiServer, namespace: str) -> dict[str, int]:
    """Of each Deployment: how often its specification was changed."""
    items = api_server.request("GET", f"/apis/apps/v1/namespaces/{namespace}/deployments")["items"]
    return {item["metadata"]["name"].removeprefix("demo-"): item["metadata"]["generation"] for item in items}


def test_a_model_comes_and_goes_by_upgrades_that_change_no_other_models_workers(
    api_server: ApiServer, namespace: str, tmp_path: Path
):
    helm(api_server, tmp_path, namespace, "install", ONE)
    before = generations(api_server, namespace)
    assert before == {"prefill": 1, "decode": 1, "router": 1, "redis": 1}
    helm(api_server, tmp_path, namespace, "upgrade", {**ONE, "models": {"story": STORY}})
    assert generations(api_server, namespace) == {**before, "router": 2, "story-all": 1}
    services = api_server.request("GET", f"/api/v1/namespaces/{namespace}/services")["items"]
    peers = {item["metadata"]["name"]: item["spec"] for item in services if item["metadata"]["name"].endswith("peers")}
    assert {name: spec["clusterIP"] for name, spec in peers.items()} == {
        "demo-peers": "None",
        "demo-story-peers": "None",
    }
    deployment = api_server.request("GET", f"/apis/apps/v1/namespaces/{namespace}/deployments/demo-story-all")
    labels = deployment["spec"]["template"]["metadata"]["labels"].items()
    assert [peers[name]["selector"].items() <= labels for name in ("demo-peers", "demo-story-peers")] == [False, True]
    helm(api_server, tmp_path, namespace, "upgrade", ONE)
    assert generations(api_server, namespace) == {**before, "router": 3}


def test_store_nodes_over_one_claim_are_accepted(api_server: ApiServer, namespace: str, tmp_path: Path):
    helm(api_server, tmp_path, namespace, "install", {"kvstore": SHARED})
    made = api_server.request("GET", f"/apis/apps/v1/namespaces/{namespace}/statefulsets/demo-kvstore")["spec"]
    volumes = {each["name"]: each for each in made["template"]["spec"]["volumes"]}
    assert volumes["blocks"]["persistentVolumeClaim"] == {"claimName": "blocks"}
    assert "volumeClaimTemplates" not in made
