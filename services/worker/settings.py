"""Settings of prefill and decode workers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import AliasChoices, Field, ValidationInfo, field_validator
from pydantic_settings import SettingsConfigDict

from shared.address import Address, parse_named
from shared.config import ServiceSettings
from shared.errors import ConfigError
from shared.identity import Roles, WorkerRole
from shared.kv.encryption_modes import NO_ENCRYPTION
from shared.kv.packing import Compression
from shared.model.ranks.shard import Degrees
from shared.rpc.fleet_settings import FleetSettings
from shared.settings.common import (
    AdapterSettings,
    AnswerSettings,
    BlockSize,
    Degree,
    EncryptionSettings,
    EngineSettings,
)
from shared.settings.named_folders import parse_adapters
from shared.telemetry.settings import MetricsPageSettings, SpanSettings, VllmMetricsSettings

if TYPE_CHECKING:
    from shared.collectives.rank_links import Backend  # it brings torch

MIN_CHUNK = 16
CHUNK = 512
GPU_PREFILL_CHUNK = 2048
"""Tokens of a step that keep a GPU's matrix units busy."""
SEQUENCES = 64
GPU_SEQUENCES = 256
"""Rows of a decode step up to which each further one costs a GPU little beside reading the weights."""

TIMED = "timed:"

_OF_ONE_PROCESS: Mapping[str, Collection[object]] = {
    "gpu_direct": (False, "auto"),
    "piecewise_tokens": (-1, 0),
    "deterministic": (False,),
    "debug_numerics": (False,),
}
"""What a worker of several processes cannot have, and its values without."""


class WorkerSettings(
    ServiceSettings,
    FleetSettings,
    EncryptionSettings,
    MetricsPageSettings,
    VllmMetricsSettings,
    SpanSettings,
    EngineSettings,
    AdapterSettings,
    AnswerSettings,
):
    """One engine process. The environment prefix is TANDEM_WORKER_, whatever its roles."""

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        **{**ServiceSettings.model_config, "env_prefix": "TANDEM_WORKER_"}
    )

    renamed: ClassVar[Mapping[str, str]] = {"max_step_tokens": "max_num_batched_tokens"}

    name: str = Field(min_length=1, max_length=128)
    """Name of the worker: unique in the cluster, and the same after a restart."""
    bind: str = "127.0.0.1:0"
    """host:port of the session server; port 0 = any free one."""
    model: Path
    """Model folder in Hugging Face layout."""
    weights_from: str = ""
    """Workers, host:port and comma-separated, from which the model folder is fetched over UCX where it is missing or
    not whole; of a name with several addresses, any. Empty = the folder has to be there."""
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:[0-9]+(,[0-9]+)*)?|timed:.+)$")
    """Where the engine runs: cpu, cuda, or cuda:N for the GPU of that index. On cuda, decode steps are CUDA graphs, and
    each is planned while the one before runs. A worker of `tp` times `pp` processes takes that number of GPUs, the
    first ones or cuda:0,1,… in their order; there without graphs, and each step planned behind the one before.
    timed:FILE is a device of another speed: a step takes the time that FILE gives for it and computes nothing, so
    answers say nothing either; for load tests. FILE is what `make bench-engine OUT=FILE` wrote, or names the
    coefficients."""
    gpu_memory: float = Field(default=0.9, gt=0, le=1)
    """Share of the GPU's memory that this worker takes, of the whole and not of what is free: weights, steps and pool.
    Workers that share a GPU need shares that add up to less than 1."""
    gpu_direct: bool | Literal["auto"] = "auto"
    """Whether UCX sends and receives blocks straight from and into the GPU's memory, not by way of host memory; the GPU
    then also checks them and makes their tags. Only on cuda, by one process, with a UCX that has CUDA transports, and
    without block_encryption, which is done on the host. auto: where all of that is so."""
    block_compression: Compression = "off"
    """Whether hand-offs send blocks of floats packed, without loss: bf16 in some 0.7 of their bytes, fp32 and states in
    0.85. off: never, and none are taken packed; on: always, where both workers have it; auto: to another host, where
    the rates that both have measured of link, packing and unpacking say that it is faster. Only on the CPU: blocks of
    GPUs are sent as they are."""
    kernels: str = "auto"
    """Backend of the model's ops: triton (CUDA), cpu (C++), torch, or auto: the first that this machine
    supports."""
    piecewise_tokens: int = Field(default=-1, ge=-1, le=8192)
    """Longest step of prompts, or of prompts and answers, that runs as CUDA graphs between its attention calls; 0 =
    none. For 512 tokens, 24 graphs a layer are captured at the start. Only on cuda, and by one process. -1 = 512 there,
    none elsewhere."""
    cpu_isa: Literal["auto", "avx2", "avx512", "avx512-bf16", "amx", "amx-emulated", "neon", "torch"] = Field(
        default="auto", validation_alias=AliasChoices("cpu_isa", "TANDEM_WORKER_CPU_ISA", "TANDEM_CPU_ISA")
    )
    """Instruction set of the C++ kernels. auto: the fastest that the processor runs; torch: no C++ kernels;
    amx-emulated: the code for AMX with plain C++ in place of its instructions, slow, for tests. Also read from
    TANDEM_CPU_ISA."""
    debug_numerics: bool = False
    """Whether errors about NaN or infinite numbers name the part of the model where they begin. Slower."""
    tp: Degree = 1
    """Tensor-parallel degree: processes that each hold a part of every layer. It must divide the model's attention
    heads, and divide its KV heads or be a multiple of them."""
    pp: Degree = 1
    """Pipeline stages, each of `tp` processes: parts of the layers, one behind the other."""
    ep: Degree = 1
    """Expert-parallel degree, for models with experts: sets of a stage's `tp` processes, over which the experts are
    spread; the processes of a set split each of its experts. It must divide `tp`. 1: all processes split every expert;
    as `tp`: each has whole experts."""
    expert_load: str = ""
    """File of the tokens that chose each expert, which a worker with `ep` above 1 reads when it starts, where there is
    one, and writes when it has drained. By it experts move between the sets, so that the busiest has less work.
    `{name}` in it is the worker's name; each worker needs a file of its own. A worker of several stages knows the first
    one's layers, the others' experts stay where they are. Empty = adjacent experts, nothing is written."""
    expert_spare: int = Field(default=0, ge=0, le=256)
    """Experts of a layer that each set may hold beyond its even number: copies of the hottest by `expert_load`, which
    it needs. The copies of an expert share its tokens, and take memory that blocks would have. 0 = experts move, none
    is copied."""
    group_hosts: Degree = 1
    """Hosts of this worker's processes, the same number on each: it must divide `tp` times `pp`. Those of one host
    share its memory, all others reach each other over TCP, not encrypted. Above 1 only on the CPU, and without
    block_encryption."""
    group_leader: str = Field(default="", validate_default=True)
    """host:port at which the hosts of one group meet: host 0 listens there, which is the worker, the others come to it.
    With `group_hosts` above 1 alone, which needs it."""
    group_host_index: int = Field(default=0, ge=0)
    """Which host of the group this is. 0 is the worker. Any other serves no requests: it starts its part of the
    processes, again and again with each start of the worker."""
    group_address: str = ""
    """IP address of this host for the group's others. Empty = on host 0 that of `group_leader`, elsewhere the one from
    which that is reached."""
    collectives: Literal["auto", "shm", "gloo", "nccl"] = "auto"
    """What carries sums and hidden states between this worker's processes. shm: memory that they share, from within the
    C++ kernels. gloo: TCP, slower on one host. nccl: what GPUs have between them; it has not run yet. auto: shm on the
    CPU, nccl on GPUs."""
    group_pool: Literal["auto", "shared", "own"] = "auto"
    """Where the blocks of a worker of several processes lie. shared: in one pool of whole blocks, in memory that the
    processes share. own: each process has the heads and layers that it computes in a pool of its own, and a whole block
    is put together where it is sent. auto: shared on one host's CPU, own on GPUs and over several hosts."""
    num_threads: int = Field(default=0, ge=0, le=1024)
    """Compute threads; 0 = one for each core that the worker has, however many hardware threads it has, within the
    cgroup's CPU quota."""
    cpu_affinity: str = ""
    """CPUs that the process is pinned to, such as 0-3,8. Empty = a worker on the CPU keeps to one NUMA node, and off
    the slow cores of a hybrid processor."""
    kvstore: str = ""
    """host:port of the KV store; empty = no fleet index."""
    store: str = ""
    """Store nodes to offer blocks to and to fetch prefixes from: host:port or name=host:port, comma-separated; empty =
    none. The names decide which node stores which blocks, so all workers must have the same list."""
    block_size: BlockSize = 16
    """Tokens in a block."""
    max_num_seqs: int = Field(default=0, ge=0, le=4096)
    """Most sequences that hold blocks at once. 0 = 256 on a GPU, 64 otherwise."""
    max_num_batched_tokens: int = Field(default=0, ge=0, le=65536)
    """Most tokens in one step, so also the size of a prompt's chunks: at least 16. 0 = 2048 for a prefill worker on a
    GPU, 512 otherwise: a chunk's blocks are sent while the next one is computed."""
    output_length_quantile: float = Field(default=0.75, ge=0, le=1)
    """A request starts only with free blocks beyond those that running answers are expected to need. Each is expected
    to become as long as this quantile of finished answers, at most its max_tokens. 0 = one block is kept for each."""
    host_swap_bytes: int = Field(default=-1, ge=-1)
    """Host memory for the blocks of preempted sequences; 0 = they are recomputed. -1 = 256 MiB beside a pool in host
    memory, and on a GPU as much as the pool has, but at most 8 GiB and an eighth of the memory that is free. Bytes."""
    tpot_target_ms: float = Field(default=-1.0, ge=-1)
    """A decode batch grows only while its steps are predicted to take at most this, and prompts beside running answers
    are computed in chunks that leave each answer this much a token in the mean. Milliseconds; 0 = no such limit, and
    -1 = the routers' targets.tpot_s, the least of them."""
    itl_target_ms: float = Field(default=0.0, ge=0)
    """Greatest gap between two tokens of an answer that a prompt's chunk may cause, where there is a tpot target.
    Milliseconds; 0 = three times that target."""
    max_overtaken_ms: float = Field(default=100.0, ge=0)
    """Short prompts are computed first, but not before one that has waited this long. Milliseconds; 0 = in order of
    arrival."""
    drain_timeout_s: float = Field(default=30.0, ge=0)
    """Time for running requests to end after SIGTERM. Seconds."""

    @field_validator("max_num_batched_tokens")
    @classmethod
    def _check_chunk(cls, value: int) -> int:
        if 0 < value < MIN_CHUNK:
            raise ValueError(f"must be 0 or at least {MIN_CHUNK}")
        return value

    @field_validator("piecewise_tokens", "gpu_direct")
    @classmethod
    def _check_on_gpu(cls, value: int | str, info: ValidationInfo) -> int | str:
        is_wanted = value != "auto" and int(value) > 0
        if is_wanted and not _is_gpu(device := info.data.get("device", "cuda")):
            raise ValueError(f"needs a GPU: device is {device}")
        return value

    @field_validator("gpu_direct")
    @classmethod
    def _check_direct(cls, value: bool | str, info: ValidationInfo) -> bool | str:
        encryption = info.data.get("block_encryption", NO_ENCRYPTION)
        if value is True and encryption != NO_ENCRYPTION:
            raise ValueError(f"cannot be used with block_encryption {encryption}, which is done on the host")
        return value

    @field_validator("tp", "pp")
    @classmethod
    def _check_degree(cls, value: int, info: ValidationInfo) -> int:
        if value > 1:
            if (device := info.data.get("device", "cpu")).startswith(TIMED):
                raise ValueError(f"cannot be above 1 with device {device}")
            for name, without in _OF_ONE_PROCESS.items():
                if name in info.data and (found := info.data[name]) not in without:
                    raise ValueError(f"cannot be above 1 with {name} {found}")
        return value

    @field_validator("adapters")
    @classmethod
    def _check_named(cls, value: str) -> str:
        try:
            parse_adapters(value)
        except ConfigError as error:
            raise ValueError(error.message) from error
        return value

    @field_validator("weights_from")
    @classmethod
    def _check_peers(cls, value: str) -> str:
        try:
            parse_named(value, "weights_from", unnamed=True)
        except ConfigError as error:
            raise ValueError(error.message) from error
        return value

    @field_validator("ep")
    @classmethod
    def _check_expert_degree(cls, value: int, info: ValidationInfo) -> int:
        if (tp := info.data.get("tp", value)) % value:
            raise ValueError(f"must divide tp, which is {tp}")
        return value

    @field_validator("expert_load")
    @classmethod
    def _check_expert_load(cls, value: str, info: ValidationInfo) -> str:
        if value and info.data.get("ep", 2) == 1:
            raise ValueError("needs ep above 1: there is one set of processes, which has all experts")
        return value

    @field_validator("expert_spare")
    @classmethod
    def _check_expert_spare(cls, value: int, info: ValidationInfo) -> int:
        if value and not info.data.get("expert_load", "-"):
            raise ValueError(f"is {value}, but without expert_load nothing says which experts are hot")
        return value

    @field_validator("group_hosts")
    @classmethod
    def _check_hosts(cls, value: int, info: ValidationInfo) -> int:
        if value == 1:
            return value
        for name, only in (("device", "cpu"), ("block_encryption", NO_ENCRYPTION)):
            if (found := info.data.get(name, only)) != only:
                raise ValueError(f"cannot be above 1 with {name} {found}")
        tp, pp = info.data.get("tp", value), info.data.get("pp", 1)
        if tp * pp % value:
            raise ValueError(f"is {value}, which does not divide the {tp * pp} processes of tp {tp} and pp {pp}")
        return value

    @field_validator("group_leader")
    @classmethod
    def _check_leader(cls, value: str, info: ValidationInfo) -> str:
        hosts = info.data.get("group_hosts", 1)
        if bool(value) != (hosts > 1):
            raise ValueError(f"is {'given' if value else 'missing'}, and group_hosts is {hosts}")
        if value:
            try:
                Address.parse(value, "group_leader", min_port=1)
            except ConfigError as error:
                raise ValueError(error.message) from error
        return value

    @field_validator("group_host_index")
    @classmethod
    def _check_host_index(cls, value: int, info: ValidationInfo) -> int:
        if value >= (hosts := info.data.get("group_hosts", value + 1)):
            raise ValueError(f"is {value}, and with group_hosts {hosts} the last one is {hosts - 1}")
        return value

    @field_validator("group_address")
    @classmethod
    def _check_address(cls, value: str) -> str:
        if value:
            ip_address(value)
        return value

    @field_validator("collectives")
    @classmethod
    def _check_collectives(cls, value: str, info: ValidationInfo) -> str:
        if value == ("shm" if _is_gpu(info.data.get("device", "cpu")) else "nccl"):
            raise ValueError(f"cannot be {value} with device {info.data.get('device')}")
        return value

    @field_validator("group_pool")
    @classmethod
    def _check_group_pool(cls, value: str, info: ValidationInfo) -> str:
        if value == "shared" and (hosts := info.data.get("group_hosts", 1)) > 1:
            raise ValueError(f"cannot be shared by {hosts} hosts: each has its own memory")
        if value == "shared" and _is_gpu(device := info.data.get("device", "cpu")):
            raise ValueError(f"cannot be shared with device {device}: each GPU has its own memory")
        return value

    @property
    def has_adapters(self) -> bool:
        """Whether requests may ask for adapters."""
        return bool(self.adapters or self.adapter_folders)

    @property
    def degrees(self) -> Degrees:
        """How the model is split over processes."""
        return Degrees(self.tp, self.pp, self.ep)

    @property
    def devices(self) -> tuple[str, ...]:
        """Device of each rank. Raises ConfigError where `device` does not name as many GPUs as there are ranks."""
        ranks = self.degrees.num_ranks
        if not self.is_on_gpu:
            return ("cpu",) * ranks
        name, _, numbers = self.device.partition(":")
        if not numbers:
            return (name,) if ranks == 1 else tuple(f"{name}:{rank}" for rank in range(ranks))
        devices = tuple(f"{name}:{int(number)}" for number in numbers.split(","))
        if len(devices) != ranks or len(set(devices)) != ranks:
            named = len(set(devices))
            raise ConfigError(
                f"device {self.device} names {named} GPUs, and tp {self.tp} times pp {self.pp} takes {ranks}",
                field="device",
                value=self.device,
                limit=ranks,
            )
        return devices

    @property
    def backend(self) -> Backend:
        """What carries the sums of a group."""
        if self.collectives == "auto":
            return "nccl" if self.is_on_gpu else "shm"
        return self.collectives

    @property
    def has_own_pools(self) -> bool:
        """Whether each rank of a group has a pool of its own."""
        if self.group_pool == "auto":
            return self.is_on_gpu or self.group_hosts > 1
        return self.group_pool == "own"

    @property
    def is_on_gpu(self) -> bool:
        """Whether the engine runs on a GPU."""
        return _is_gpu(self.device)

    @property
    def sends_from_gpu(self) -> bool:
        """Whether blocks are to leave straight from a GPU's memory, where UCX can."""
        if self.gpu_direct != "auto":
            return self.gpu_direct
        return _is_gpu(self.device) and self.tp * self.pp == 1 and self.block_encryption == NO_ENCRYPTION

    @property
    def step_times(self) -> Path | None:
        """The file of a timed device; None for one that computes."""
        return Path(self.device.removeprefix(TIMED)) if self.device.startswith(TIMED) else None

    @property
    def may_draft(self) -> bool:
        """Whether its device lets it ask a draft model."""
        return not self.is_on_gpu and self.step_times is None

    @property
    def head_folder(self) -> Path | None:
        """Folder of a head that is not the checkpoint's own."""
        return Path(self.draft) if self.draft and self.speculation == "heads" else None

    def for_roles(self, roles: Roles) -> Self:
        """The same settings, with the defaults that depend on the roles filled in, and no draft model where nothing
        would ask it."""
        # Chunks delay the tokens of running answers; a worker that only prefills has none.
        chunk = GPU_PREFILL_CHUNK if self.is_on_gpu and WorkerRole.DECODE not in roles else CHUNK
        num_seqs = GPU_SEQUENCES if self.is_on_gpu else SEQUENCES
        filled = {
            "max_num_batched_tokens": self.max_num_batched_tokens or chunk,
            "max_num_seqs": self.max_num_seqs or num_seqs,
            "draft": self.draft if self.head_folder or (WorkerRole.DECODE in roles and self.may_draft) else "",
        }
        return self.model_copy(update=filled)


def _is_gpu(device: str) -> bool:
    return device.startswith("cuda")
