"""Every example installs on every Kubernetes that its users run, and says what a reader of it expects."""

from __future__ import annotations

from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils

from tests.unit.helm.charts import CHART, EXAMPLES, Helm, Manifests


def _parts(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


VERSIONS = sorted({".".join(version.split(".")[:2]) for version in utils.all_versions()}, key=_parts)
VERSIONS = VERSIONS[VERSIONS.index("1.29") :]
FOREIGN = ("monitoring.coreos.com/", "gateway.networking.k8s.io/", "inference.networking.k8s.io/")
"""APIs of other projects: no schema of theirs comes with Kubernetes."""

EVERYTHING = {
    "model": {"uri": "hf://org/name@v1", "size": "40Gi", "secret": "hub", "storageClassName": "fast"},
    "pools": [
        {
            "name": "a",
            "role": "prefill",
            "replicas": 2,
            "parallelism": {"tensor": 2},
            "dra": {"deviceClassName": "gpu.nvidia.com", "selector": "true"},
        },
        {
            "name": "b",
            "role": "decode",
            "replicas": 2,
            "rdma": {"resource": "rdma/hca", "count": 2},
            "resources": {"limits": {"nvidia.com/gpu": 1}},
            "topology": {"zone": "z", "rack": "r", "nvlinkDomain": "d1"},
            "config": {"max_num_seqs": 8},
            "env": [{"name": "A", "value": "b"}],
        },
    ],
    "router": {"autoscaling": {"enabled": True}, "config": {"placement": {"topology": 0.5}}},
    "kvstore": {"replicas": 2, "hostMemory": "1Gi", "volume": {"enabled": True}, "config": {"pin_share": 0.1}},
    "networkPolicy": {"egress": True, "clients": [{"podSelector": {}}], "monitoring": [{"podSelector": {}}]},
    "tls": {"edge": {"existingSecret": "edge"}, "services": {"existingSecret": "mutual"}},
    "apiKeys": {"existingSecret": "keys", "adminKey": "admin", "testKey": "test"},
    "fleetKey": {"existingSecret": "fleet"},
    "gateway": {"enabled": True, "httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}]}},
    "metrics": {"serviceMonitor": {"enabled": True}, "podMonitor": {"enabled": True}, "dashboard": {"enabled": True}},
}
"""All that can be switched on at once."""


def check(manifests: Manifests, version: str) -> None:
    for manifest in manifests:
        if not manifest["apiVersion"].startswith(FOREIGN):
            kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_has_no_lint(helm: Helm, example: Path) -> None:
    assert "0 chart(s) failed" in helm.lint(example)


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.parametrize("version", VERSIONS)
def test_an_example_is_valid_on_every_kubernetes(helm: Helm, example: Path, version: str) -> None:
    check(helm.manifests(example, kubernetes=f"{version}.0"), version)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_leaves_ucx_a_way_to_every_worker(helm: Helm, example: Path) -> None:
    """Without TCP workers that RDMA does not join cannot exchange blocks; no transport for CUDA is used by default."""
    for pod in helm.manifests(example).pods.values():
        for container in pod["spec"]["containers"]:
            given = {one["name"]: one.get("value", "") for one in container.get("env") or ()}
            transports = given.get("UCX_TLS", "tcp,sm,self").split(",")
            assert {"tcp", "sm", "self"} <= set(transports)
            assert not [name for name in transports if name.startswith("cuda")]
            assert "eth0" in given.get("UCX_NET_DEVICES", "eth0").split(",")


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_the_defaults_are_valid_on_every_kubernetes(helm: Helm, version: str) -> None:
    check(helm.manifests(kubernetes=f"{version}.0"), version)


@pytest.mark.slow
def test_all_that_can_be_switched_on_is_valid(helm: Helm) -> None:
    manifests = helm.manifests(values=EVERYTHING, kubernetes="1.34.0")
    check(manifests, "1.34")
    kinds = {manifest["kind"] for manifest in manifests}
    assert {"ResourceClaimTemplate", "HorizontalPodAutoscaler", "ServiceMonitor", "PodMonitor", "ConfigMap"} <= kinds


def test_a_cluster_of_long_ago_gets_the_versions_that_it_has(helm: Helm) -> None:
    manifests = helm.manifests(values={"router": {"autoscaling": {"enabled": True}}}, kubernetes="1.20.2")
    assert manifests.of("HorizontalPodAutoscaler")[0]["apiVersion"] == "autoscaling/v2beta2"
    assert {each["apiVersion"] for each in manifests.of("PodDisruptionBudget")} == {"policy/v1beta1"}


def test_the_examples_are_there_and_explained() -> None:
    names = [path.stem for path in EXAMPLES]
    assert names == ["elastic", "h100-prefill-h200-decode-rdma", "h200-single-node", "laptop", "mixed-vendor"]
    readme = (CHART / "README.md").read_text()
    assert [name for name in names if name not in readme] == []


def test_the_laptop_asks_for_no_gpu(helm: Helm) -> None:
    laptop = next(path for path in EXAMPLES if path.stem == "laptop")
    assert "gpu" not in helm.render(laptop).replace("gpu_memory", "")
    assert all(pool["replicas"] == 1 for pool in yaml.safe_load(laptop.read_text())["pools"])
