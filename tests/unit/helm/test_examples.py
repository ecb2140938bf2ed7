"""The chart's examples, values and gateway."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils

from services.router.settings import RouterSettings
from shared.config import load_settings
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


ROOT = CHART.parents[1]


@pytest.mark.slow
def test_the_schema_has_the_settings_of_the_services() -> None:
    done = subprocess.run(
        [sys.executable, ".ci/chart_schema.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""


def test_every_value_is_explained() -> None:
    readme = (CHART / "README.md").read_text()
    schema = json.loads((CHART / "values.schema.json").read_text())
    pool = schema["definitions"]["pool"]["properties"]
    top = schema["properties"]
    missing = [
        name
        for properties in (pool, top)
        for name, part in properties.items()
        if not part.get("description", "").startswith("Moved")
        and f"`{name}" not in readme
        and f".{name}`" not in readme
    ]
    assert missing == []


GATEWAY = {"gateway": {"enabled": True, "maxEndpoints": 2, "from": [{"podSelector": {"matchLabels": {"app": "gw"}}}]}}


def test_without_it_there_is_no_trace_of_it(defaults: Manifests) -> None:
    assert not defaults.of("InferencePool")
    assert not defaults.of("HTTPRoute")
    args = defaults.pods["router"]["spec"]["containers"][0]["args"]
    assert not any("picker" in arg for arg in args)


def test_the_pool_is_the_routers_and_its_picker_is_theirs(helm: Helm) -> None:
    manifests = helm.manifests(values=GATEWAY)
    [pool] = manifests.of("InferencePool")
    router = manifests.pods["router"]
    labels, container = router["metadata"]["labels"], router["spec"]["containers"][0]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert pool["spec"]["targetPorts"] == [{"number": ports["http"]}]
    reference = pool["spec"]["endpointPickerRef"]
    picker = manifests.one("Service", "picker")
    assert reference["name"] == picker["metadata"]["name"]
    assert reference["port"]["number"] == picker["spec"]["ports"][0]["port"]
    assert picker["spec"]["selector"].items() <= labels.items()


def test_the_routers_settings_are_those_that_the_chart_means(helm: Helm) -> None:
    manifests = helm.manifests(values=GATEWAY)
    spec = manifests.pods["router"]["spec"]
    for container in (*spec["initContainers"], *spec["containers"]):
        args = [arg for arg in container["args"] if arg.startswith("--picker.")]
        settings = load_settings(RouterSettings, ["--model", "/m", *args]).picker
        assert settings.bind == "0.0.0.0:9002"
        assert settings.endpoints == "demo-router-pods.serving.svc:8000"
        assert (settings.max_endpoints, settings.self_signed) == (2, True)
    assert manifests.one("Service", "router-pods")["spec"]["clusterIP"] == "None"


def test_the_picker_may_be_plain(helm: Helm) -> None:
    values = {"gateway": {"enabled": True, "tls": "plain"}}
    args = helm.manifests(values=values).pods["router"]["spec"]["containers"][0]["args"]
    assert not any("self-signed" in arg for arg in args)


def test_gateways_reach_the_picker_and_pickers_all_routers(helm: Helm) -> None:
    policy = helm.manifests(values=GATEWAY).one("NetworkPolicy", "picker")
    [to_picker, to_http] = policy["spec"]["ingress"]
    assert to_picker["ports"] == [{"port": 9002, "protocol": "TCP"}]
    assert to_picker["from"] == GATEWAY["gateway"]["from"]
    assert to_http["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "router"
