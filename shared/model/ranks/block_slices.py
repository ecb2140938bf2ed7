"""Which part of a block of KV each rank of a group holds, and which of the holders of a part sends it. Pure
arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from shared.model.config.model_config import ModelConfig
from shared.model.ranks.shard import Degrees, Shard, Span


@dataclass(frozen=True, slots=True)
class BlockSlice:
    """One rank's part of every block."""

    layers: Span
    heads: Span
    """KV heads; latents are one head of all ranks of a stage."""
    is_sender: bool
    """Whether no rank before this one holds the same: a block is made of the senders' slices."""


def block_slices(config: ModelConfig, degrees: Degrees) -> tuple[BlockSlice, ...]:
    """The slice of each rank."""
    shards = [Shard(config, degrees, rank) for rank in range(degrees.num_ranks)]
    held = [(shard.layers, shard.kv_heads) for shard in shards]
    return tuple(
        BlockSlice(layers, heads, held.index((layers, heads)) == rank) for rank, (layers, heads) in enumerate(held)
    )


def senders(config: ModelConfig, degrees: Degrees) -> tuple[int, ...]:
    """Ranks that send; the first rank is one of them."""
    return tuple(rank for rank, part in enumerate(block_slices(config, degrees)) if part.is_sender)
