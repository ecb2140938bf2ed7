"""The containers of rendered manifests, run by podman one by one, each with an address of its own like its Pod."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SUBNET = "10.231.77"
NAMESPACE = "serving"


class Failed(Exception):
    """podman's own words."""


def podman(*arguments: str, check: bool = True, timeout_s: float = 600.0) -> subprocess.CompletedProcess[str]:
    """Raises Failed where it ends with another status than 0 and `check`."""
    done = subprocess.run(["podman", *arguments], capture_output=True, text=True, check=False, timeout=timeout_s)
    if check and done.returncode != 0:
        raise Failed(f"podman {' '.join(arguments[:2])}: {done.stderr.strip()}\n{done.stdout.strip()}")
    return done


@dataclass(frozen=True)
class Member:
    """One Pod of the release."""

    name: str
    address: str
    pod: Mapping[str, Any]
    hosts: tuple[str, ...] = ()
    """By which others reach it."""
    extra_args: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    """Beginnings of arguments that need a cluster."""


@dataclass
class Release:
    """A network and what runs in it. Use as a context manager: at its end nothing is left."""

    image: str
    config_maps: Mapping[str, Mapping[str, str]]
    members: Sequence[Member]
    prefix: str = "tandem-smoke"
    _folder: tempfile.TemporaryDirectory[str] = field(default_factory=tempfile.TemporaryDirectory)

    def __enter__(self) -> Release:
        """Makes the network. Raises Failed."""
        self._remove()
        podman("network", "create", "--subnet", f"{SUBNET}.0/24", "--disable-dns", self.prefix)
        return self

    def __exit__(self, *_: object) -> None:
        """Removes containers, network and files."""
        self._remove()
        self._folder.cleanup()

    def start(self, member: Member) -> None:
        """Starts the Pod's service in the background. Raises Failed."""
        podman("run", "--detach", *self._flags(member, member.pod["containers"][0], member.name))

    def run(self, member: Member, container: Mapping[str, Any], name: str) -> subprocess.CompletedProcess[str]:
        """Runs another container of that Pod to its end."""
        return podman("run", "--rm", *self._flags(member, container, name), check=False)

    def execute(self, member: Member, code: str) -> str:
        """What Python prints in the running container. Raises Failed."""
        return podman("exec", self._name(member.name), "python", "-c", code).stdout.strip()

    def logs(self, member: Member) -> str:
        """Both streams of the service."""
        done = podman("logs", self._name(member.name), check=False)
        return done.stdout + done.stderr

    def is_healthy(self, member: Member) -> bool:
        """Whether the image's HEALTHCHECK passes in the running container."""
        return podman("healthcheck", "run", self._name(member.name), check=False).returncode == 0

    def is_running(self, member: Member) -> bool:
        """Whether its process is there."""
        return podman("inspect", "--format", "{{.State.Running}}", self._name(member.name)).stdout.strip() == "true"

    def stop(self, member: Member) -> int:
        """SIGTERM, and the status with which the service ended."""
        name = self._name(member.name)
        podman("stop", "--time", str(member.pod.get("terminationGracePeriodSeconds", 30)), name)
        return int(podman("inspect", "--format", "{{.State.ExitCode}}", name).stdout)

    def _name(self, member: str) -> str:
        return f"{self.prefix}-{member}"

    def _remove(self) -> None:
        for member in self.members:
            podman("rm", "--force", "--time", "2", "--ignore", self._name(member.name), check=False)
        podman("network", "rm", "--force", self.prefix, check=False)

    def _flags(self, member: Member, container: Mapping[str, Any], name: str) -> list[str]:
        variables = _environment(member, container)
        security, pod_security = container["securityContext"], member.pod["securityContext"]
        flags = ["--name", self._name(name), "--pull=never", "--network", self.prefix, "--hostname", member.name]
        flags += ["--ip", member.address] if name == member.name else []
        flags += [f"--add-host={host}:{other.address}" for other in self.members for host in other.hosts]
        flags += [f"--env={key}={value}" for key, value in variables.items()]
        flags += ["--user", f"{pod_security['runAsUser']}:{pod_security['runAsGroup']}"]
        flags += [f"--cap-drop={capability}" for capability in security["capabilities"]["drop"]]
        flags += ["--security-opt=no-new-privileges"] if not security["allowPrivilegeEscalation"] else []
        flags += ["--read-only", "--read-only-tmpfs=false"] if security["readOnlyRootFilesystem"] else []
        flags += self._mounts(member, container)
        flags += ["--workdir", container["workingDir"]] if "workingDir" in container else []
        arguments = [_expand(argument, variables) for argument in container.get("args", ())]
        kept = [argument for argument in arguments if not argument.startswith(member.dropped or ("\0",))]
        extra = list(member.extra_args) if name == member.name else []
        return [*flags, f"--entrypoint={json.dumps(container['command'])}", self.image, *kept, *extra]

    def _mounts(self, member: Member, container: Mapping[str, Any]) -> list[str]:
        volumes = {volume["name"]: volume for volume in member.pod["volumes"]}
        flags = []
        for mount in container["volumeMounts"]:
            volume, path = volumes[mount["name"]], mount["mountPath"]
            if path == "/dev/shm":
                flags.append(f"--shm-size={volume['emptyDir']['sizeLimit'].removesuffix('i').lower()}")
            elif "emptyDir" in volume:
                flags.append(f"--tmpfs={path}:rw,mode=1777")
            else:
                flags.append(f"--volume={self._write(volume['configMap']['name'])}:{path}:ro")
        return flags

    def _write(self, config_map: str) -> Path:
        folder = Path(self._folder.name) / config_map
        Path(self._folder.name).chmod(0o755)
        folder.mkdir(exist_ok=True, mode=0o755)
        for name, content in self.config_maps[config_map].items():
            (folder / name).write_text(content)
        return folder


def answers(url: str) -> bool:
    """Whether it gives 200 now."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.HTTPError):
        return False


def _environment(member: Member, container: Mapping[str, Any]) -> dict[str, str]:
    fields = {"metadata.name": member.name, "metadata.namespace": NAMESPACE, "status.podIP": member.address}
    return {
        each["name"]: each["value"] if "value" in each else fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
        for each in container.get("env", ())
    }


def _expand(argument: str, variables: Mapping[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], argument)
