"""What a local cluster should be: one frozen value, checked where it is built."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from services.local.devices import AUTO, CPU, found_device, is_gpu, parse_devices
from services.local.model_pools import MAX_WORKERS, ModelPools, PoolOptions
from shared.address import MAX_PORT, Address
from shared.config import LogSettings
from shared.errors import ConfigError
from shared.identity import WorkerRole
from shared.model.ranks.shard import MAX_DEGREE, Degrees
from shared.settings.common import (
    UNEQUAL,
    AliasSettings,
    AnswerSettings,
    ApiSettings,
    Degree,
    EncryptionSettings,
    Mode,
)

STATE_DIR = Path(".tandem")
DEMO_MODEL = Path(__file__).resolve().parents[2] / "models" / "demo"
"""Folder of the demo model, in the checkout or in the installed wheel."""
MAX_ROUTERS = 16
"""Most routers on one machine."""

RoleDegree = Annotated[int, Field(ge=0, le=MAX_DEGREE)]
"""Degree of one role's workers; 0 = that of the other role's."""


@dataclass(frozen=True, slots=True)
class RouterPlace:
    """One router of a local cluster."""

    name: str
    """Name of its process: router, router-1, …"""
    http: str
    """host:port of the OpenAI API."""
    grpc: str
    """host:port of tandem.v1.InferenceService."""


class ClusterOptions(LogSettings, EncryptionSettings, AnswerSettings, ApiSettings, PoolOptions):
    """The options of `tandem serve`, which are the fields; raises ConfigError naming the one that is wrong.

    Those that are settings of the services too are defined with these, in the groups that both inherit.
    """

    num_routers: int = Field(default=1, ge=1, le=MAX_ROUTERS, validation_alias="routers")
    """Routers over the same workers, each further one on the next port of --http and --grpc."""
    tp: Degree = 1
    """Tensor parallelism: processes that split each layer of a worker."""
    pp: Degree = 1
    """Pipeline stages of a worker: parts of its layers, each of --tp processes."""
    prefill_tp: RoleDegree = 0
    """--tp of the prefill workers; 0 = as --tp."""
    decode_tp: RoleDegree = 0
    """--tp of the decode workers; 0 = as --tp."""
    ep: Degree = 1
    """Expert parallelism: sets of a worker's --tp processes with experts of their own."""
    prefill_ep: RoleDegree = 0
    """--ep of the prefill workers; 0 = as --ep."""
    decode_ep: RoleDegree = 0
    """--ep of the decode workers; 0 = as --ep."""
    group_hosts: Degree = 1
    """Hosts of each worker that has several processes, tried out on this machine: those of different hosts share no
    memory, only TCP."""
    device: str = AUTO
    """Where the workers run: cpu, cuda, or cuda:0,1,… for GPUs that their processes are dealt to in turn, prefill
    first. auto: the GPUs of this machine, at most one for each process, or the CPU where it has none. timed:FILE: steps
    take the time that FILE gives, and compute nothing; for load tests."""
    gpu_memory: float = Field(default=0.9, gt=0, le=1)
    """Share of each GPU's memory, for all the workers on it together."""
    store_nodes: int = Field(default=1, ge=1, le=MAX_WORKERS)
    """Processes for each model that keep blocks evicted from its workers' pools, where memory or disk is configured for
    that."""
    store_host_bytes: int = Field(default=0, ge=0)
    """Host memory of each store node, bytes; 0 = none."""
    store_disk_folder: Path | None = None
    """Where such blocks are kept on disk, over restarts too; several nodes have a folder each within."""
    store_disk_bytes: int = Field(default=0, ge=0)
    """Disk space in that folder for each node, bytes; 0 = none."""
    traces_endpoint: str = ""
    """URL of an OpenTelemetry collector that all processes send their spans to, such as http://127.0.0.1:4317; empty
    leaves that to the services' own settings."""
    traces_sample: float | None = Field(default=None, ge=0, le=1)
    """Share of requests that are traced; unset = all, where --traces-endpoint is set."""
    state_dir: Path = STATE_DIR
    """Holds logs/. Where another cluster has it, the next one takes the folder 2 in it, the one after that 3, …"""
    restart: bool = True
    """Whether a process that dies is started again, and one that hangs is killed for that."""


class ClusterSpec(ClusterOptions, AliasSettings):
    """Sizes, addresses and places of a local cluster; raises ConfigError naming the setting that is wrong."""

    model: Path
    """Model folder in Hugging Face layout."""
    further: tuple[ModelPools, ...] = ()
    """More models behind the same routers, each with workers of its own."""
    device: str = CPU
    """As of the options; code that starts a cluster says so where it wants GPUs."""
    mode: Mode = "disaggregated"
    """Code gets two pools unless it names a mode."""
    restart: bool = False
    """As of the options; code that starts a cluster looks after its processes itself."""
    hang_timeout_s: float = Field(default=30.0, gt=0)
    """A process that answered probes and has not for this long hangs; a shorter stall is only a pause. Seconds."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """How long one process may take until it is ready, seconds."""
    stop_timeout_s: float = Field(default=40.0, ge=0)
    """How long one process may take to drain before it is killed, seconds: above the services' own limits."""

    @model_validator(mode="after")
    def _check(self) -> ClusterSpec:
        self._check_models()
        if self.deterministic and any(pools.converts_kv for pools in self.pools):
            raise ConfigError(f"prefill_kv_dtype must be same with deterministic: {UNEQUAL}", field="prefill_kv_dtype")
        if not any(role == WorkerRole.PREFILL for pools in self.pools for role, _ in pools.workers):
            for name, degree in (("prefill_tp", self.prefill_tp), ("prefill_ep", self.prefill_ep)):
                if degree:
                    raise ConfigError(f"{name} is set, but no worker is a prefill worker", field=name)
        self._check_hosts()
        if self.store_disk_bytes and self.store_disk_folder is None:
            raise ConfigError("store_disk_bytes is set, but no store_disk_folder", field="store_disk_folder")
        self._check_gpus()
        self._check_routers()
        return self

    @property
    def pools(self) -> tuple[ModelPools, ...]:
        """Each model and its workers, the one of this spec's own fields first."""
        return (ModelPools(name=self.model_name, **self.values_for(ModelPools)), *self.further)

    @property
    def num_workers(self) -> int:
        """The number of workers of all models."""
        return sum(len(pools.workers) for pools in self.pools)

    def degrees(self, role: WorkerRole) -> Degrees:
        """How the workers of a role split their model."""
        is_prefill = role == WorkerRole.PREFILL
        tensor = self.prefill_tp if is_prefill else self.decode_tp
        expert = self.prefill_ep if is_prefill else self.decode_ep
        return Degrees(tensor or self.tp, self.pp, expert or self.ep)

    def hosts(self, role: WorkerRole) -> int:
        """The number of hosts of each worker of a role."""
        return self.group_hosts if self.degrees(role).num_ranks > 1 else 1

    def _check_hosts(self) -> None:
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
        num_gpus = sum(map(is_gpu, self.devices))
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
        """The number of processes of all workers: one for each rank."""
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
        if self.device == AUTO:
            return parse_devices(found_device(self.num_processes, self._largest_worker))
        return parse_devices(self.device)

    @property
    def _largest_worker(self) -> int:
        """Most processes of one worker."""
        return max(self.degrees(role).num_ranks for pools in self.pools for role, _ in pools.workers)

    @property
    def has_store(self) -> bool:
        """Whether there are store nodes: KV store processes that keep blocks, beside the index of the pools."""
        return bool(self.store_host_bytes or self.store_disk_bytes)

    @property
    def store_names(self) -> tuple[str, ...]:
        """Names of the store nodes, those of each model together; none without a store. Which blocks a node keeps
        follows from its name, also after a restart on another port."""
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
