"""A spec that cannot be a cluster is refused with the setting's name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.kvstore.settings import KVStoreSettings
from services.local import devices
from services.local.commands import TandemCommands, WorkerPlan, command_line, plan_workers
from services.local.model_pools import ModelPools
from services.local.spec import ClusterOptions, ClusterSpec
from services.router.settings import RouterSettings
from services.worker.settings import WorkerSettings
from shared.config import load_settings
from shared.cores.core_choice import CoreShare
from shared.errors import ConfigError
from shared.settings.group import values_in_common


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("prefill", {"num_prefill": 0}),
        ("prefill", {"num_prefill": 65}),
        ("prefill", {"num_prefill": 1, "mode": "collocated"}),
        ("decode", {"num_decode": 0}),
        ("mode", {"mode": "both"}),
        ("dtype", {"dtype": "int8"}),
        ("log_format", {"log_format": "xml"}),
        ("traces_sample", {"traces_sample": 1.5}),
        ("kv_dtype", {"kv_dtype": "fp16"}),
        ("prefill_kv_dtype", {"prefill_kv_dtype": "fp8", "kv_dtype": "int8"}),
        ("prefill_kv_dtype", {"prefill_kv_dtype": "bf16"}),
        ("prefill_kv_dtype", {"prefill_kv_dtype": "fp32", "kv_dtype": "bf16"}),
        ("prefill_kv_dtype", {"prefill_kv_dtype": "bf16", "kv_dtype": "int8", "mode": "auto"}),
        ("prefill_kv_dtype", {"prefill_kv_dtype": "bf16", "kv_dtype": "fp8", "mode": "collocated"}),
        ("prefill_kv_dtype", {"prefill_kv_dtype": "bf16", "kv_dtype": "int8", "deterministic": True}),
        ("http", {"http": "8000"}),
        ("grpc", {"grpc": "localhost:x"}),
        ("num_kv_blocks", {"num_kv_blocks": -1}),
        ("max_model_len", {"max_model_len": -1}),
        ("device", {"device": "gpu"}),
        ("device", {"device": "cuda:"}),
        ("device", {"device": "cuda:0,"}),
        ("device", {"device": "cuda:0,1,0"}),
        ("device", {"device": "cuda:0,1,2"}),
        ("device", {"device": "cuda:0", "tp": 2}),
        ("device", {"device": "cuda:0,1,2,3,4", "tp": 2}),
        ("device", {"device": "cuda:0,1", "prefill_tp": 2, "pp": 2}),
        ("gpu_memory", {"gpu_memory": 0.0}),
        ("gpu_memory", {"gpu_memory": 1.1}),
        ("group_hosts", {"group_hosts": 0, "tp": 2}),
        ("group_hosts", {"group_hosts": 2}),
        ("group_hosts", {"group_hosts": 3, "decode_tp": 4}),
        ("routers", {"num_routers": 0}),
        ("routers", {"num_routers": 17}),
        ("grpc", {"num_routers": 2, "http": "h:8000", "grpc": "h:8000"}),
        ("http", {"num_routers": 2, "http": "h:8000", "grpc": "h:8001"}),
        ("http", {"num_routers": 2, "http": "h:65535"}),
    ],
)
def test_a_wrong_setting_is_named(field: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        ClusterSpec(model=Path("m"), **settings)
    assert caught.value.field == field
    assert field in caught.value.message


def test_the_model_is_called_like_its_folder_unless_named(tmp_path: Path) -> None:
    assert ClusterSpec(model=tmp_path / "tiny" / ".").model_name == "tiny"
    assert ClusterSpec(model=tmp_path, served_model_name="x").model_name == "x"


def test_each_further_router_has_the_next_ports_and_a_name_of_its_own() -> None:
    spec = ClusterSpec(model=Path("m"), num_routers=2, http="[::1]:8000", grpc="127.0.0.1:0")
    assert [(router.name, router.http, router.grpc) for router in spec.routers] == [
        ("router", "[::1]:8000", "127.0.0.1:0"),
        ("router-1", "[::1]:8001", "127.0.0.1:0"),
    ]
    command = TandemCommands(spec).router({}, "h:1", number=1)
    assert command[command.index("--name") + 1] == "router-1"
    assert command[command.index("--http") + 1] == "[::1]:8001"


def test_prefill_workers_come_first_and_get_their_cores() -> None:
    spec = ClusterSpec(model=Path("m"), num_prefill=2, num_decode=1)
    shares = [CoreShare((0, 1), 2), CoreShare((2,), 1), CoreShare((3,), 1)]
    assert [(plan.role, plan.name, plan.cores) for plan in plan_workers(spec, shares)] == [
        ("prefill", "prefill-0", shares[0]),
        ("prefill", "prefill-1", shares[1]),
        ("decode", "decode-0", shares[2]),
    ]


def test_a_worker_is_pinned_to_its_cores_with_its_number_of_threads() -> None:
    spec = ClusterSpec(model=Path("m"), dtype="fp32", kv_dtype="bf16", num_kv_blocks=64)
    command = list(
        TandemCommands(spec).worker(WorkerPlan("decode", "decode-0", CoreShare((2, 3, 8), 2)), "127.0.0.1:9")
    )
    flags = dict(zip(command[3::2], command[4::2], strict=True))
    assert command[1:3] == ["-m", "services.decode"]
    assert flags["--num-threads"] == "2"
    assert flags["--cpu-affinity"] == "2-3,8"
    assert flags["--dtype"] == "fp32"
    assert flags["--kv-dtype"] == "bf16"
    assert flags["--kvstore"] == "127.0.0.1:9"


def test_every_option_that_a_service_shares_reaches_it() -> None:
    spec = ClusterSpec(
        model=Path("m"), dtype="bf16", kv_dtype="fp32", num_kv_blocks=7, max_model_len=99, deterministic=True,
        prefix_fetch="never", block_encryption="aes-gcm", log_format="json", aliases=("b",),
    )  # fmt: skip
    for command, cls in zip(commands(spec), (KVStoreSettings, WorkerSettings, RouterSettings), strict=True):
        read = load_settings(cls, command[3:])
        passed = values_in_common(spec, cls)
        assert passed.keys() >= {"log_format"}
        assert {name: getattr(read, name) for name in passed} == passed


def test_an_option_that_is_not_given_is_left_to_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_WORKER_KV_DTYPE", "bf16")
    read = [
        load_settings(WorkerSettings, commands(ClusterSpec(model=Path("m"), **options))[1][3:]).kv_dtype
        for options in ({}, {"kv_dtype": "fp32"})
    ]
    assert read == ["bf16", "fp32"]


def test_a_further_models_options_are_its_own() -> None:
    further = ModelPools(name="n", model=Path("n"), prefix="n-", num_kv_blocks=5)
    spec = ClusterSpec(model=Path("m"), dtype="bf16", further=(further,))
    first, _, second, _ = worker_flags(spec)
    assert (first["--dtype"], first.get("--num-kv-blocks")) == ("bf16", None)
    assert (second.get("--dtype"), second["--num-kv-blocks"]) == (None, "5")


def test_a_flag_that_is_no_setting_of_the_service_is_an_error() -> None:
    with pytest.raises(KeyError, match="colour"):
        command_line("kvstore", KVStoreSettings, {"bind": "h:1", "colour": "red"})


def worker_flags(spec: ClusterSpec) -> list[dict[str, str]]:
    plans = plan_workers(spec, [CoreShare((core,), 1) for core in range(spec.num_processes)])
    commands = [list(TandemCommands(spec).worker(plan, "127.0.0.1:9")) for plan in plans]
    return [dict(zip(command[3::2], command[4::2], strict=True)) for command in commands]


def test_gpus_are_dealt_in_turn_and_shared_by_the_workers_on_them() -> None:
    spec = ClusterSpec(model=Path("m"), num_prefill=2, num_decode=1, device="cuda:3,1", gpu_memory=0.9)
    flags = worker_flags(spec)
    assert [item["--device"] for item in flags] == ["cuda:3", "cuda:1", "cuda:3"]
    assert [item["--gpu-memory"] for item in flags] == ["0.45", "0.9", "0.45"]


def test_every_process_of_a_worker_has_a_gpu_of_its_own() -> None:
    def dealt(**degrees: Any) -> list[tuple[str, str]]:
        spec = ClusterSpec(model=Path("m"), gpu_memory=0.9, **degrees)
        return [(item["--device"], item["--gpu-memory"]) for item in worker_flags(spec)]

    assert dealt(device="cuda:0,1", tp=2) == [("cuda:0,1", "0.45")] * 2
    assert dealt(device="cuda:2,3,4,5", tp=2) == [("cuda:2,3", "0.9"), ("cuda:4,5", "0.9")]
    assert dealt(device="cuda:0,1,2", prefill_tp=1, decode_tp=2) == [("cuda:0", "0.9"), ("cuda:1,2", "0.9")]
    assert dealt(device="cuda:0,1,2", tp=2) == [("cuda:0,1", "0.45"), ("cuda:2,0", "0.45")]


def test_one_gpu_is_divided_among_all_workers_without_passing_its_share() -> None:
    spec = ClusterSpec(model=Path("m"), num_prefill=1, num_decode=2, device="cuda", gpu_memory=1.0)
    flags = worker_flags(spec)
    assert [item["--device"] for item in flags] == ["cuda:0"] * 3
    assert 0.999 < sum(float(item["--gpu-memory"]) for item in flags) <= 1.0
    for item in flags:
        given = ["--name", "w", "--model", "m", "--device", item["--device"], "--gpu-memory", item["--gpu-memory"]]
        assert load_settings(WorkerSettings, given).device == "cuda:0"


@pytest.mark.parametrize(
    ("nodes", "built", "processes", "device"),
    [
        (["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"], "2.11.0+cu130", (4, 1), "cuda:0,1"),
        (["nvidia0", "nvidia1"], "2.11.0", (1, 1), "cuda:0"),
        (["nvidia0"], "2.13.0+cpu", (2, 1), "cpu"),
        (["nvidia0"], "2.11.0", (4, 2), "cpu"),
        (["nvidiactl", "tty0"], "2.11.0", (2, 1), "cpu"),
    ],
)
def test_auto_takes_the_gpus_that_torch_can_use_and_that_suffice_for_a_worker(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nodes: list[str],
    built: str,
    processes: tuple[int, int],
    device: str,
) -> None:
    monkeypatch.setattr(devices, "version", lambda _name: built)
    for name in nodes:
        (tmp_path / name).touch()
    assert devices.found_device(*processes, tmp_path) == device


def test_a_cluster_of_auto_starts_on_what_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("services.local.spec.found_device", lambda *asks: asked.append(asks) or "cuda:0,1")
    assert ClusterSpec(model=Path("m"), num_prefill=2, tp=2, device="auto").devices == ("cuda:0", "cuda:1")
    assert set(asked) == {(6, 2)}  # two prefill workers and one decode worker of two processes each
    assert ClusterOptions().device == "auto"


def test_workers_on_the_cpu_are_told_no_share() -> None:
    flags = worker_flags(ClusterSpec(model=Path("m")))
    assert [item["--device"] for item in flags] == ["cpu", "cpu"]
    assert all("--gpu-memory" not in item for item in flags)


def test_several_store_nodes_have_a_name_and_a_folder_each() -> None:
    spec = ClusterSpec(model=Path("m"), store_nodes=2, store_disk_folder=Path("d"), store_disk_bytes=1 << 20)
    for number, command in enumerate(
        (TandemCommands(spec).kvstore("h:1", "redis://"), TandemCommands(spec).store_node(1, "h:2", "redis://"))
    ):
        flags = dict(zip(command[3::2], command[4::2], strict=True))
        assert (flags["--name"], flags["--disk-folder"]) == (f"store-{number}", f"d/store-{number}")
    alone = TandemCommands(spec.replace(store_nodes=1)).kvstore("h:1", "redis://")
    assert alone[alone.index("--disk-folder") + 1] == "d"
    with pytest.raises(ConfigError, match="store_nodes"):
        ClusterSpec(model=Path("m"), store_nodes=0)


def commands(spec: ClusterSpec) -> list[list[str]]:
    made, plan = TandemCommands(spec), WorkerPlan("decode", "decode-0", CoreShare((), 1))
    return [list(made.kvstore("h:1", "redis://")), list(made.worker(plan, "h:1")), list(made.router({}, "h:1"))]


def test_a_group_gets_the_cores_of_all_its_processes() -> None:
    spec = ClusterSpec(model=Path("m"), tp=2, prefill_tp=1)
    assert spec.num_processes == 3
    shares = [CoreShare((0,), 1), CoreShare((1,), 1), CoreShare((2, 3), 2)]
    prefill, decode = plan_workers(spec, shares)
    assert (prefill.cores, decode.cores) == (CoreShare((0,), 1), CoreShare((1, 2, 3), 3))
    for nodes, kept in (((1, 1), 1), ((0, 1), None)):
        _, decode = plan_workers(spec, [CoreShare((0,), 1), *(CoreShare((cpu,), 1, cpu) for cpu in nodes)])
        assert decode.cores.node == kept
    of_prefill, of_decode = (list(TandemCommands(spec).worker(plan, "127.0.0.1:9")) for plan in (prefill, decode))
    assert "--tp" not in of_prefill
    assert of_decode[of_decode.index("--tp") + 1] == "2"
    assert "--pp" not in of_decode


def test_the_sets_of_experts_follow_the_role() -> None:
    spec = ClusterSpec(model=Path("m"), tp=4, ep=4, prefill_tp=2, prefill_ep=1)
    prefill, decode = plan_workers(spec, [CoreShare((), 1)] * spec.num_processes)
    of_prefill, of_decode = (list(TandemCommands(spec).worker(plan, "127.0.0.1:9")) for plan in (prefill, decode))
    assert "--ep" not in of_prefill
    assert of_decode[of_decode.index("--ep") + 1] == "4"
    with pytest.raises(ConfigError, match="prefill_ep is set"):
        ClusterSpec(model=Path("m"), num_prefill=0, mode="collocated", prefill_ep=2)


@pytest.mark.parametrize("field", ["tp", "pp", "prefill_tp", "decode_tp", "ep", "prefill_ep", "decode_ep"])
def test_degrees_out_of_bounds_are_named(field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ClusterSpec(model=Path("m"), **{field: 17})
    assert refused.value.field == field


def test_all_services_send_their_spans_where_the_spec_says_and_the_router_samples_all_or_what_it_says() -> None:
    spec = ClusterSpec(model=Path("m"), traces_endpoint="http://c:4317")
    for made in (commands(spec), commands(spec.replace(traces_sample=0.1))):
        assert all(command[command.index("--traces.endpoint") + 1] == "http://c:4317" for command in made)
        assert ["--traces.sample" in command for command in made] == [False, False, True]
    assert [command[command.index("--traces.sample") + 1] for command in (commands(spec)[2], made[2])] == ["1.0", "0.1"]
    assert not any("--traces" in flag for command in commands(ClusterSpec(model=Path("m"))) for flag in command)


def test_the_further_hosts_of_a_worker_have_processes_and_cores_of_their_own() -> None:
    spec = ClusterSpec(model=Path("m"), decode_tp=4, group_hosts=2)
    prefill, decode = plan_workers(spec, [CoreShare((cpu,), 1) for cpu in range(spec.num_processes)])
    assert (prefill.cores.cpus, prefill.members) == ((0,), [])
    (member,) = decode.members
    assert (decode.cores.cpus, member.cores.cpus) == ((1, 2), (3, 4))
    assert (decode.name, member.name) == ("decode-0", "decode-0-host-1")
    read = []
    for plan in (prefill, replace(decode, meeting="127.0.0.1:7"), replace(member, meeting="127.0.0.1:7")):
        _, _, service, *flags = TandemCommands(spec).worker(plan, "127.0.0.1:9")
        settings = load_settings(WorkerSettings, flags)
        read.append((service, settings.group_hosts, settings.group_host_index, settings.group_leader))
    assert read == [
        ("services.prefill", 1, 0, ""),
        ("services.decode", 2, 0, "127.0.0.1:7"),
        ("services.decode", 2, 1, "127.0.0.1:7"),
    ]
