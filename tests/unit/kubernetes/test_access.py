"""Which API server and namespace a process talks to, and what it says where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from shared.errors import ConfigError
from shared.kubernetes.access import ClusterAccess

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
