"""What a leader tells a follower's process at its start, as one argument of its command line."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from shared.collectives import one_host, several_hosts
from shared.collectives.rank_links import Backend, RankLinks, Ways
from shared.collectives.several_hosts import MeetingPlace
from shared.cores.core_choice import CoreShare
from shared.model.layers.expert_placement import Placement
from shared.model.ranks.shard import Degrees
from shared.model.weights.plan import Quantization
from shared.telemetry.logs import LogFormat, LogLevel


@dataclass(frozen=True, slots=True)
class RankSpec:
    """One follower."""

    name: str
    """Name of the worker."""
    rank: int
    tensor: int
    pipeline: int
    expert: int
    backend: Backend
    """What carries sums and hidden states."""
    senders: tuple[int, ...]
    """The field of the same name of `Ways`."""
    descriptors: tuple[int, ...]
    """Inherited: those of `shared_memories`, then the memory of the pool that all share."""
    model: str
    """Model folder."""
    dtype: str
    """As torch names it; chosen by the leader, like the rest."""
    kernels: str
    device: str
    """The rank's own device."""
    num_threads: int
    cpus: tuple[int, ...]
    """CPUs that it is pinned to; none = not pinned."""
    log_format: LogFormat = "text"
    log_level: LogLevel = "info"
    hosts: int = 1
    """The field of the same name of `Ways`."""
    place: MeetingPlace | None = None
    """Where the ranks of several hosts find each other; None on one."""
    quantization: Quantization = "auto"
    """Kind that plain weights are rounded to."""
    has_adapters: bool = False
    """The field of the same name of `Ways`."""

    @property
    def degrees(self) -> Degrees:
        """How the group splits the model."""
        return Degrees(self.tensor, self.pipeline, self.expert)

    @property
    def ways(self) -> Ways:
        """Which groups the ranks form."""
        return Ways(
            self.tensor,
            self.pipeline,
            self.backend,
            senders=self.senders,
            hosts=self.hosts,
            has_adapters=self.has_adapters,
        )

    def of_rank(self, rank: int, descriptors: tuple[int, ...], share: CoreShare, device: str) -> RankSpec:
        """The spec of another rank of the group, with that rank's descriptors, cores and device."""
        threads, cpus = share.num_threads, tuple(share.cpus)
        return replace(self, rank=rank, descriptors=descriptors, device=device, num_threads=threads, cpus=cpus)

    def join(self, library: ctypes.CDLL, check: Callable[[], None] = lambda: None) -> RankLinks:
        """This rank's links, when all ranks have come; `check` as for `one_host.join`. Raises RankLost."""
        memories = self.descriptors[:-1]
        if self.place is None:
            return one_host.join(library, memories, self.rank, self.ways, check)
        return several_hosts.join(library, memories, self.rank, self.ways, self.place, check)

    @property
    def folder(self) -> Path:
        """The model folder."""
        return Path(self.model)

    def to_json(self) -> str:
        """JSON that `parse` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> RankSpec:
        """Reads the text that `to_json` gave in a leader of the same build."""
        fields = json.loads(text)
        lists = {name: tuple(fields[name]) for name in ("senders", "descriptors", "cpus")}
        place = None if fields["place"] is None else MeetingPlace(**fields["place"])
        return cls(**fields | lists | {"place": place})


@dataclass(frozen=True, slots=True)
class PlacementSpec:
    """Where experts lie, before any rank reads its own: too long for a command line."""

    placement: Placement

    def to_json(self) -> bytes:
        """JSON that `parse` reads."""
        return json.dumps(self.placement).encode()

    @classmethod
    def parse(cls, text: bytes) -> PlacementSpec:
        """Reads the text of `to_json`."""
        layers = json.loads(text)
        return cls(tuple(None if sets is None else tuple(tuple(experts) for experts in sets) for sets in layers))


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """The pool, once the leader has chosen its size; and what a follower must have in common with it."""

    num_blocks: int
    block_size: int
    kv_dtype: str
    num_host_blocks: int
    """Blocks of each rank's host memory for preempted sequences, where it has a pool of its own."""
    max_num_seqs: int
    max_num_batched_tokens: int
    identity: str
    """The checkpoint's fingerprint in the dtype computed in."""

    def to_json(self) -> bytes:
        """JSON that `parse` reads."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def parse(cls, text: bytes) -> PoolSpec:
        """Reads the text of `to_json`."""
        return cls(**json.loads(text))
