"""What a local cluster's processes get by their environment."""

from __future__ import annotations

from services.local.cluster import cluster_environment


def test_every_cluster_has_a_key_of_its_own() -> None:
    one, other = cluster_environment(loopback=True), cluster_environment(loopback=False)
    assert one["TANDEM_WORKER_FLEET_KEY"] == one["TANDEM_KVSTORE_FLEET_KEY"] != other["TANDEM_WORKER_FLEET_KEY"]


def test_ucx_keeps_to_loopback_where_all_parts_are_there() -> None:
    assert cluster_environment(loopback=True)["UCX_NET_DEVICES"] == "lo"
    assert "UCX_NET_DEVICES" not in cluster_environment(loopback=False)
