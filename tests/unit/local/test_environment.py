"""What a local cluster's processes get by their environment."""

from __future__ import annotations

from services.local.environment import cluster_environment


def test_every_cluster_has_a_key_of_its_own() -> None:
    one, other = cluster_environment(), cluster_environment()
    assert one["TANDEM_WORKER_FLEET_KEY"] == one["TANDEM_KVSTORE_FLEET_KEY"] != other["TANDEM_WORKER_FLEET_KEY"]
