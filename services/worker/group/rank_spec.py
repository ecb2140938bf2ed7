"""What a leader tells a follower's process at its start, as one argument of its command line."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from shared.model.expert_placement import Placement
from shared.model.shard import Degrees
from shared.telemetry.logs import LogFormat, LogLevel


@dataclass(frozen=True, slots=True)
class RankSpec:
    """One follower."""

    name: str
    """Of the worker."""
    rank: int
    tensor: int
    pipeline: int
    expert: int
    descriptors: tuple[int, ...]
    """Inherited: the memory of `rank_links.memberships`, then that of the pool."""
    model: str
    """Model folder."""
    dtype: str
    """As torch names it; chosen by the leader, like the rest."""
    kernels: str
    num_threads: int
    cpus: tuple[int, ...]
    """That it is pinned to; none = not pinned."""
    log_format: LogFormat = "text"
    log_level: LogLevel = "info"

    @property
    def degrees(self) -> Degrees:
        """How the group splits the model."""
        return Degrees(self.tensor, self.pipeline, self.expert)

    @property
    def folder(self) -> Path:
        """The model folder."""
        return Path(self.model)

    def to_json(self) -> str:
        """For `parse`."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> RankSpec:
        """What `to_json` gave in the leader of the same build."""
        fields = json.loads(text)
        return cls(**{**fields, "descriptors": tuple(fields["descriptors"]), "cpus": tuple(fields["cpus"])})


@dataclass(frozen=True, slots=True)
class PlacementSpec:
    """Where experts lie, before any rank reads its own: too long for a command line."""

    placement: Placement

    def to_json(self) -> bytes:
        """For `parse`."""
        return json.dumps(self.placement).encode()

    @classmethod
    def parse(cls, text: bytes) -> PlacementSpec:
        """What `to_json` gave."""
        layers = json.loads(text)
        return cls(tuple(None if sets is None else tuple(tuple(experts) for experts in sets) for sets in layers))


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """The pool, once the leader has chosen its size; and what a follower must have in common with it."""

    num_blocks: int
    block_size: int
    kv_dtype: str
    identity: str
    """The checkpoint's fingerprint in the dtype computed in."""

    def to_json(self) -> bytes:
        """For `parse`."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def parse(cls, text: bytes) -> PoolSpec:
        """What `to_json` gave."""
        return cls(**json.loads(text))
