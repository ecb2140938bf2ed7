"""What the API server refuses is typed, and says in its own words why."""

from __future__ import annotations

import json

import pytest

from services.planner.cluster.calls import Absent, Conflict, _failure
from shared.errors import ClusterForbids, ClusterUnavailable
from shared.kubernetes.access import refusal

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
