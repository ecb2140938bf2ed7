"""Does the image answer a prompt? `make test-image IMAGE=tandem:0.1.0-cpu`; needs podman and helm, and no cluster.

    python -m tests.image.smoke IMAGE [--values FILE]

The containers of the laptop's rendered manifests run as their Pods say: users, capabilities, read-only roots, mounts,
arguments. A router asks no API server here: it gets its workers by flags. Exit status 1 with the first thing that is
not as it should be.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.image.containers import NAMESPACE, SUBNET, Failed, Member, Release, answers, podman
from tests.k8s.programs import Missing, find
from tests.unit.helm.charts import CHART, Helm, Manifests

DEADLINE_S = 600.0
"""For a service to become ready; the machine may be busy."""
SERVICES = ("redis", "kvstore", "prefill", "decode", "router")

WRITE_EVERYWHERE = """
import os
for folder in ("/", "/etc", "/usr", "/opt/tandem", "/var"):
    try:
        open(os.path.join(folder, "written"), "w").close()
    except OSError as error:
        if error.errno not in (13, 30): raise
    else:
        raise SystemExit(f"{folder} can be written to")
status = dict(line.split(":", 1) for line in open("/proc/1/status"))
root = [line.split()[3] for line in open("/proc/1/mounts") if line.split()[1] == "/"][0]
print(os.getuid(), int(status["CapEff"], 16), root.split(",")[0])
"""
"""Prints user, effective capabilities, and how the root is mounted."""


class NotAsItShouldBe(Exception):
    """What was found."""


def members_of(manifests: Manifests) -> dict[str, Member]:
    """By service, with addresses in order."""
    address = {name: f"{SUBNET}.{number}" for number, name in enumerate(SERVICES, 10)}
    workers = [f"--{role}=demo-{role}-0={address[role]}:50061" for role in ("prefill", "decode")]
    hosts: Mapping[str, tuple[str, ...]] = {
        "redis": ("demo-redis",),
        "kvstore": (
            f"demo-kvstore.{NAMESPACE}.svc",
            f"demo-kvstore-0.demo-kvstore-nodes.{NAMESPACE}.svc",
        ),
        "router": (f"demo-router.{NAMESPACE}.svc",),
    }
    return {
        name: Member(
            f"demo-{name}-0",
            address[name],
            manifests.pods[name]["spec"],
            hosts.get(name, ()),
            tuple(workers) if name == "router" else (),
            ("--discovery", "--kubernetes.") if name == "router" else (),
        )
        for name in SERVICES
    }


def wait_for(what: str, holds: Callable[[], bool], alive: Callable[[], bool], why: Callable[[], str]) -> None:
    """Raises NotAsItShouldBe when it does not come to hold."""
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        if not alive() or time.monotonic() > deadline:
            raise NotAsItShouldBe(f"{what}:\n{why()[-4000:]}")
        time.sleep(1)


def check_service(release: Release, name: str, member: Member, *, has_preflight: bool) -> None:
    """Preflight, start, readiness, user, root. Raises NotAsItShouldBe."""
    (container,) = member.pod["containers"]
    for init in member.pod.get("initContainers", ()) if has_preflight else ():
        done = release.run(member, init, f"{member.name}-{init['name']}")
        if done.returncode != 0:
            raise NotAsItShouldBe(f"{name}'s {init['name']} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    release.start(member)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    if probe := container["readinessProbe"].get("httpGet"):
        url = f"http://{member.address}:{ports[probe['port']]}{probe['path']}"
        wait_for(
            f"{name} is not ready at {url}",
            lambda: answers(url),
            lambda: release.is_running(member),
            lambda: release.logs(member),
        )
        wait_for(
            f"{name} does not pass the image's HEALTHCHECK",
            lambda: release.is_healthy(member),
            lambda: release.is_running(member),
            lambda: release.logs(member),
        )
    user, capabilities, root = release.execute(member, WRITE_EVERYWHERE).split()
    if (user, capabilities, root) != ("10001", "0", "ro"):
        raise NotAsItShouldBe(f"{name}: user {user}, capabilities {capabilities}, root {root}")
    print(f"{name}: ready; user {user}, no capabilities, read-only root", flush=True)


def smoke(image: str, values: Path) -> None:
    """Raises NotAsItShouldBe, Failed, Missing."""
    manifests = Helm(find("helm")).manifests(values)
    size = int(podman("image", "inspect", "--format", "{{.Size}}", image).stdout)
    print(f"{image}: {size / 1e6:.0f} MB", flush=True)
    shown = podman("run", "--rm", "--pull=never", image, "tandem_cli.main", "--help").stdout
    has_preflight = "preflight" in shown
    print(f"preflight: {'run before each service' if has_preflight else 'this image has none'}", flush=True)
    members = members_of(manifests)
    maps: dict[str, Any] = {each["metadata"]["name"]: each["data"] for each in manifests.of("ConfigMap")}
    with Release(image, maps, list(members.values())) as release:
        for name, member in members.items():
            check_service(release, name, member, has_preflight=has_preflight)
        test = Member("demo-test", "", manifests.pods["test"]["spec"])
        done = release.run(test, test.pod["containers"][0], "test-prompt")
        if done.returncode != 0:
            raise NotAsItShouldBe(f"no answer: {done.stdout}{done.stderr}\n{release.logs(members['router'])[-2000:]}")
        print(f"answer: {done.stdout.strip()}", flush=True)
        for name, member in reversed(members.items()):
            if (status := release.stop(member)) != 0:
                raise NotAsItShouldBe(f"{name} ended with {status} after SIGTERM:\n{release.logs(member)[-2000:]}")
        print("all ended with 0 after SIGTERM", flush=True)


def main() -> int:
    """0, or 1 with the reason on stderr."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image")
    parser.add_argument("--values", type=Path, default=CHART / "examples/laptop.yaml")
    options = parser.parse_args()
    try:
        smoke(options.image, options.values)
    except (NotAsItShouldBe, Failed, Missing) as error:
        print(error, file=sys.stderr)
        return 1
    except FileNotFoundError as error:
        print(f"{error.filename} is missing (Debian: apt-get install podman)", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
