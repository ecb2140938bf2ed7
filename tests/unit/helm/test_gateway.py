"""The InferencePool, and the picker that it names."""

from __future__ import annotations

from services.router.settings import RouterSettings
from shared.config import load_settings
from tests.unit.helm.charts import Helm, Manifests

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
