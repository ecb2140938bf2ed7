"""The helm that all tests of the chart use."""

from __future__ import annotations

import pytest

from tests.unit.helm.charts import Helm, Manifests, find_helm


@pytest.fixture(scope="session")
def helm() -> Helm:
    """Skips where there is none."""
    return find_helm()


@pytest.fixture(scope="session")
def defaults(helm: Helm) -> Manifests:
    """The chart without any values of a user."""
    return helm.manifests()
