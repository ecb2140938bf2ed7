"""One source's part of a fetch."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.block_service.client import BlockClient
from shared.kv.transfer import Incoming


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A store node or a peer."""

    name: str
    """The node's, or the peer's host:port."""
    client: BlockClient
    is_peer: bool


@dataclass(slots=True, eq=False)
class SourceFetch:
    """The blocks that one source brings, in the order of the chain."""

    source: Source
    key: str
    """Of the whole fetch, in commands to the engine."""
    hashes: tuple[bytes, ...]
    """All that the engine was asked to prepare for."""
    blocks: list[tuple[int, int]]
    """(place in `hashes`, block id)."""
    unsafe: Incoming | None = None
    """Where a silent sender may still write to the blocks, the receives that it may end."""
    names: list[bytes] = field(init=False)
    """Hashes of `blocks`."""

    def __post_init__(self) -> None:
        self.names = [self.hashes[place] for place, _ in self.blocks]
