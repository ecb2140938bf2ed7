"""The chart installed on a real control plane, with real services in its Pods: prompts are answered whatever goes."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Iterator

import pytest
import yaml

from tests.k8s.api_server import ApiServer
from tests.k8s.kubelet import Kubelet
from tests.k8s.programs import ROOT
from tests.k8s.release import KEY, NAME, Load, Release, ask

pytestmark = pytest.mark.slow

SMALL = ["--num-kv-blocks=256", "--max-model-len=512", "--num-threads=1"]
VALUES = {
    "model": {"uri": str(ROOT / "models" / "demo")},
    "bindAddress": "$(POD_IP)",  # here Pods share the machine's network
    "pools": [
        {"name": "prefill", "role": "prefill", "replicas": 2, "dtype": "fp32", "extraArgs": SMALL},
        {
            "name": "decode", "role": "decode", "replicas": 2, "dtype": "fp32", "extraArgs": SMALL,
        },
    ],
    "worker": {"drainTimeoutSeconds": 20},
    "router": {"config": {"queue_limit": 64}, "preStopSleepSeconds": 1, "drainTimeoutSeconds": 5},
    "kvstore": {"hostMemory": "64Mi"},
    "preflight": {"enabled": False},  # its own tests run it; here it doubles the time
    "apiKeys": {"existingSecret": "keys", "testKey": "test-key"},
    "fleetKey": {"existingSecret": "keys"},
}  # fmt: skip
SECRET = {"api-keys": f'["{KEY}"]', "test-key": KEY, "fleet-key": "sixteen bytes or more"}
PROMPT = [20 + (place * 37) % 2000 for place in range(75)]


@pytest.fixture(scope="module")
def release(api_server: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    """Installed, with two prefill and two decode workers."""
    folder = tmp_path_factory.mktemp("kubelet")
    (folder / "values.yaml").write_text(yaml.safe_dump(VALUES))
    namespace = f"release-{secrets.token_hex(4)}"
    api_server.request("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
    data = {key: base64.b64encode(value.encode()).decode() for key, value in SECRET.items()}
    secret = {"metadata": {"name": "keys"}, "data": data}
    api_server.request("POST", f"/api/v1/namespaces/{namespace}/secrets", secret)
    with Kubelet(api_server, namespace, folder) as kubelet:
        release = Release(api_server, namespace, kubelet, folder / "values.yaml")
        release.install()
        yield release


def test_an_installed_release_answers_a_prompt(release: Release):
    router = release.router()
    # helm waits for all workers of a pool but as many as may be away in an update.
    release.until(lambda: _names(release, router) == set(release.pods("worker")), "all workers")
    status = release.status(router)
    assert status.ready, status.not_ready_reason
    assert not status.degraded
    assert len(ask(router, PROMPT, 16)) == 16
    assert "Succeeded" in release.helm("test", NAME)
    assert not release.kubelet.failures


def test_a_prompt_is_answered_while_the_api_server_is_away_and_forgets(release: Release):
    router = release.router()
    (gone, _) = release.pods("worker", role="decode")
    with Load(router).running() as load:
        release.api_server.stop()
        release.api_server.compact()
        seen = load.answers
        release.until(lambda: load.answers > seen + 4, "an answer while the API server is away")
        assert release.status(router).ready
        release.api_server.start()
        # Its place in the list is forgotten: the router has to list anew to see this.
        release.delete(gone)
        replaced(release, router, gone, role="decode")
        seen = load.answers
        release.until(lambda: load.answers > seen + 4, "an answer after it")
    assert not load.failures
    assert not release.kubelet.failures


def test_a_worker_whose_pod_is_deleted_under_load_is_replaced_and_no_request_fails(release: Release):
    router = release.router()
    gone = next(iter(release.pods("worker", role="prefill")))
    with Load(router).running() as load:
        release.delete(gone)
        replaced(release, router, gone, role="prefill")
        seen = load.answers
        release.until(lambda: load.answers > seen + 4, "an answer after it")
    assert not load.failures
    assert not release.kubelet.failures


def test_an_upgrade_and_a_rollback_change_the_workers_and_not_the_answers(release: Release):
    router = release.router()
    expected = ask(router, PROMPT, 16)
    release.upgrade("pools[1].replicas=1")
    release.until(lambda: len(_names(release, router)) == 3, "one decode worker")
    assert ask(router, PROMPT, 16) == expected
    release.helm("rollback", NAME, "1", "--wait", "--timeout", "240s")
    release.until(lambda: len(_names(release, router)) == 4, "the old number of workers")
    assert ask(router, PROMPT, 16) == expected


def test_a_second_model_joins_by_an_upgrade_and_both_answer(release: Release):
    expected = ask(release.router(), PROMPT, 16)
    with pytest.raises(OSError, match="404"):
        ask(release.router(), PROMPT, 16, "story")
    pool = {"name": "all", "role": "collocated", "replicas": 1, "dtype": "fp32"}
    settings = [f"models.story.pools[0].{key}={value}" for key, value in pool.items()]
    settings += ["models.story.uri=" + VALUES["model"]["uri"], f"models.story.pools[0].extraArgs={{{','.join(SMALL)}}}"]
    release.upgrade(*settings)
    router = release.router()
    (story,) = release.pods("worker", pool="story-all")
    release.until(lambda: _names(release, router) == set(release.pods("worker")), "all workers of both models")
    models = {each.worker.name: each.model for each in release.status(router).workers}
    assert models == {name: "story" if name == story else "demo" for name in release.pods("worker")}
    assert {each.name: each.mode for each in release.status(router).models} == {
        "demo": "disaggregated",
        "story": "collocated",
    }
    assert ask(router, PROMPT, 16, "story") == ask(router, PROMPT, 16) == expected, "they have one folder"
    assert "Succeeded" in release.helm("test", NAME)


def test_nothing_is_left_after_an_uninstall(release: Release):
    release.helm("uninstall", NAME)
    core = f"/api/v1/namespaces/{release.namespace}"
    # The Pod of `helm test` stays, as helm keeps what hooks made.
    others = "?labelSelector=app.kubernetes.io/component!=test"
    release.until(lambda: not release.api_server.request("GET", f"{core}/pods{others}")["items"], "the end of all Pods")
    for kind in ("services", "serviceaccounts", "configmaps"):
        items = release.api_server.request("GET", f"{core}/{kind}")["items"]
        assert not [item["metadata"]["name"] for item in items if item["metadata"]["name"].startswith(NAME)]


def replaced(release: Release, router: str, gone: str, role: str) -> None:
    """Waits until the router has another worker in a deleted Pod's place."""
    release.until(lambda: gone not in {*_names(release, router), *release.pods("worker")}, "the end of the old worker")
    release.until(lambda: len(release.pods("worker", role=role)) == 2, "a new Pod in its place")
    release.until(lambda: _names(release, router) == set(release.pods("worker")), "the new worker")


def _names(release: Release, router: str) -> set[str]:
    """The workers that the router knows and is connected to."""
    return {worker.worker.name for worker in release.status(router).workers if worker.connected}
