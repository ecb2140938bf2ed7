"""A local cluster: which process gets which event, in what order, and what stops it."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from services.local import cluster as cluster_module
from services.local.cluster import LocalCluster, cluster_environment
from services.local.model_pools import ModelPools
from services.local.places import check_free, reserved_address
from services.local.spec import ClusterSpec
from shared.cores.topology import Topology
from shared.errors import ConfigError, DeadlineExceeded, ModelLoadError
from shared.rpc.server import RpcServer
from tests.unit.local.fakes import FakeCommands
from tests.unit.local.processes import wait_for_end


async def test_everyone_is_told_where_the_others_are(spec: ClusterSpec, commands: FakeCommands) -> None:
    spec = spec.replace(num_prefill=2, num_decode=1)
    async with LocalCluster(spec, commands=commands) as cluster:
        assert list(cluster.children) == ["kvstore", "prefill-0", "prefill-1", "decode-0", "router"]
        assert commands.redis_url.startswith("unix:///")
        assert len(commands.kvstores) == 1  # bound by the store, told to workers and router
        assert commands.routed == {
            "prefill": {plan.name: plan.address for plan in commands.workers[:2]},
            "decode": {"decode-0": commands.workers[2].address},
        }
        assert len({plan.address for plan in commands.workers} | commands.kvstores) == 4
        assert cluster.http.startswith("127.0.0.1:")
        assert cluster.grpc == "127.0.0.1:2"
        assert all(child.log_path.parent == spec.log_dir for child in cluster.children.values())


async def test_every_worker_is_told_all_store_nodes_and_they_stop_last(
    spec: ClusterSpec, commands: FakeCommands
) -> None:
    async with LocalCluster(spec.replace(store_nodes=3, store_host_bytes=1 << 20), commands=commands) as cluster:
        assert list(cluster.children) == ["kvstore", "store-1", "store-2", "prefill-0", "decode-0", "router"]
        (stores,) = {plan.stores for plan in commands.workers}
        named = dict(entry.split("=") for entry in stores.split(","))
        assert list(named) == ["store-0", "store-1", "store-2"]
        assert len(set(named.values())) == 3
        assert named["store-0"] in commands.kvstores
    stops = [line.removesuffix(" stop") for line in commands.events() if line.endswith(" stop")]
    assert sorted(stops[3:]) == ["kvstore", "store-1", "store-2"]


async def test_a_worker_is_told_its_own_models_store_nodes(spec: ClusterSpec, commands: FakeCommands) -> None:
    further = (ModelPools(name="q", model=spec.model, prefix="q-"),)
    spec = spec.replace(store_nodes=2, store_host_bytes=1 << 20, further=further)
    async with LocalCluster(spec, commands=commands) as cluster:
        assert list(cluster.children)[:4] == ["kvstore", "store-1", "q-store-0", "q-store-1"]
        told = {plan.name: [entry.split("=")[0] for entry in plan.stores.split(",")] for plan in commands.workers}
        assert told["decode-0"] == told["prefill-0"] == ["store-0", "store-1"]
        assert told["q-decode-0"] == told["q-prefill-0"] == ["q-store-0", "q-store-1"]


async def test_several_routers_are_told_the_same_workers_and_stop_before_them(
    spec: ClusterSpec, commands: FakeCommands
) -> None:
    async with LocalCluster(spec.replace(num_routers=3), commands=commands) as cluster:
        assert list(cluster.children)[-3:] == ["router", "router-1", "router-2"]
        assert [router.name for router in cluster.routers] == ["router", "router-1", "router-2"]
        assert len({router.http for router in cluster.routers}) == 3
        assert cluster.http == cluster.routers[0].http
    stops = [line.removesuffix(" stop") for line in commands.events() if line.endswith(" stop")]
    assert sorted(stops[:3]) == ["router", "router-1", "router-2"]


async def test_the_machine_is_shared_out_among_the_workers(
    spec: ClusterSpec, commands: FakeCommands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "read_topology", lambda: Topology(()))
    monkeypatch.setattr(cluster_module, "read_quota", lambda: None)
    async with LocalCluster(spec, commands=commands):
        used = [plan.cores for plan in commands.workers]
    assert {cpu for share in used for cpu in share.cpus} == os.sched_getaffinity(0)
    assert [share.num_threads for share in used] == [len(share.cpus) for share in used]


async def test_a_collocated_cluster_has_decode_workers_alone(spec: ClusterSpec, commands: FakeCommands) -> None:
    spec = spec.replace(mode="collocated", num_prefill=0, num_decode=2)
    async with LocalCluster(spec, commands=commands):
        assert commands.routed["prefill"] == {}
        assert list(commands.routed["decode"]) == ["decode-0", "decode-1"]


async def test_it_stops_the_router_first_then_the_workers_then_the_store(
    spec: ClusterSpec, commands: FakeCommands
) -> None:
    cluster = LocalCluster(spec.replace(num_prefill=2), commands=commands)
    await cluster.start()
    await asyncio.gather(cluster.stop(), cluster.stop())
    stops = [line.removesuffix(" stop") for line in commands.events() if line.endswith(" stop")]
    assert stops[0] == "router"
    assert sorted(stops[1:4]) == ["decode-0", "prefill-0", "prefill-1"]
    assert stops[4:] == ["kvstore"]
    assert [child.returncode for child in cluster.children.values()] == [0] * 5
    assert not commands.index_is_there()


async def test_one_workers_error_is_raised_and_everything_is_stopped(spec: ClusterSpec, commands: FakeCommands) -> None:
    commands.behaviours["decode-0"] = "refuses"
    commands.behaviours["prefill-0"] = "never ready"
    cluster = LocalCluster(spec, commands=commands)
    with pytest.raises(ModelLoadError, match="no model_type") as caught:
        await cluster.start()
    assert caught.value.details["process"] == "decode-0"
    assert "router" not in cluster.children
    assert all(child.returncode is not None for child in cluster.children.values())


async def test_a_start_that_is_cancelled_leaves_no_process(spec: ClusterSpec, commands: FakeCommands) -> None:
    commands.behaviours["decode-0"] = "never ready"
    waiting = asyncio.Event()
    cluster = LocalCluster(
        spec,
        commands=commands,
        on_progress=lambda name, step: waiting.set() if (name, step.text) == ("prefill-0", "ready") else None,
    )
    start = asyncio.create_task(cluster.start())
    await waiting.wait()
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert all(child.returncode is not None for child in cluster.children.values())


@pytest.mark.slow
async def test_a_router_that_never_reaches_its_workers_says_why(spec: ClusterSpec, commands: FakeCommands) -> None:
    commands.behaviours["router"] = "router without workers"
    cluster = LocalCluster(spec.replace(start_timeout_s=5.0), commands=commands)
    with pytest.raises(DeadlineExceeded, match="no decode worker"):
        await cluster.start()


async def test_kill_ends_even_what_ignores_sigterm(spec: ClusterSpec, commands: FakeCommands) -> None:
    commands.behaviours["prefill-0"] = "stubborn"
    cluster = LocalCluster(spec, commands=commands)
    await cluster.start()
    pids = [child.pid for child in cluster.children.values()]
    stopping = asyncio.create_task(cluster.stop())
    cluster.kill()
    await stopping
    assert all(wait_for_end(pid) for pid in pids)


@pytest.mark.parametrize("content", [None, "an empty folder"])
async def test_a_folder_without_a_model_stops_it_before_any_process(
    spec: ClusterSpec, commands: FakeCommands, content: str | None, tmp_path: Path
) -> None:
    folder = tmp_path / "nothing"
    if content is not None:
        folder.mkdir()
    with pytest.raises(ModelLoadError) as caught:
        await LocalCluster(spec.replace(model=folder), commands=commands).start()
    assert caught.value.field == "model"
    assert str(folder) in caught.value.message
    assert commands.events() == []


async def test_a_taken_port_stops_it_before_any_process(spec: ClusterSpec, commands: FakeCommands) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ConfigError, match=taken) as caught:
            await LocalCluster(spec.replace(http=taken), commands=commands).start()
    assert caught.value.field == "http"
    assert commands.events() == []


async def test_a_port_that_is_taken_meanwhile_stops_it_before_any_process_too(
    spec: ClusterSpec, commands: FakeCommands, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))  # and listens only once the port was found free
        monkeypatch.setattr(commands, "check", other.listen)
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ConfigError, match=taken) as caught:
            await LocalCluster(spec.replace(grpc=taken), commands=commands).start()
    assert caught.value.field == "grpc"
    assert commands.events() == []


def test_an_unknown_host_is_found_before_the_start() -> None:
    with pytest.raises(ConfigError, match="not a host"):
        check_free("no such host:0", "http")


async def test_a_reserved_address_goes_to_the_server_that_names_it_and_to_nobody_else() -> None:
    with reserved_address() as address:
        port = int(address.rpartition(":")[2])
        others = [socket.create_server(("127.0.0.1", 0)) for _ in range(200)]
        assert port not in {other.getsockname()[1] for other in others}
        for other in others:
            other.close()
        server = RpcServer(address, lambda _: None, ())
        await server.start()
        assert server.address == address
        await server.stop()


def test_every_cluster_has_a_key_of_its_own() -> None:
    one, other = cluster_environment(loopback=True), cluster_environment(loopback=False)
    assert one["TANDEM_WORKER_FLEET_KEY"] == one["TANDEM_KVSTORE_FLEET_KEY"] != other["TANDEM_WORKER_FLEET_KEY"]


def test_ucx_keeps_to_loopback_where_all_parts_are_there() -> None:
    assert cluster_environment(loopback=True)["UCX_NET_DEVICES"] == "lo"
    assert "UCX_NET_DEVICES" not in cluster_environment(loopback=False)
