"""What a local cluster should be: one frozen value, checked where it is built."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from services.local.devices import CPU, parse_devices
from shared.address import MAX_PORT, Address
from shared.errors import ConfigError
from shared.kv.encryption import Encryption
from shared.telemetry.logs import LogFormat

Mode = Literal["disaggregated", "collocated"]
Dtype = Literal["auto", "fp32", "bf16", "fp16"]
KVDtype = Literal["auto", "fp32", "bf16"]
PrefixFetch = Literal["auto", "always", "never"]

DEFAULT_HTTP = "127.0.0.1:8000"
DEFAULT_GRPC = "127.0.0.1:50051"
DEMO_MODEL = Path(__file__).resolve().parents[2] / "models" / "demo"
"""Of the checkout or of the installed wheel."""
MAX_WORKERS = 64
"""Most workers of one role on one machine."""
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
    device: str = CPU
    """Where the workers run: cpu, cuda, or cuda:0,1,… for GPUs that they are dealt to in turn, prefill first."""
    gpu_memory: float = 0.9
    """Share of each GPU's memory, for all the workers on it together."""
    http: str = DEFAULT_HTTP
    """host:port of the OpenAI API; port 0 = any free one."""
    grpc: str = DEFAULT_GRPC
    """host:port of tandem.v1.InferenceService; port 0 = any free one."""
    served_model_name: str = ""
    """What clients call the model; empty = the folder's name."""
    num_kv_blocks: int = 0
    """Blocks in each worker's KV pool; 0 = from free memory."""
    max_model_len: int = 0
    """Longest sequence in tokens; 0 = the model's own limit."""
    store_nodes: int = 1
    """Processes that keep blocks evicted from the workers' pools, where memory or disk is configured for that."""
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
    restart: bool = False
    """Whether a process that dies is started again, and one that hangs is killed for that."""
    hang_timeout_s: float = 30.0
    """A process that answered probes and has not for this long hangs; a shorter stall is only a pause. Seconds."""
    state_dir: Path = Path(".tandem")
    """Holds logs/."""
    start_timeout_s: float = 600.0
    """How long one process may take until it is ready, seconds."""
    stop_timeout_s: float = 40.0
    """How long one process may take to drain before it is killed, seconds: above the services' own limits."""

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("mode", self.mode, get_args(Mode)),
            ("dtype", self.dtype, get_args(Dtype)),
            ("kv_dtype", self.kv_dtype, get_args(KVDtype)),
            ("block_encryption", self.block_encryption, get_args(Encryption)),
            ("prefix_fetch", self.prefix_fetch, get_args(PrefixFetch)),
            ("log_format", self.log_format, get_args(LogFormat)),
        ):
            if value not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}", field=name)
        fewest = 0 if self.mode == "collocated" else 1
        most = 0 if self.mode == "collocated" else MAX_WORKERS
        _check_range("prefill", self.num_prefill, fewest, most, f" in {self.mode} mode")
        _check_range("decode", self.num_decode, 1, MAX_WORKERS)
        _check_range("routers", self.num_routers, 1, MAX_ROUTERS)
        _check_range("num_kv_blocks", self.num_kv_blocks, 0, 2**31 - 1)
        _check_range("max_model_len", self.max_model_len, 0, 2**31 - 1)
        num_gpus = sum(device != CPU for device in self.devices)
        if num_gpus > (num_workers := self.num_prefill + self.num_decode):
            raise ConfigError(f"device names {num_gpus} GPUs for {num_workers} workers", field="device")
        if not 0 < self.gpu_memory <= 1:
            raise ConfigError(f"gpu_memory must be above 0 and at most 1, got {self.gpu_memory}", field="gpu_memory")
        _check_range("store_nodes", self.store_nodes, 1, MAX_WORKERS)
        _check_range("store_host_bytes", self.store_host_bytes, 0, 2**63 - 1)
        _check_range("store_disk_bytes", self.store_disk_bytes, 0, 2**63 - 1)
        if self.store_disk_bytes and self.store_disk_folder is None:
            raise ConfigError("store_disk_bytes is set, but no store_disk_folder", field="store_disk_folder")
        self._check_routers()

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


def _check_range(field: str, value: int, low: int, high: int, where: str = "") -> None:
    if not low <= value <= high:
        limit = f"{low}" if low == high else f"between {low} and {high}"
        raise ConfigError(f"{field} must be {limit}{where}, got {value}", field=field, value=value)
