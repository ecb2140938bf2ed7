"""What the rendered Pods, accounts and policies promise."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from services.kvstore.settings import KVStoreSettings
from services.worker.settings import WorkerSettings
from shared.config import load_settings
from shared.seeds import SAMPLER_VERSION
from tests.unit.helm.charts import Helm, Manifest, Manifests

DEFINITION = Path(__file__).resolve().parents[2] / "k8s" / "leader_worker_set.yaml"
MODELS = {
    "/models/m": ("/models/m", None, "m"),
    "pvc://claim/a/b": ("/model", {"persistentVolumeClaim": {"claimName": "claim", "readOnly": True}}, "b"),
    "hf://org/name@v1": ("/model", {"emptyDir": {"sizeLimit": "40Gi"}}, "org/name"),
    "s3://bucket/x/m": ("/model", {"emptyDir": {"sizeLimit": "40Gi"}}, "m"),
    "oci://r.io/org/m:1#/sub": (
        "/model/sub",
        {"image": {"reference": "r.io/org/m:1", "pullPolicy": "IfNotPresent"}},
        "m",
    ),
}


def containers(manifests: Manifests) -> list[tuple[str, Manifest, Manifest]]:
    """(name of the maker, Pod, container), init containers too."""
    return [
        (name, pod["spec"], container)
        for name, pod in manifests.pods.items()
        for container in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"])
    ]


def flags(container: Manifest) -> dict[str, str]:
    return dict(arg.removeprefix("--").split("=", 1) for arg in container["args"] if "=" in arg)


def main_of(manifests: Manifests, name: str) -> Manifest:
    container: Manifest = manifests.pods[name]["spec"]["containers"][0]
    return container


def test_no_container_is_root_or_writes_to_its_image(defaults: Manifests) -> None:
    found = containers(defaults)
    assert {name for name, _, _ in found} == {"router", "prefill", "decode", "kvstore", "redis", "test"}
    for _, pod, container in found:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["enableServiceLinks"] is False
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] is True
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_only_the_router_may_ask_the_api_server_and_for_pods_alone(defaults: Manifests) -> None:
    tokens = {name for name, pod in defaults.pods.items() if pod["spec"]["automountServiceAccountToken"]}
    assert tokens == {"router"}
    (role,) = defaults.of("Role")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]
    assert defaults.of("ClusterRole") == []
    (binding,) = defaults.of("RoleBinding")
    assert [subject["name"] for subject in binding["subjects"]] == ["demo-router"]


def test_every_service_sends_its_spans_where_the_values_say_and_the_router_alone_samples(helm: Helm) -> None:
    url = "http://otel:4317"
    manifests = helm.manifests(values={"traces": {"endpoint": url, "sample": 0.05}})
    for name in ("router", "prefill", "decode", "kvstore"):
        given = flags(main_of(manifests, name))
        assert (given["traces.endpoint"], given["traces.protocol"]) == (url, "auto")
        assert given.get("traces.sample") == ("0.05" if name == "router" else None)


def test_a_grace_period_has_room_for_what_comes_before_the_end(helm: Helm) -> None:
    manifests = helm.manifests(values={"worker": {"drainTimeoutSeconds": 200}, "router": {"drainTimeoutSeconds": 90}})
    for name in ("router", "prefill", "decode"):
        pod = manifests.pods[name]["spec"]
        container = pod["containers"][0]
        (_, before) = container["lifecycle"]["preStop"]["exec"]["command"]
        assert pod["terminationGracePeriodSeconds"] > int(before) + int(flags(container)["drain-timeout-s"])


def test_the_layout_label_names_the_version_of_the_sampler() -> None:
    names = Path(__file__).resolve().parents[3] / "helm" / "tandem" / "templates" / "_names.tpl"
    label = next(line for line in names.read_text().splitlines() if "sha256sum" in line and "tandem.layout" in line)
    assert f'"%s,sampler={SAMPLER_VERSION},%s"' in label


def test_the_router_selects_the_workers_of_its_own_layout_alone(helm: Helm) -> None:
    layouts = set()
    for dtype in ("bf16", "fp16"):
        pools = [{"name": "c", "role": "collocated", "replicas": 1, "dtype": dtype}]
        manifests = helm.manifests(values={"pools": pools})
        labels = manifests.pods["c"]["metadata"]["labels"]
        selector = dict(
            pair.split("=") for pair in flags(main_of(manifests, "router"))["kubernetes.selector"].split(",")
        )
        assert selector.items() <= labels.items()
        layouts.add(selector["tandem-llm.io/layout"])
        assert "tandem-llm.io/layout" not in manifests.one("Deployment", "c")["spec"]["selector"]["matchLabels"]
    assert len(layouts) == 2


def test_a_router_is_replaced_by_a_ready_one_and_a_worker_needs_no_further_gpu(defaults: Manifests) -> None:
    router = defaults.one("Deployment", "router")["spec"]["strategy"]["rollingUpdate"]
    worker = defaults.one("Deployment", "prefill")["spec"]["strategy"]["rollingUpdate"]
    assert (router["maxSurge"], router["maxUnavailable"]) == (1, 0)
    assert (worker["maxSurge"], worker["maxUnavailable"]) == (0, 1)


SERVICES = {"prefill": "prefill", "decode": "decode", "collocated": "decode", "auto": "worker"}


@pytest.mark.parametrize(
    ("roles", "mode"),
    [
        (("prefill", "decode"), "disaggregated"),
        (("collocated",), "collocated"),
        (("prefill", "collocated"), "disaggregated"),
        (("auto",), "auto"),
    ],
)
def test_the_routers_mode_follows_from_the_roles(helm: Helm, roles: tuple[str, ...], mode: str) -> None:
    pools = [{"name": f"a-{role}", "role": role, "replicas": 1} for role in roles]
    manifests = helm.manifests(values={"pools": pools})
    assert flags(main_of(manifests, "router"))["mode"] == mode
    services = [main_of(manifests, f"a-{role}")["command"][-1] for role in roles]
    assert services == [f"services.{SERVICES[role]}" for role in roles]
    assert [manifests.pods[f"a-{role}"]["metadata"]["labels"]["tandem-llm.io/role"] for role in roles] == list(roles)
    config = {name for each in manifests.of("ConfigMap") for name in each["data"]}
    assert ("router.yaml" in config) == (roles == ("prefill", "collocated"))


@pytest.mark.parametrize("uri", MODELS)
def test_a_model_reaches_worker_and_router(helm: Helm, uri: str) -> None:
    folder, volume, served = MODELS[uri]
    fetched = uri.startswith(("hf", "s3"))
    model: dict[str, Any] = {"uri": uri, **({"size": "40Gi", "secret": "s"} if fetched else {})}
    if uri.startswith("s3"):
        model["downloaderImage"] = "aws:1"
    manifests = helm.manifests(values={"model": model})
    assert flags(main_of(manifests, "router"))["served-model-name"] == served
    for name in ("router", "prefill"):
        pod = manifests.pods[name]["spec"]
        assert flags(pod["containers"][0])["model"] == folder
        volumes = {each["name"]: each for each in pod["volumes"]}
        assert (volumes.get("model") is None) == (volume is None)
        if volume is not None:
            assert volume.items() <= volumes["model"].items()
            (mount,) = (each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "model")
            assert mount["readOnly"] is True
            assert mount.get("subPath", "") == ("a/b" if uri.startswith("pvc") else "")
        asked_first = ["peers"] if uri.startswith("s3") and name == "prefill" else []
        names = [*asked_first, *(["model"] if fetched else []), "preflight"]
        assert [each["name"] for each in pod["initContainers"]] == names


HUB = {"uri": "hf://org/name@v1", "size": "40Gi", "secret": "token"}
BUCKET = {"uri": "s3://bucket/m", "size": "40Gi", "downloaderImage": "aws:1"}


def asked_peers(container: Manifest) -> tuple[WorkerSettings, list[str]]:
    """The settings with which an init container asks, and the command behind them."""
    assert container["command"] == ["python", "-m", "services.worker.weights"]
    at = container["args"].index("--")
    given = [filled(text, {}) for text in container["args"][:at] if not text.startswith("--config=")]
    return load_settings(WorkerSettings, given), container["args"][at + 1 :]


def test_a_new_pod_asks_the_workers_of_its_model_and_then_the_hub(helm: Helm) -> None:
    manifests = helm.manifests(values={"model": HUB})
    service = manifests.one("Service", "peers")["spec"]
    assert service["clusterIP"] == "None", "one address for each ready Pod"
    for name in ("prefill", "decode"):
        pod = manifests.pods[name]
        asking, preflight = pod["spec"]["initContainers"]
        settings, download = asked_peers(asking)
        assert settings.weights_from == f"demo-peers.serving.svc:{service['ports'][0]['port']}"
        assert str(settings.model) == "/model"
        assert download[:3] == ["hf", "download", "org/name"]
        assert {"--local-dir=/model", "--revision=v1", "--include=*.safetensors"} <= set(download)
        assert asking["envFrom"] == [{"secretRef": {"name": "token"}}]
        mounts = {each["name"]: each for each in asking["volumeMounts"]}
        assert "readOnly" not in mounts["model"]
        assert mounts.keys() == {each["name"] for each in preflight["volumeMounts"]}
        assert service["selector"].items() <= pod["metadata"]["labels"].items()
        (port,) = (each for each in pod["spec"]["containers"][0]["ports"] if each["name"] == "session")
        assert service["ports"][0]["targetPort"] == port["name"]
        assert "weights-from" not in flags(main_of(manifests, name)), "its folder is there by then"
    texts = manifests.pods["router"]["spec"]["initContainers"][0]
    assert texts["command"][:2] == ["hf", "download"]
    assert "--include=*.safetensors" not in texts["command"], "a router needs no weights"


def test_what_peers_have_not_is_downloaded_from_a_bucket(helm: Helm) -> None:
    asking, download, _ = helm.manifests(values={"model": BUCKET}).pods["decode"]["spec"]["initContainers"]
    settings, command = asked_peers(asking)
    assert settings.weights_from == "demo-peers.serving.svc:50061"
    assert command == ["true"]
    assert download["command"][:4] == ["aws", "s3", "sync", "s3://bucket/m"]
    assert (asking["image"], download["image"]) == ("tandem:0.1.0-cpu", "aws:1")


def test_another_model_comes_from_no_worker_of_the_old_one(helm: Helm) -> None:
    old, new = (
        helm.manifests(values={"model": {**HUB, "uri": f"hf://org/name@{revision}"}}) for revision in ("v1", "v2")
    )
    selected = [each.one("Service", "peers")["spec"]["selector"].items() for each in (old, new)]
    labels = [each.pods["prefill"]["metadata"]["labels"].items() for each in (old, new)]
    assert [selected[i] <= labels[j] for i in (0, 1) for j in (0, 1)] == [True, False, False, True]


@pytest.mark.parametrize("values", [{"uri": "/models/m"}, {"uri": "pvc://c/m"}, {**HUB, "fromPeers": False}])
def test_no_peer_is_asked_for_what_is_there_or_by_ones_own_choice(helm: Helm, values: Mapping[str, Any]) -> None:
    manifests = helm.manifests(values={"model": values})
    assert "demo-peers" not in [each["metadata"]["name"] for each in manifests.of("Service")]
    for _, _, container in containers(manifests):
        assert container.get("command") != ["python", "-m", "services.worker.weights"]


def test_ones_own_peers_are_asked_in_place_of_the_services(helm: Helm) -> None:
    values = {"model": HUB, "worker": {"config": {"weights_from": "elsewhere:50061"}}}
    manifests = helm.manifests(values=values)
    asking = manifests.pods["prefill"]["spec"]["initContainers"][0]
    assert "weights-from" not in flags(asking), "the file says it"
    assert "--config=/etc/tandem/config/pool-prefill.yaml" in asking["args"]
    assert "elsewhere:50061" in manifests.one("ConfigMap", "config")["data"]["pool-prefill.yaml"]


def test_the_preflight_looks_at_what_the_service_starts_with(defaults: Manifests) -> None:
    for name in ("router", "prefill", "kvstore"):
        pod = defaults.pods[name]["spec"]
        preflight = pod["initContainers"][-1]
        split = preflight["args"].index("--")
        assert preflight["args"][split + 1 :] == pod["containers"][0]["args"]
        assert preflight["env"] == pod["containers"][0]["env"]


def test_rdma_brings_the_device_and_the_right_to_pin_memory(helm: Helm) -> None:
    pool = {"name": "c", "role": "collocated", "replicas": 1, "rdma": {"resource": "rdma/hca", "count": 2}}
    container = main_of(helm.manifests(values={"pools": [pool]}), "c")
    assert container["resources"]["limits"] == {"rdma/hca": 2}
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}


def test_a_group_is_one_pod_with_the_resources_of_all_its_ranks(helm: Helm) -> None:
    one = {"requests": {"cpu": "500m", "memory": "4Gi", "hugepages-2Mi": 0}, "limits": {"cpu": 1.5}}
    pool = {"name": "c", "role": "collocated", "replicas": 1, "resources": one}
    group = helm.manifests(values={"pools": [{**pool, "parallelism": {"tensor": 2, "pipeline": 3, "expert": 2}}]})
    pod = group.pods["c"]["spec"]
    for container in (main_of(group, "c"), *(each for each in pod["initContainers"] if each["name"] == "preflight")):
        assert {"--tp=2", "--pp=3", "--ep=2"} <= set(container["args"])
        assert container["resources"] == {
            "requests": {"cpu": "3000m", "memory": "24Gi", "hugepages-2Mi": "0"},
            "limits": {"cpu": "9.000"},
        }
    alone = main_of(helm.manifests(values={"pools": [pool]}), "c")
    assert alone["resources"] == one
    assert not any(argument.startswith(("--tp", "--pp", "--ep")) for argument in alone["args"])


def test_each_rank_of_a_group_has_a_gpu(helm: Helm) -> None:
    pool = {"name": "c", "role": "collocated", "replicas": 1, "parallelism": {"tensor": 2, "pipeline": 2}}
    limits = {"nvidia.com/gpu": 4, "cpu": 2}
    container = main_of(helm.manifests(values={"pools": [{**pool, "resources": {"limits": limits}}]}), "c")
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4, "cpu": "8"}, "cores are a process's own"
    assert {"--device=cuda", "--tp=2", "--pp=2"} <= set(container["args"])


def test_a_pool_without_resources_has_those_of_all_workers_and_their_device(helm: Helm) -> None:
    one = {"name": "c", "role": "auto", "replicas": 1}
    values = {
        "pools": [
            one,
            {**one, "name": "d", "resources": {"limits": {"nvidia.com/gpu": 2}}, "parallelism": {"tensor": 2}},
        ],
        "worker": {"resources": {"limits": {"nvidia.com/gpu": 1}}},
        "models": {"other": {"uri": "pvc://other", "pools": [one]}},
    }
    manifests = helm.manifests(values=values)
    for name, gpus in (("c", 1), ("d", 2), ("other-c", 1)):
        container = main_of(manifests, name)
        assert container["resources"]["limits"]["nvidia.com/gpu"] == gpus
        assert "--device=cuda" in container["args"]
        assert container["image"].endswith("-cuda")


def test_what_a_pool_sets_holds_where_it_is_nothing_too(helm: Helm) -> None:
    pool = {"name": "c", "role": "auto", "replicas": 1}
    worker = {
        "config": {"deterministic": True},
        "podLabels": {"team": "a"},
        "ucx": {"UCX_TLS": "rc", "UCX_NET_DEVICES": "x"},
    }
    empty = {"config": {"deterministic": False}, "podLabels": {"team": ""}, "ucx": {"UCX_TLS": ""}}
    with_all, with_none = (helm.manifests(values={"pools": [{**pool, **own}], "worker": worker}) for own in ({}, empty))
    unset = helm.manifests(values={"pools": [pool]})
    layouts = [found.pods["c"]["metadata"]["labels"]["tandem-llm.io/layout"] for found in (with_all, with_none, unset)]
    assert layouts[0] != layouts[1] == layouts[2]
    assert with_none.pods["c"]["metadata"]["labels"]["team"] == ""
    env = {entry["name"]: entry.get("value") for entry in main_of(with_none, "c")["env"]}
    assert (env["UCX_TLS"], env["UCX_NET_DEVICES"]) == ("", "x")


def test_prometheus_finds_the_planner_where_there_is_one(helm: Helm) -> None:
    for enabled in (False, True):
        values = {"planner": {"enabled": enabled}, "metrics": {"podMonitor": {"enabled": True}}}
        monitors = [manifest["metadata"]["name"] for manifest in helm.manifests(values=values).of("PodMonitor")]
        assert monitors == ["demo-worker", "demo-kvstore", *(["demo-planner"] if enabled else [])]


def test_a_group_over_nodes_fits_the_kinds_definition_and_its_pods_are_pods(helm: Helm) -> None:
    pool = {"name": "c", "role": "collocated", "replicas": 3, "devicesPerNode": 4, "parallelism": {"tensor": 8}}
    made = helm.manifests(values={"pools": [pool]}).one("LeaderWorkerSet", "c")
    (version,) = yaml.safe_load(DEFINITION.read_text())["spec"]["versions"]
    schema = strict(version["schema"]["openAPIV3Schema"])
    jsonschema.validate(made["spec"], schema["properties"]["spec"])
    group = made["spec"]["leaderWorkerTemplate"]
    for field, wrong in (("restartPolicy", "Never"), ("sizes", 2), ("size", 0)):
        bad = {**made["spec"], "leaderWorkerTemplate": {**group, field: wrong}}
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, schema["properties"]["spec"])
    for name in ("leaderTemplate", "workerTemplate"):
        pod = {"apiVersion": "v1", "kind": "Pod", **group[name]}
        pod["metadata"] = {**pod["metadata"], "name": "one"}
        kubernetes_validate.validate(pod, "1.34", strict=True)


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """The same, with unknown fields refused wherever fields are named."""
    fields = {name: strict(part) for name, part in schema.get("properties", {}).items()}
    return {**schema, **({"properties": fields, "additionalProperties": False} if fields else {})}


def test_a_group_over_nodes_is_a_set_of_a_leader_and_ranks_that_come_to_it(helm: Helm) -> None:
    one = {"requests": {"cpu": "500m", "memory": "4Gi"}}
    pool = {"name": "c", "role": "collocated", "replicas": 3, "resources": one, "devicesPerNode": 4}
    within = helm.manifests(values={"pools": [{**pool, "parallelism": {"tensor": 4}}]})
    assert within.one("Deployment", "c")
    assert not within.of("LeaderWorkerSet")
    assert not any(name.startswith("group-") for name in flags(main_of(within, "c")))
    over = helm.manifests(values={"pools": [{**pool, "parallelism": {"tensor": 4, "pipeline": 2}}]})
    made = over.one("LeaderWorkerSet", "c")["spec"]
    group = made["leaderWorkerTemplate"]
    assert (made["replicas"], group["size"], group["restartPolicy"]) == (3, 2, "RecreateGroupOnPodRestart")
    assert made["startupPolicy"] == "LeaderCreated", "a leader is ready when the others have come"
    assert "c" not in over.pods, "no Deployment"
    leader, rank = group["leaderTemplate"], group["workerTemplate"]
    found_by = over.one("PodDisruptionBudget", "c")["spec"]["selector"]["matchLabels"].items()
    assert found_by <= leader["metadata"]["labels"].items()
    assert not found_by <= rank["metadata"]["labels"].items(), "a rank is no worker for routers"
    for pod, index in ((leader, 0), (rank, 1)):
        (container,) = pod["spec"]["containers"]
        assert container["resources"]["requests"] == {"cpu": "2000m", "memory": "16Gi"}, "of the four ranks of a Node"
        assert ("readinessProbe" in container) == (pod is leader)
        # As the kubelet and the set's controller fill them in.
        known = {"LWS_LEADER_ADDRESS": "demo-c-0.demo-c.serving", "LWS_WORKER_INDEX": str(index), "POD_IP": "10.0.0.7"}
        settings = load_settings(WorkerSettings, [filled(text, known) for text in container["args"]])
        assert (settings.group_hosts, settings.group_host_index, settings.group_address) == (2, index, "10.0.0.7")
        assert settings.group_leader == "demo-c-0.demo-c.serving:50062"
        assert {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}} in container["env"]
        (preflight,) = pod["spec"]["initContainers"]
        assert not any("LWS_" in text for text in preflight["args"]), "it has not met the others"
        looked_at = load_settings(WorkerSettings, preflight["args"][preflight["args"].index("--") + 1 :])
        assert looked_at.group_hosts == 2, "a Node's memory is for its part of the weights"
    (port,) = [each for each in leader["spec"]["containers"][0]["ports"] if each["name"] == "group"]
    assert port["containerPort"] == 50062


def filled(text: str, variables: Mapping[str, str]) -> str:
    """As Kubernetes fills in $(NAME)."""
    return re.sub(r"\$\((\w+)\)", lambda name: variables.get(name[1], "x"), text)


def test_only_a_groups_own_pods_reach_its_ranks(helm: Helm) -> None:
    pool = {"name": "c", "role": "collocated", "replicas": 1, "devicesPerNode": 1, "parallelism": {"pipeline": 2}}
    made = helm.manifests(values={"networkPolicy": {"enabled": True, "egress": True}, "pools": [pool]})

    def components(rule: dict[str, Any], side: str) -> set[str]:
        return {peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in rule.get(side, ())}

    rank, worker = (made.one("NetworkPolicy", name)["spec"] for name in ("rank", "worker"))
    (inward,) = rank["ingress"]
    assert components(inward, "from") == {"worker", "rank"}
    assert "ports" not in inward, "they choose their ports"
    assert any({"worker", "rank"} <= components(rule, "to") for rule in rank["egress"])
    assert any("rank" in components(rule, "from") and "ports" not in rule for rule in worker["ingress"])
    assert any("rank" in components(rule, "to") for rule in worker["egress"])
    alone = helm.manifests(values={"networkPolicy": {"enabled": True}, "pools": [{**pool, "devicesPerNode": 2}]})
    assert not any("rank" in str(policy["spec"]) for policy in alone.of("NetworkPolicy"))


def test_store_nodes_have_names_that_stay(helm: Helm) -> None:
    manifests = helm.manifests(values={"kvstore": {"replicas": 2, "hostMemory": "1Gi"}})
    names = ("demo-kvstore-0", "demo-kvstore-1")
    nodes = ",".join(f"{name}={name}.demo-kvstore-nodes.serving.svc:50070" for name in names)
    assert flags(main_of(manifests, "prefill"))["store"] == nodes
    assert flags(main_of(manifests, "router"))["stores"] == nodes
    assert flags(main_of(manifests, "kvstore"))["host-bytes"] == str(1 << 30)


def test_store_nodes_have_a_volume_each_or_one_claim_together(helm: Helm) -> None:
    own, shared = (
        helm.manifests(values={"kvstore": {"replicas": 2, "volume": {"enabled": True, "size": "10Gi", **more}}})
        for more in ({}, {"sharedClaim": "nfs"})
    )
    assert [each["metadata"]["name"] for each in own.one("StatefulSet", "kvstore")["spec"]["volumeClaimTemplates"]] == [
        "blocks"
    ]
    assert "volumeClaimTemplates" not in shared.one("StatefulSet", "kvstore")["spec"]
    (volume,) = (each for each in shared.pods["kvstore"]["spec"]["volumes"] if each["name"] == "blocks")
    assert volume["persistentVolumeClaim"] == {"claimName": "nfs"}
    settings = []
    for manifests in (own, shared):
        container = main_of(manifests, "kvstore")
        settings.append(
            load_settings(KVStoreSettings, [filled(text, {"POD_NAME": "n-0"}) for text in container["args"]])
        )
        (mount,) = (each for each in container["volumeMounts"] if each["name"] == "blocks")
        assert str(settings[-1].disk_folder).startswith(mount["mountPath"])
    assert [each.disk_shared for each in settings] == [False, True]
    assert {(each.name, each.disk_bytes) for each in settings} == {("n-0", 9 << 30)}


def test_redis_is_reached_by_the_store_alone(defaults: Manifests) -> None:
    policy = defaults.one("NetworkPolicy", "redis")["spec"]
    (rule,) = policy["ingress"]
    (peer,) = rule["from"]
    assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "kvstore"


def test_secrets_come_by_reference(helm: Helm) -> None:
    manifests = helm.manifests(
        values={
            "redis": {"enabled": False, "external": {"existingSecret": "r", "caSecret": "ca"}},
            "fleetKey": {"existingSecret": "f"},
            "apiKeys": {"existingSecret": "k"},
        }
    )
    found = {
        (name, variable["name"]): variable["valueFrom"]["secretKeyRef"]
        for name in ("router", "prefill", "kvstore")
        for variable in main_of(manifests, name)["env"]
        if "secretKeyRef" in variable.get("valueFrom", {})
    }
    assert found == {
        ("router", "TANDEM_ROUTER_FLEET_KEY"): {"name": "f", "key": "fleet-key"},
        ("router", "TANDEM_ROUTER_EDGE__API_KEYS"): {"name": "k", "key": "api-keys"},
        ("prefill", "TANDEM_WORKER_FLEET_KEY"): {"name": "f", "key": "fleet-key"},
        ("kvstore", "TANDEM_KVSTORE_FLEET_KEY"): {"name": "f", "key": "fleet-key"},
        ("kvstore", "TANDEM_KVSTORE_REDIS_URL"): {"name": "r", "key": "url"},
    }
    assert manifests.of("Secret") == []


@pytest.mark.parametrize(
    ("given", "key"), [({}, "password"), ({"existingSecretKey": "redis-password"}, "redis-password")]
)
def test_an_address_of_redis_and_a_secret_with_its_password(helm: Helm, given: dict[str, str], key: str) -> None:
    external = {"url": "redis://user@r:6380/1", "existingSecret": "s", **given}
    pod = helm.manifests(values={"redis": {"enabled": False, "external": external}}).pods["kvstore"]["spec"]
    for container in (*pod["initContainers"], *pod["containers"]):
        variables = {each["name"]: each for each in container["env"]}
        assert variables["TANDEM_KVSTORE_REDIS_URL"]["value"] == "redis://user@r:6380/1"
        assert variables["TANDEM_KVSTORE_REDIS_PASSWORD"]["valueFrom"] == {"secretKeyRef": {"name": "s", "key": key}}


def test_a_planner_knows_the_authority_of_routers_with_tls_and_not_their_key(helm: Helm) -> None:
    values = {"planner": {"enabled": True}, "tls": {"edge": {"existingSecret": "edge"}}}
    pod = helm.manifests(values=values).pods["planner"]["spec"]
    given = flags(pod["containers"][0])
    assert given["router-tls.server-name"] == "demo-router.serving.svc"
    (mount,) = (each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "edge-tls")
    assert given["router-tls.ca"] == f"{mount['mountPath']}/ca.crt"
    (volume,) = (each for each in pod["volumes"] if each["name"] == "edge-tls")
    assert volume["secret"] == {"secretName": "edge", "items": [{"key": "ca.crt", "path": "ca.crt"}]}
    plain = helm.manifests(values={"planner": {"enabled": True}}).pods["planner"]["spec"]
    assert [each["name"] for each in plain["volumes"]] == ["tmp"]
    assert not [flag for flag in flags(plain["containers"][0]) if flag.startswith("router-tls")]


def test_a_planner_of_an_elastic_pool_may_scale_that_pool_alone(helm: Helm) -> None:
    pools = [{"name": name, "role": "auto", "replicas": 3} for name in ("pool", "other")]
    values = {"pools": pools, "planner": {"enabled": True, "auto": {"pool": "pool", "maxWorkers": 6}}}
    manifests = helm.manifests(values=values)
    given = flags(main_of(manifests, "planner"))
    assert (given["auto.name"], given["auto.min-workers"], given["auto.max-workers"]) == ("pool", "1", "6")
    assert not [flag for flag in given if flag.startswith(("prefill.", "decode."))]
    scaled = [rule for rule in manifests.one("Role", "planner")["rules"] if rule["resources"] == ["deployments/scale"]]
    assert scaled[0]["resourceNames"] == ["demo-pool"]
    assert "replicas" not in manifests.one("Deployment", "pool")["spec"]
    assert manifests.one("Deployment", "other")["spec"]["replicas"] == 3
