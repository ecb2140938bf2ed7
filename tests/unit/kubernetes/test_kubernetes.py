"""Access to a cluster, its failures, and pauses between tries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from services.planner.cluster.calls import Absent, Conflict, _failure
from shared.errors import ClusterForbids, ClusterUnavailable, ConfigError
from shared.kubernetes.access import ClusterAccess, refusal
from shared.kubernetes.pod_watch import Backoff

CONFIG = {
    "apiVersion": "v1",
    "kind": "Config",
    "current-context": "here",
    "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "serving"}}],
    "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:6443"}}],
    "users": [{"name": "u", "user": {"token": "t"}}],
}


def kubeconfig(folder: Path, content: object) -> Path:
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(content))
    return path


async def test_a_kubeconfig_names_server_user_and_namespace(tmp_path):
    access = ClusterAccess.of("", kubeconfig(tmp_path, CONFIG), "kubernetes.kubeconfig")
    assert access.namespace == "serving"
    assert ClusterAccess.of("other", access.kubeconfig, "kubernetes.kubeconfig").namespace == "other"
    async with access.connect() as api:
        assert api.configuration.host == "https://127.0.0.1:6443"
        assert api.configuration.api_key["BearerToken"] == "Bearer t"


@pytest.mark.parametrize("content", [{}, [], "text", {**CONFIG, "current-context": "elsewhere"}])
def test_a_kubeconfig_that_names_none_is_refused(tmp_path, content):
    with pytest.raises(ConfigError, match=r"kubernetes\.kubeconfig: kubeconfig .*") as refused:
        ClusterAccess.of("", kubeconfig(tmp_path, content), "kubernetes.kubeconfig")
    assert refused.value.field == "kubernetes.kubeconfig"


def test_a_kubeconfig_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        ClusterAccess.of("", tmp_path / "nowhere", "kubernetes.kubeconfig")


def test_a_process_outside_a_pod_needs_a_kubeconfig(monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="no Pod with a service account's token") as refused:
        ClusterAccess.of("", None, "kubernetes.kubeconfig")
    assert refused.value.field == "kubernetes.kubeconfig"


@given(st.floats(0.01, 10), st.floats(10, 100), st.integers(1, 10_000))
def test_a_pause_doubles_within_its_bounds_and_keeps_half_of_itself_to_chance(first_s, most_s, failures):
    longest_s = min(most_s, first_s * 2.0 ** min(failures - 1, 60))
    assert longest_s / 2 <= Backoff(first_s, most_s).pause_s(failures) <= longest_s


def test_two_routers_do_not_come_back_at_one_moment():
    assert len({Backoff().pause_s(5) for _ in range(20)}) == 20


STATUS = {"kind": "Status", "message": "pods is forbidden: no right"}


@pytest.mark.parametrize("content", [STATUS, {"type": "ERROR", "object": STATUS}], ids=["bare", "event"])
@pytest.mark.parametrize("status", [401, 403])
def test_a_forbidden_call_says_what_the_server_says(status: int, content: dict):
    error = refusal(status, json.dumps(content).encode())
    assert type(error) is ClusterForbids
    assert error.message == f"the Kubernetes API server forbids it: {STATUS['message']}"


@pytest.mark.parametrize("content", [b"<html>", b"[1]", b'"x"', b"{}", b'{"object": 3}', b"\xff"])
def test_an_answer_that_is_no_status_is_cited(content: bytes):
    error = refusal(503, content * 300, "GET /api")
    assert type(error) is ClusterUnavailable
    assert error.message.startswith("the Kubernetes API server answers 503 to GET /api: ")
    assert len(error.message) < 300
    assert refusal(503, b"away").message == "the Kubernetes API server answers 503: away"


@pytest.mark.parametrize(("status", "kind"), [(404, Absent), (409, Conflict), (403, ClusterForbids)])
def test_a_planner_tells_absence_and_conflict_apart(status: int, kind: type[Exception]):
    error = _failure("GET", "/api", status, json.dumps(STATUS).encode())
    assert type(error) is kind
    assert STATUS["message"] in str(error)
