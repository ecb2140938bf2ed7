"""Several models in one release: workers of their own behind the same routers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from services.router.settings import RouterSettings
from services.worker.settings import WorkerSettings
from shared.config import load_settings
from tests.unit.helm.charts import Helm, Manifest, Manifests, Refused

STORY = {
    "uri": "hf://org/name@v1",
    "size": "1Gi",
    "pools": [{"name": "all", "role": "auto", "replicas": 2, "dtype": "fp16"}],
}
OTHER = {
    "uri": "pvc://claim/x",
    "servedName": "Org/Other",
    "pools": [
        {"name": "prefill", "role": "prefill", "replicas": 1, "config": {"max_model_len": 512}},
        {"name": "decode", "role": "decode", "replicas": 3},
    ],
}
TWO_MORE = {"models": {"story": STORY, "other": OTHER}}


@pytest.fixture(scope="module")
def manifests(helm: Helm) -> Manifests:
    return helm.manifests(values=TWO_MORE)


def settings_of(manifests: Manifests, tmp_path: Any, name: str, kind: Any) -> Any:
    """Those with which a Pod's service starts, its file included."""
    (container,) = manifests.pods[name]["spec"]["containers"]
    given = []
    for text in container["args"]:
        if text.startswith("--config="):
            file = tmp_path / text.rpartition("/")[2]
            file.write_text(manifests.one("ConfigMap", "config")["data"][file.name])
            text = f"--config={file}"
        given.append(text.replace("$(POD_NAME)", "x").replace("$(POD_NAMESPACE)", "serving"))
    return load_settings(kind, given)


def labels(pod: Manifest) -> Mapping[str, str]:
    found: Mapping[str, str] = pod["metadata"]["labels"]
    return found


def selects(selector: str, pod: Manifest) -> bool:
    return dict(pair.split("=") for pair in selector.split(",")).items() <= labels(pod).items()


def test_the_router_has_a_stack_for_each_model_with_its_own_workers(manifests: Manifests, tmp_path: Any) -> None:
    router = settings_of(manifests, tmp_path, "router", RouterSettings)
    first, *more = router.each_model()
    assert (first.model_name, first.mode) == ("demo", "disaggregated")
    assert {each.model_name: (each.mode, str(each.model)) for each in more} == {
        "story": ("auto", "/model-story"),
        "Org/Other": ("disaggregated", "/model-other"),
    }
    workers = {name: pod for name, pod in manifests.pods.items() if "tandem-llm.io/role" in labels(pod)}
    own = {"demo": {"prefill", "decode"}, "story": {"story-all"}, "Org/Other": {"other-prefill", "other-decode"}}
    for each in (first, *more):
        assert {name for name, pod in workers.items() if selects(each.kubernetes.selector, pod)} == own[each.model_name]


def test_each_model_is_where_its_workers_and_the_router_look_for_it(manifests: Manifests, tmp_path: Any) -> None:
    for pool, key in (("story-all", "story"), ("other-decode", "other")):
        worker = settings_of(manifests, tmp_path, pool, WorkerSettings)
        assert str(worker.model) == f"/model-{key}"
        for pod in (manifests.pods[pool], manifests.pods["router"]):
            (mount,) = (each for each in pod["spec"]["containers"][0]["volumeMounts"] if each["name"] == f"model-{key}")
            assert (mount["mountPath"], mount["readOnly"]) == (f"/model-{key}", True)
            assert f"model-{key}" in {each["name"] for each in pod["spec"]["volumes"]}
        others = {"story": "model-other", "other": "model-story"}
        assert others[key] not in {each["name"] for each in manifests.pods[pool]["spec"]["volumes"]}
    assert settings_of(manifests, tmp_path, "other-prefill", WorkerSettings).max_model_len == 512
    assert settings_of(manifests, tmp_path, "story-all", WorkerSettings).dtype == "fp16"
    downloads = [each for each in manifests.pods["router"]["spec"]["initContainers"] if each["name"] == "model-story"]
    assert [each["command"][:4] for each in downloads] == [["hf", "download", "org/name", "--local-dir=/model-story"]]


def test_what_stands_for_each_pool_stands_for_those_of_all_models(manifests: Manifests) -> None:
    budgets = {each["metadata"]["name"] for each in manifests.of("PodDisruptionBudget")}
    for pool, replicas in (("story-all", 2), ("other-prefill", 1), ("other-decode", 3)):
        deployment = manifests.one("Deployment", pool)["spec"]
        assert deployment["replicas"] == replicas
        assert deployment["selector"]["matchLabels"].items() <= labels(manifests.pods[pool]).items()
        assert f"demo-{pool}" in budgets
    peers = manifests.one("Service", "story-peers")["spec"]["selector"].items()
    assert [name for name, pod in manifests.pods.items() if peers <= labels(pod).items()] == ["story-all"]
    near = manifests.pods["other-decode"]["spec"]["affinity"]["podAffinity"]
    (term,) = near["preferredDuringSchedulingIgnoredDuringExecution"]
    (own,) = term["podAffinityTerm"]["labelSelector"]["matchExpressions"]
    assert own["values"] == ["other-prefill", "other-decode"], "near prefill workers of its own model"


def test_helm_test_asks_every_model(manifests: Manifests) -> None:
    variables = {each["name"]: each.get("value") for each in manifests.pods["test"]["spec"]["containers"][0]["env"]}
    assert sorted(json.loads(variables["TANDEM_MODELS"])) == ["Org/Other", "demo", "story"]


def test_two_names_of_one_folder_have_workers_of_their_own(helm: Helm, tmp_path: Any) -> None:
    pools = [{"name": name, "role": name, "replicas": 1} for name in ("prefill", "decode")]
    manifests = helm.manifests(values={"models": {"again": {"uri": "/opt/tandem/models/demo", "pools": pools}}})
    first, again = settings_of(manifests, tmp_path, "router", RouterSettings).each_model()
    assert not selects(first.kubernetes.selector, manifests.pods["again-decode"])
    assert not selects(again.kubernetes.selector, manifests.pods["decode"])


@pytest.mark.parametrize("shares", [False, True])
def test_a_further_model_uses_the_store_nodes_where_it_says_so(helm: Helm, tmp_path: Any, shares: bool) -> None:
    values = {"kvstore": {"hostMemory": "1Gi"}, "models": {"story": {**STORY, "sharesStore": shares}}}
    manifests = helm.manifests(values=values)
    first, story = settings_of(manifests, tmp_path, "router", RouterSettings).each_model()
    assert first.stores
    worker = settings_of(manifests, tmp_path, "story-all", WorkerSettings)
    assert (story.stores, worker.store) == ((first.stores, first.stores) if shares else ("", ""))


def test_ones_own_settings_of_a_further_model_stay(helm: Helm, tmp_path: Any) -> None:
    values = {**TWO_MORE, "router": {"config": {"models": {"story": {"aliases": ["tale"]}}}}}
    (_, *more) = settings_of(helm.manifests(values=values), tmp_path, "router", RouterSettings).each_model()
    assert [each.aliases for each in more if each.model_name == "story"] == [("tale",)]


def test_without_further_models_nothing_speaks_of_them(defaults: Manifests) -> None:
    assert defaults.of("Service")
    assert not [
        each
        for each in defaults.of("ConfigMap")
        if "models:" in yaml.safe_dump(each["data"]) and each["metadata"]["name"] == "demo-config"
    ]
    assert "matchExpressions" not in str(defaults.pods["decode"]["spec"]["affinity"])


REFUSED: Mapping[str, tuple[Mapping[str, Any], tuple[str, ...]]] = {
    "a-typo": ({"story": {**STORY, "pool": []}}, ("models.story", "pool")),
    "no-pools": ({"story": {"uri": "/m"}}, ("models.story", "pools")),
    "a-key-that-is-no-name-of-an-object": ({"Story": STORY}, ("models", "Story")),
    "a-part-of-the-release": ({"router": STORY}, ("models.router", "another part")),
    "no-size": ({"story": {**STORY, "size": ""}}, ("models.story.size",)),
    "half-a-model": ({"other": {**OTHER, "pools": OTHER["pools"][:1]}}, ("models.other.pools", "none can decode")),
    "a-pool-twice": (
        {"other": {**OTHER, "pools": [OTHER["pools"][0], *OTHER["pools"]]}}, ("models.other.pools[1].name",)
    ),
    "unequal-layouts": (
        {"other": {**OTHER, "pools": [OTHER["pools"][0], {**OTHER["pools"][1], "blockSize": 32}]}},
        ("models.other.pools[1].blockSize",),
    ),
    "one-name-for-two": ({"story": {**STORY, "servedName": "demo"}}, ("models.story.servedName", "demo")),
    "a-store-that-is-not-there": ({"story": {**STORY, "sharesStore": True}}, ("models.story.sharesStore",)),
    "collocated-beside-prefill-and-a-decode-pool-elsewhere": (
        {"other": {**OTHER, "pools": [OTHER["pools"][0], {**OTHER["pools"][1], "role": "collocated"}]}},
        ("models", "models.other", "decode pool"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_entry_is_refused_by_name(helm: Helm, name: str) -> None:
    models, says = REFUSED[name]
    with pytest.raises(Refused) as refused:
        helm.render(values={"models": models})
    assert [part for part in says if part not in str(refused.value)] == []


def test_two_pools_of_two_models_with_one_name_are_refused(helm: Helm) -> None:
    mine = [{"name": "story-all", "role": "collocated", "replicas": 1}]
    with pytest.raises(Refused, match="two pools with the name story-all"):
        helm.render(values={"pools": mine, "models": {"story": STORY}})
