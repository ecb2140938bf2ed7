"""The control plane that the other tests stand on."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest

from tests.k8s.api_server import ApiServer

pytestmark = pytest.mark.slow


def test_content_survives_a_restart_and_tokens_hold(api_server: ApiServer, namespace: str):
    accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    api_server.request("POST", accounts, {"metadata": {"name": "someone"}})
    token = api_server.token_for(namespace, "someone")
    api_server.restart()
    assert api_server.request("GET", f"{accounts}/someone")["metadata"]["name"] == "someone"
    with pytest.raises(urllib.error.HTTPError) as refused:
        api_server.request("GET", f"/api/v1/namespaces/{namespace}/pods", token=token)
    with refused.value as answer:
        assert answer.code == 403
        assert f"system:serviceaccount:{namespace}:someone" in json.load(answer)["message"]


def test_a_version_from_before_a_compaction_is_expired(api_server: ApiServer, namespace: str):
    maps = f"/api/v1/namespaces/{namespace}/configmaps"
    version = api_server.request("GET", maps)["metadata"]["resourceVersion"]
    api_server.request("POST", maps, {"metadata": {"name": "later"}})
    api_server.compact()
    event = api_server.request("GET", f"{maps}?watch=true&timeoutSeconds=5&resourceVersion={version}")
    assert (event["type"], event["object"]["code"]) == ("ERROR", 410)
