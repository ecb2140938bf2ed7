"""The chart as helm renders it; nothing is installed."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s.programs import Missing, find

CHART = Path(__file__).resolve().parents[3] / "helm" / "tandem"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
NEWEST = "1.34.0"
"""Of the clusters that the chart is rendered for where a test says nothing."""
LONG_AGO = ("policy/v1beta1", "autoscaling/v2beta2")
"""What a cluster of 1.20 has and no newer one."""
MODERN = ("policy/v1", "autoscaling/v2")
CLAIMS = ("resource.k8s.io/v1/ResourceClaimTemplate",)
"""GPUs by dynamic resource allocation, from 1.34 on."""

Manifest = dict[str, Any]


class Refused(Exception):
    """What helm says about values that it does not take."""


@dataclass(frozen=True)
class Helm:
    """The helm on this machine."""

    program: Path

    def render(
        self, *files: Path, values: Mapping[str, Any] | None = None, kubernetes: str = NEWEST, tests: bool = True
    ) -> str:
        """`helm template` of the release `demo` in the namespace `serving`. Raises Refused."""
        minor = int(kubernetes.split(".")[1])
        names = (*(LONG_AGO if minor < 21 else MODERN), *(CLAIMS if minor >= 34 else ()))
        versions = [flag for name in names for flag in ("--api-versions", name)]
        skip = [] if tests else ["--skip-tests"]
        return self._run(
            ["template", "demo", CHART, "--namespace", "serving", "--kube-version", kubernetes, *versions, *skip],
            files,
            values,
        )

    def manifests(self, *files: Path, values: Mapping[str, Any] | None = None, kubernetes: str = NEWEST) -> Manifests:
        """The same, parsed. Raises Refused."""
        return Manifests(self.render(*files, values=values, kubernetes=kubernetes))

    def lint(self, *files: Path) -> str:
        """`helm lint --strict`. Raises Refused."""
        return self._run(["lint", "--strict", CHART], files, None)

    def _run(self, command: Sequence[str | Path], files: Sequence[Path], values: Mapping[str, Any] | None) -> str:
        flags: list[str | Path] = [flag for file in files for flag in ("--values", file)]
        if values is not None:
            flags += ["--values", "-"]
        done = subprocess.run(
            [self.program, *command, *flags],
            input=None if values is None else yaml.safe_dump(dict(values)),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise Refused(done.stdout + done.stderr)
        return done.stdout


class Manifests(list[Manifest]):
    """What would be applied."""

    def __init__(self, text: str) -> None:
        """`text` is YAML of any number of documents."""
        super().__init__(document for document in yaml.safe_load_all(text) if document)

    def one(self, kind: str, name: str) -> Manifest:
        """The object of that name without the release's; raises ValueError where it is not there once."""
        (found,) = (each for each in self if each["kind"] == kind and each["metadata"]["name"] == f"demo-{name}")
        return found

    def of(self, kind: str) -> list[Manifest]:
        """All objects of a kind."""
        return [each for each in self if each["kind"] == kind]

    @cached_property
    def pods(self) -> Mapping[str, Manifest]:
        """The Pods' specifications by the name of what makes them, without the release's."""
        makers = (*self.of("Deployment"), *self.of("StatefulSet"))
        return {each["metadata"]["name"].removeprefix("demo-"): each["spec"]["template"] for each in makers} | {
            each["metadata"]["name"].removeprefix("demo-"): each for each in self.of("Pod")
        }


def find_helm() -> Helm:
    """Skips the test where there is none."""
    try:
        return Helm(find("helm"))
    except Missing as missing:
        pytest.skip(str(missing))
