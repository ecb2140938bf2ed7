"""Settings of a worker of several processes: degrees, hosts, and what they send each other."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from ipaddress import ip_address
from typing import TYPE_CHECKING, Literal

from pydantic import Field, ValidationInfo, field_validator

from services.worker.device_settings import TIMED, DeviceSettings, is_gpu
from shared.address import Address
from shared.errors import ConfigError
from shared.kv.encryption_modes import NO_ENCRYPTION
from shared.model.ranks.shard import Degrees
from shared.settings.common import Degree

if TYPE_CHECKING:
    from shared.collectives.rank_links import Backend  # it brings torch

_OF_ONE_PROCESS: Mapping[str, Collection[object]] = {
    "gpu_direct": (False, "auto"),
    "piecewise_tokens": (-1, 0),
    "deterministic": (False,),
    "debug_numerics": (False,),
}
"""What a worker of several processes cannot have, and its values without."""


class GroupSettings(DeviceSettings):
    """How a worker's model is split over processes, and where these run. One process is a group of one."""

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
        if value == ("shm" if is_gpu(info.data.get("device", "cpu")) else "nccl"):
            raise ValueError(f"cannot be {value} with device {info.data.get('device')}")
        return value

    @field_validator("group_pool")
    @classmethod
    def _check_group_pool(cls, value: str, info: ValidationInfo) -> str:
        if value == "shared" and (hosts := info.data.get("group_hosts", 1)) > 1:
            raise ValueError(f"cannot be shared by {hosts} hosts: each has its own memory")
        if value == "shared" and is_gpu(device := info.data.get("device", "cpu")):
            raise ValueError(f"cannot be shared with device {device}: each GPU has its own memory")
        return value

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
