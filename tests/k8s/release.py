"""An installed release of the chart on a test's control plane, its processes run by the stand-in kubelet."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc

from shared.rpc.pb.tandem.v1 import inference_pb2, inference_pb2_grpc
from tests.k8s.api_server import ApiServer
from tests.k8s.kubelet import Kubelet
from tests.k8s.programs import ROOT, find

CHART = ROOT / "helm" / "tandem"
DEADLINE_S = 600.0  # services start one after the other on a small machine
NAME = "demo"
KEY = "a-key-of-the-test"


class Release:
    """`helm` for one release, and a client of its router."""

    def __init__(self, api_server: ApiServer, namespace: str, kubelet: Kubelet, values: Path) -> None:
        self.api_server = api_server
        self.namespace = namespace
        self.kubelet = kubelet
        self._values = values
        self._helm = find("helm")

    def helm(self, *arguments: str) -> str:
        """Runs helm in the release's namespace; raises AssertionError with what it and the containers said."""
        command = [
            str(self._helm), *arguments, "--namespace", self.namespace, "--kubeconfig", str(self.api_server.kubeconfig),
        ]  # fmt: skip
        folder = self.kubelet.folder
        environment = {**os.environ, "HELM_CACHE_HOME": f"{folder}/helm", "HELM_CONFIG_HOME": f"{folder}/helm"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, f"{done.stdout}{done.stderr}\n" + "\n".join(self.kubelet.failures)
        return done.stdout

    def install(self) -> str:
        """`helm install --wait`."""
        return self.helm("install", NAME, str(CHART), "--values", str(self._values), *_WAIT)

    def upgrade(self, *settings: str) -> str:
        """`helm upgrade --wait` with further values, as name=value."""
        given = [word for setting in settings for word in ("--set", setting)]
        return self.helm("upgrade", NAME, str(CHART), "--values", str(self._values), *given, *_WAIT)

    def pods(self, component: str, **labels: str) -> dict[str, dict[str, Any]]:
        """Its Pods by name, without those that are ending."""
        selector = f"app.kubernetes.io/instance={NAME},app.kubernetes.io/component={component}"
        for label, value in labels.items():
            selector += f",tandem-llm.io/{label}={value}"
        path = f"/api/v1/namespaces/{self.namespace}/pods?labelSelector={selector}"
        items = self.api_server.request("GET", path)["items"]
        return {pod["metadata"]["name"]: pod for pod in items if "deletionTimestamp" not in pod["metadata"]}

    def delete(self, pod: str) -> None:
        """Deletes a Pod, as an eviction does."""
        self.api_server.request("DELETE", f"/api/v1/namespaces/{self.namespace}/pods/{pod}")

    def router(self) -> str:
        """Address of the Service's one router."""
        path = f"/api/v1/namespaces/{self.namespace}/endpoints/{NAME}-router"
        (subset,) = self.api_server.request("GET", path)["subsets"]
        (address,) = subset["addresses"]
        return str(address["ip"])

    def status(self, router: str) -> inference_pb2.ClusterStatus:
        """What the router knows."""
        with grpc.insecure_channel(f"{router}:50051") as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            call = stub.GetStatus
            return call(inference_pb2.GetStatusRequest(), timeout=30, metadata=[("authorization", f"Bearer {KEY}")])

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Waits for it; raises AssertionError with what containers said where it does not come."""
        end_s = time.monotonic() + DEADLINE_S
        while not condition():
            if time.monotonic() > end_s:
                said = "\n".join([*self.kubelet.failures, *self.kubelet.unready()])
                raise AssertionError(f"{what} does not come\n{said}")
            time.sleep(0.1)


def ask(router: str, prompt: list[int], num_tokens: int, model: str = "demo") -> list[int]:
    """The tokens of one greedy answer. Raises OSError for whatever is no answer."""
    body = {"model": model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://{router}:8000/v1/completions",
        json.dumps({**body, "return_token_ids": True}).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return list(json.load(answer)["choices"][0]["token_ids"])
    except urllib.error.HTTPError as error:
        with error:
            raise OSError(f"{error.code}: {error.read().decode(errors='replace')}") from error


class Load:
    """Some clients that send prompts one after the other and compare the answers with what was right before."""

    def __init__(self, router: str, clients: int = 2) -> None:
        self._router = router
        self._prompts = [[20 + (seed * 97 + place * 37) % 2000 for place in range(60)] for seed in range(clients)]
        self._expected = [ask(router, prompt, 24) for prompt in self._prompts]
        self._end = threading.Event()
        self.answers = 0
        self.failures: list[str] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[Load]:
        """Asks until the block ends."""
        threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(len(self._prompts))]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self._end.set()
            for thread in threads:
                thread.join()

    def _ask(self, number: int) -> None:
        while not self._end.is_set():
            try:
                tokens = ask(self._router, self._prompts[number], 24)
            except (OSError, http.client.HTTPException) as error:
                self.failures.append(str(error))
                continue
            if tokens != self._expected[number]:
                self.failures.append(f"{tokens} is not {self._expected[number]}")
            self.answers += 1


_WAIT = ("--wait", "--timeout", f"{DEADLINE_S:.0f}s")
