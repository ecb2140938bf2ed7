"""A small kubelet: it runs the Pods of one namespace as processes of this machine, and tells the API server of them.

What a cluster does beside is not here: images, limits, security contexts, NetworkPolicies. A Pod has an address of its
own on the loopback interface, but no network of its own, so its services have to listen on that address alone. The
names of Services stand in /etc/hosts and lead straight to Pods, as there is no proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import os
import threading
import time
import urllib.error
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.k8s.api_server import ApiServer
from tests.k8s.containers import Container, PodFiles, add_address, remove_address

LOOK_S = 0.25
"""Time between two looks at the API server, and between two probes."""
AWAY = (OSError, http.client.HTTPException)
"""What a call raises when the API server is away or goes away meanwhile; refusals are among them."""
_NUMBERS = itertools.count(1)


class Kubelet:
    """Runs in a thread of its own from `with Kubelet(...)` to its end, when all processes are killed."""

    def __init__(self, api_server: ApiServer, namespace: str, folder: Path) -> None:
        """Logs lie in `folder`, one folder a Pod."""
        self.folder = folder
        self.node = f"node-{namespace}"
        self.failures: list[str] = []
        """Containers that ended by themselves, and Pods that could not be started."""
        self._api = api_server
        self._namespace = namespace
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self._running: dict[str, RunningPod] = {}  # by uid
        self._hosts = folder / "hosts"
        self._end = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="kubelet")

    def __enter__(self) -> Kubelet:
        self._hosts.write_text("127.0.0.1 localhost\n")
        self._api.request("POST", "/api/v1/nodes", {"metadata": {"name": self.node}})
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def unready(self) -> list[str]:
        """What each Pod that is not ready says, for people."""
        return [text for running in list(self._running.values()) for text in running.unready()]

    async def _run(self) -> None:
        try:
            while not self._end.is_set():
                with contextlib.suppress(*AWAY):  # what runs stays
                    await self._look()
                await asyncio.sleep(LOOK_S)
        finally:
            for running in self._running.values():
                await running.kill()

    async def _look(self) -> None:
        pods = {pod["metadata"]["uid"]: pod for pod in (await self.call("GET", self._pods))["items"]}
        for uid, pod in pods.items():
            if not pod["spec"].get("nodeName"):
                await self._bind(pod["metadata"]["name"])
            elif uid not in self._running:
                running = self._running[uid] = RunningPod(self, self._api, pod, self._hosts)
                running.start()
            elif pod["metadata"].get("deletionTimestamp"):
                self._running[uid].end(pod["metadata"]["deletionGracePeriodSeconds"])
        for uid in [uid for uid, running in self._running.items() if running.has_ended and uid not in pods]:
            del self._running[uid]
        await self._write_hosts()

    async def _bind(self, name: str) -> None:
        """The scheduler's part."""
        target = {"apiVersion": "v1", "kind": "Node", "name": self.node}
        with contextlib.suppress(urllib.error.HTTPError):  # it was deleted
            await self.call("POST", f"{self._pods}/{name}/binding", {"metadata": {"name": name}, "target": target})

    async def _write_hosts(self) -> None:
        """The cluster's DNS, from the Endpoints that the controller manager keeps."""
        lines = ["127.0.0.1 localhost"]
        answer = await self.call("GET", f"/api/v1/namespaces/{self._namespace}/endpoints")
        for endpoints in answer["items"]:
            service = endpoints["metadata"]["name"]
            for subset in endpoints.get("subsets") or ():
                for number, address in enumerate(subset.get("addresses") or ()):
                    full = f"{service}.{self._namespace}.svc"
                    names = [service, full] if not number else []
                    names += [f"{address['hostname']}.{full}"] if "hostname" in address else []
                    lines += [f"{address['ip']} {' '.join(names)}"] if names else []
        text = "\n".join(lines) + "\n"
        if text != self._hosts.read_text():
            self._hosts.write_text(text)  # in place: the containers have this very file

    async def call(self, method: str, path: str, body: object = None) -> Any:
        """One call as the admin. Raises what AWAY says."""
        return await asyncio.to_thread(self._api.request, method, path, body)


class RunningPod:
    """One Pod from its binding to its end."""

    def __init__(self, kubelet: Kubelet, api_server: ApiServer, pod: Mapping[str, Any], hosts: Path) -> None:
        number = next(_NUMBERS)
        self.name = pod["metadata"]["name"]
        self.address = f"10.{200 + os.getpid() % 50}.{number // 250}.{number % 250 + 1}"
        self.has_ended = False
        self._kubelet = kubelet
        self._pod = pod
        self._folder = kubelet.folder / f"{self.name}-{number}"
        self._files = PodFiles(api_server, pod, self._folder, self.address)
        self._hosts = hosts
        self._path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{self.name}"
        self._containers = pod["spec"]["containers"]
        self._processes: dict[str, Container] = {}
        self._restarts = dict.fromkeys((one["name"] for one in self._containers), 0)
        self._ready: dict[str, bool] = {}
        self._said: object = None
        self._life: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to run it."""
        self._life = asyncio.create_task(self._live(), name=self.name)

    def unready(self) -> list[str]:
        """What its containers that are not ready wrote last."""
        return [
            f"{process.name} is not ready:\n{process.log_tail()}"
            for name, process in list(self._processes.items())
            if not self.has_ended and not self._ready.get(name)
        ]

    def end(self, grace_s: float) -> None:
        """Begins to end it, as its deletion asks; once."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._finish(grace_s), name=f"end of {self.name}")

    async def kill(self) -> None:
        """Ends it now; the API server is not told."""
        for task in (self._life, self._ending):
            if task is not None:
                task.cancel()
        for process in self._processes.values():
            process.kill()
            await process.stop(10.0)
        remove_address(self.address)

    async def _live(self) -> None:
        try:
            await self._set_up()
            while not self.has_ended:
                with contextlib.suppress(*AWAY):  # said again at the next look
                    await self._watch_over()
                await asyncio.sleep(LOOK_S)
        except Exception as error:
            self._kubelet.failures.append(f"{self.name}: {error!r}")

    async def _set_up(self) -> None:
        """Its address, its files, its init containers one after the other, and then all its containers."""
        add_address(self.address)
        self._folder.mkdir(parents=True)
        await asyncio.to_thread(self._files.write)
        for container in self._pod["spec"].get("initContainers") or ():
            status = await (await self._begin(container)).wait()
            if status:
                raise OSError(f"init container {container['name']} ended with status {status}")
        for container in self._containers:
            await self._begin(container)

    async def _begin(self, container: Mapping[str, Any]) -> Container:
        command, environment = await asyncio.to_thread(
            lambda: (self._files.command(container, self._hosts), self._files.environment(container))
        )
        log = self._folder / f"{container['name']}.log"
        process = Container(f"{self.name}/{container['name']}", command, environment, log)
        self._processes[container["name"]] = process
        await process.start()
        return process

    async def _watch_over(self) -> None:
        """Restarts what ended, probes what runs, and tells the API server what changed."""
        phase = "Running"
        for container in self._containers:
            process = self._processes[container["name"]]
            if process.returncode is None:
                self._ready[container["name"]] = await self._is_ready(container)
                continue
            self._ready[container["name"]] = False
            if self._pod["spec"].get("restartPolicy", "Always") == "Never":
                phase = "Failed" if process.returncode else "Succeeded"
            elif self._ending is None:
                self._kubelet.failures.append(
                    f"{process.name} ended with status {process.returncode}:\n{process.log_tail()}"
                )
                self._restarts[container["name"]] += 1
                await self._begin(container)
        await self._tell(phase)

    async def _is_ready(self, container: Mapping[str, Any]) -> bool:
        """Its readiness probe, once its startup probe has succeeded; probed more often than it asks for."""
        name = container["name"]
        probes = [container.get("readinessProbe")]
        if name not in self._ready or not self._ready[name]:
            probes.insert(0, container.get("startupProbe"))
        return all([await self._succeeds(probe, container) for probe in probes if probe])

    async def _succeeds(self, probe: Mapping[str, Any], container: Mapping[str, Any]) -> bool:
        handler = probe.get("httpGet") or probe["tcpSocket"]
        ports = {port["name"]: port["containerPort"] for port in container.get("ports") or ()}
        port = ports.get(handler["port"], handler["port"])
        try:
            async with asyncio.timeout(probe.get("timeoutSeconds", 1) + 2):
                reader, writer = await asyncio.open_connection(self.address, port)
                try:
                    if "path" not in handler:
                        return True
                    writer.write(f"GET {handler['path']} HTTP/1.1\r\nHost: pod\r\nConnection: close\r\n\r\n".encode())
                    status = int((await reader.readline()).split()[1])
                    return 200 <= status < 400
                finally:
                    writer.close()
        except (OSError, TimeoutError, IndexError, ValueError):
            return False

    async def _tell(self, phase: str) -> None:
        ready = phase == "Running" and self._ending is None and all(self._ready.values())
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        conditions = {"PodScheduled": True, "Initialized": True, "ContainersReady": ready, "Ready": ready}
        said = (phase, ready, tuple(self._restarts.values()))
        if said == self._said:
            return
        status = {
            "phase": phase,
            "podIP": self.address,
            "podIPs": [{"ip": self.address}],
            "hostIP": self.address,
            "startTime": self._pod["metadata"]["creationTimestamp"],
            "conditions": [
                {"type": kind, "status": str(value), "lastTransitionTime": now} for kind, value in conditions.items()
            ],
            "containerStatuses": [self._container_status(one, phase, now) for one in self._containers],
        }
        with contextlib.suppress(urllib.error.HTTPError):  # it is gone
            await self._kubelet.call("PATCH", f"{self._path}/status", {"status": status})
            self._said = said

    def _container_status(self, container: Mapping[str, Any], phase: str, now: str) -> dict[str, Any]:
        name = container["name"]
        state: dict[str, Any] = {"running": {"startedAt": now}}
        if phase != "Running":
            state = {"terminated": {"exitCode": self._processes[name].returncode, "reason": "Completed"}}
        return {
            "name": name,
            "image": container["image"],
            "imageID": container["image"],
            "ready": self._ready[name],
            "restartCount": self._restarts[name],
            "state": state,
        }

    async def _finish(self, grace_s: float) -> None:
        """preStop, SIGTERM, SIGKILL when the grace period is over; then the Pod is gone from the API server too."""
        end_s = time.monotonic() + grace_s
        for container in self._containers:
            hook = container.get("lifecycle", {}).get("preStop", {}).get("exec")
            if hook and self._processes[container["name"]].returncode is None:
                process = await asyncio.create_subprocess_exec(*hook["command"])
                await process.wait()
        for process in self._processes.values():  # all in one: each has one container here
            await process.stop(max(0.0, end_s - time.monotonic()))
        self.has_ended = True
        if self._life is not None:
            self._life.cancel()
        remove_address(self.address)
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": self._pod["metadata"]["uid"]}}
        while True:
            try:
                await self._kubelet.call("DELETE", self._path, options)
            except urllib.error.HTTPError:
                return
            except AWAY:
                await asyncio.sleep(LOOK_S)
            else:
                return
