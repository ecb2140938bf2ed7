"""What a local cluster should be: one frozen value, checked where it is built."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from services.local.devices import CPU, parse_devices
from services.local.model_pools import MAX_WORKERS, Dtype, KVDtype, Mode, ModelPools, check_range
from shared.address import MAX_PORT, Address
from shared.errors import ConfigError
from shared.identity import WorkerRole
from shared.kv.encryption_modes import Encryption
from shared.model.ranks.shard import MAX_DEGREE, Degrees
from shared.telemetry.logs import LogFormat

PrefixFetch = Literal["auto", "always", "never"]

DEFAULT_HTTP = "127.0.0.1:8000"
DEFAULT_GRPC = "127.0.0.1:50051"
STATE_DIR = Path(".tandem")
DEMO_MODEL = Path(__file__).resolve().parents[2] / "models" / "demo"
"""Of the checkout or of the installed wheel."""
MAX_ROUTERS = 16
"""Most routers on one machine."""


@dataclass(frozen=True, slots=True)
class RouterPlace:
    """One router of a local cluster."""

    name: str
    """Of its process: router, router-1, …"""
    http: str
    """host:port of the OpenAI API."""
    grpc: str
    """host:port of tandem.v1.InferenceService."""


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Sizes, addresses and places of a local cluster; raises ConfigError naming the setting that is wrong."""

    model: Path
    """Model folder in Hugging Face layout."""
    num_prefill: int = 1
    """Prefill workers; 0 in collocated mode."""
    num_decode: int = 1
    """Decode workers; in collocated mode they prefill too."""
    num_routers: int = 1
    """Routers over the same workers. Each further one serves on the next port of `http` and of `grpc`."""
    mode: Mode = "disaggregated"
    dtype: Dtype = "auto"
    """Of weights and computation; auto = the checkpoint's."""
    kv_dtype: KVDtype = "auto"
    """Of the KV cache; auto = as the computation."""
    block_encryption: Encryption = "none"
    """Of blocks between the processes."""
    deterministic: bool = False
    """Whether answers do not depend on batches, caches and failures, to the bit."""
    tp: int = 1
    """Processes that split each layer of a worker."""
    pp: int = 1
    """Stages of a worker's layers, each of `tp` processes."""
    prefill_tp: int = 0
    """`tp` of the prefill workers; 0 = as `tp`."""
    decode_tp: int = 0
    """`tp` of the decode workers; 0 = as `tp`."""
    ep: int = 1
    """Sets of a stage's `tp` processes over which experts are spread."""
    prefill_ep: int = 0
    """`ep` of the prefill workers; 0 = as `ep`."""
    decode_ep: int = 0
    """`ep` of the decode workers; 0 = as `ep`."""
    group_hosts: int = 1
    """Hosts of each worker that has several processes, tried out on this machine: those of different hosts share no
    memory."""
    device: str = CPU
    """Where the workers run: cpu, cuda, or cuda:0,1,… for GPUs that their processes are dealt to in turn, prefill
    first."""
    gpu_memory: float = 0.9
    """Share of each GPU's memory, for all the workers on it together."""
    http: str = DEFAULT_HTTP
    """host:port of the OpenAI API; port 0 = any free one."""
    grpc: str = DEFAULT_GRPC
    """host:port of tandem.v1.InferenceService; port 0 = any free one."""
    served_model_name: str = ""
    """What clients call the model; empty = the folder's name."""
    aliases: tuple[str, ...] = ()
    """Further names that clients may use for it."""
    further: tuple[ModelPools, ...] = ()
    """More models behind the same routers, each with workers of its own."""
    num_kv_blocks: int = 0
    """Blocks in each worker's KV pool; 0 = from free memory."""
    max_model_len: int = 0
    """Longest sequence in tokens; 0 = the model's own limit."""
    store_nodes: int = 1
    """Processes for each model that keep blocks evicted from its workers' pools, where memory or disk is configured for
    that."""
    store_host_bytes: int = 0
    """Host memory of each store node, bytes; 0 = none."""
    store_disk_folder: Path | None = None
    """Where such blocks are kept on disk, over restarts too; several nodes have a folder each within."""
    store_disk_bytes: int = 0
    """Disk space in that folder for each node, bytes; 0 = none."""
    prefix_fetch: PrefixFetch = "auto"
    """How a worker decides between fetching a prefix from peers or store nodes and computing it."""
    log_format: LogFormat = "text"
    """Of each process's log; text leaves the choice to the services' own settings."""
    traces_endpoint: str = ""
    """URL of an OpenTelemetry collector that all processes send their spans to; empty leaves that to the services' own
    settings."""
    traces_sample: float | None = None
    """Share of requests that are traced; None = all, where `traces_endpoint` is set."""
    restart: bool = False
    """Whether a process that dies is started again, and one that hangs is killed for that."""
    hang_timeout_s: float = 30.0
    """A process that answered probes and has not for this long hangs; a shorter stall is only a pause. Seconds."""
    state_dir: Path = STATE_DIR
    """Holds logs/. Where another cluster has it, the next one takes the folder 2 in it, the one after that 3, …"""
    start_timeout_s: float = 600.0
    """How long one process may take until it is ready, seconds."""
    stop_timeout_s: float = 40.0
    """How long one process may take to drain before it is killed, seconds: above the services' own limits."""

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("block_encryption", self.block_encryption, get_args(Encryption)),
            ("prefix_fetch", self.prefix_fetch, get_args(PrefixFetch)),
            ("log_format", self.log_format, get_args(LogFormat)),
        ):
            if value not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}", field=name)
        if self.traces_sample is not None and not 0 <= self.traces_sample <= 1:
            raise ConfigError(f"traces_sample must be from 0 to 1, got {self.traces_sample}", field="traces_sample")
        self._check_models()
        check_range("routers", self.num_routers, 1, MAX_ROUTERS)
        if not 0 < self.gpu_memory <= 1:
            raise ConfigError(f"gpu_memory must be above 0 and at most 1, got {self.gpu_memory}", field="gpu_memory")
        for name, degree, fewest in (
            ("tp", self.tp, 1),
            ("pp", self.pp, 1),
            ("prefill_tp", self.prefill_tp, 0),
            ("decode_tp", self.decode_tp, 0),
            ("ep", self.ep, 1),
            ("prefill_ep", self.prefill_ep, 0),
            ("decode_ep", self.decode_ep, 0),
        ):
            check_range(name, degree, fewest, MAX_DEGREE)
        if not any(role == WorkerRole.PREFILL for pools in self.pools for role, _ in pools.workers):
            for name, degree in (("prefill_tp", self.prefill_tp), ("prefill_ep", self.prefill_ep)):
                if degree:
                    raise ConfigError(f"{name} is set, but no worker is a prefill worker", field=name)
        self._check_hosts()
        check_range("store_nodes", self.store_nodes, 1, MAX_WORKERS)
        check_range("store_host_bytes", self.store_host_bytes, 0, 2**63 - 1)
        check_range("store_disk_bytes", self.store_disk_bytes, 0, 2**63 - 1)
        if self.store_disk_bytes and self.store_disk_folder is None:
            raise ConfigError("store_disk_bytes is set, but no store_disk_folder", field="store_disk_folder")
        self._check_gpus()
        self._check_routers()

    @property
    def pools(self) -> tuple[ModelPools, ...]:
        """Each model and its workers, the one of this spec's own fields first."""
        first = ModelPools(
            self.model_name,
            self.model,
            self.aliases,
            self.num_prefill,
            self.num_decode,
            self.mode,
            self.dtype,
            self.kv_dtype,
            self.num_kv_blocks,
            self.max_model_len,
        )
        return (first, *self.further)

    @property
    def num_workers(self) -> int:
        """Of all models."""
        return sum(len(pools.workers) for pools in self.pools)

    def degrees(self, role: WorkerRole) -> Degrees:
        """How the workers of a role split their model."""
        is_prefill = role == WorkerRole.PREFILL
        tensor = self.prefill_tp if is_prefill else self.decode_tp
        expert = self.prefill_ep if is_prefill else self.decode_ep
        return Degrees(tensor or self.tp, self.pp, expert or self.ep)

    def hosts(self, role: WorkerRole) -> int:
        """Of each worker of a role."""
        return self.group_hosts if self.degrees(role).num_ranks > 1 else 1

    def _check_hosts(self) -> None:
        check_range("group_hosts", self.group_hosts, 1, MAX_DEGREE)
        roles = {role for pools in self.pools for role, _ in pools.workers}
        if self.group_hosts > 1 and all(self.hosts(role) == 1 for role in roles):
            raise ConfigError(
                f"group_hosts is {self.group_hosts}, but each worker is one process: set tp or pp", field="group_hosts"
            )
        for role in sorted(roles):
            if (ranks := self.degrees(role).num_ranks) % self.hosts(role):
                raise ConfigError(
                    f"group_hosts is {self.group_hosts}, and does not divide the {ranks} processes of a {role} worker",
                    field="group_hosts",
                )

    def _check_gpus(self) -> None:
        num_gpus = sum(device != CPU for device in self.devices)
        if not num_gpus:
            return
        if num_gpus > self.num_processes:
            whom = f"{self.num_workers} workers"
            if self.num_processes > self.num_workers:
                whom += f" of {self.num_processes} processes"
            raise ConfigError(f"device names {num_gpus} GPUs for {whom}", field="device", limit=self.num_processes)
        for degrees in {self.degrees(role) for pools in self.pools for role, _ in pools.workers}:
            if degrees.num_ranks > num_gpus:
                raise ConfigError(
                    f"device names {num_gpus} GPUs, and a worker of tp {degrees.tensor} times pp {degrees.pipeline} "
                    f"takes {degrees.num_ranks}",
                    field="device",
                    value=num_gpus,
                    limit=degrees.num_ranks,
                )

    def _check_models(self) -> None:
        workers = Counter(name for pools in self.pools for _, name in pools.workers)
        names = Counter(name for pools in self.pools for name in (pools.name, *pools.aliases))
        if twice := [name for name, count in (names + workers).items() if max(names[name], workers[name]) > 1]:
            raise ConfigError(f"models: {twice[0]!r} stands for two models or workers", field="models", value=twice[0])

    @property
    def num_processes(self) -> int:
        """Of all workers: a worker has as many as ranks."""
        return sum(self.degrees(role).num_ranks for pools in self.pools for role, _ in pools.workers)

    @property
    def routers(self) -> tuple[RouterPlace, ...]:
        """Where each router serves; port 0 = any free one."""
        return tuple(
            RouterPlace(
                f"router-{number}" if number else "router",
                _next_port(self.http, "http", number),
                _next_port(self.grpc, "grpc", number),
            )
            for number in range(self.num_routers)
        )

    def _check_routers(self) -> None:
        taken: set[str] = set()
        for router in self.routers:
            for field, address in (("http", router.http), ("grpc", router.grpc)):
                if address in taken:
                    raise ConfigError(f"{field}: {address} is another router's already", field=field, value=address)
                if Address.parse(address, field).port:
                    taken.add(address)

    @property
    def devices(self) -> tuple[str, ...]:
        """What `device` names, one by one."""
        return parse_devices(self.device)

    @property
    def has_store(self) -> bool:
        """Whether there are store nodes: KV store processes that keep blocks, beside the index of the pools."""
        return bool(self.store_host_bytes or self.store_disk_bytes)

    @property
    def store_names(self) -> tuple[str, ...]:
        """Of the store nodes, those of each model together; none without a store. Which blocks a node keeps follows
        from its name, also after a restart on another port."""
        return tuple(name for pools in self.pools for name in self.stores_of(pools))

    def stores_of(self, pools: ModelPools) -> tuple[str, ...]:
        """The names of one model's store nodes: a node's blocks have one size, so that no two models share one."""
        count = self.store_nodes if self.has_store else 0
        return tuple(f"{pools.prefix}store-{number}" for number in range(count))

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return self.served_model_name or self.model.resolve().name

    @property
    def log_dir(self) -> Path:
        """Where each process's stderr goes, NAME.log."""
        return self.state_dir / "logs"


def _next_port(address: str, field: str, offset: int) -> str:
    """The address `offset` ports further; port 0 stays."""
    asked = Address.parse(address, field)
    if not asked.port or not offset:
        return address
    if asked.port + offset > MAX_PORT:
        raise ConfigError(f"{field}: port {asked.port + offset} is above {MAX_PORT}", field=field, limit=MAX_PORT)
    return str(replace(asked, port=asked.port + offset))
