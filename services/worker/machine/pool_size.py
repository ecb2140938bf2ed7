"""How many KV blocks a worker's pool has."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import psutil

from shared.engine.runner.pool_memory import MemoryBudget
from shared.engine.runner.profile_run import measure_budget
from shared.engine.runner.runner import RunnerConfig
from shared.kernels.lora.parts import gpu_sum_bytes
from shared.kv.layout import BlockLayout
from shared.model.decoder import Decoder
from shared.sizing.adapter_memory import share_of_rank

if TYPE_CHECKING:  # a follower, which has no settings, reads this too
    from services.worker.settings import WorkerSettings

AUTO_POOL_SEQUENCES = 32
"""Sequences of full length that the pool is sized for with num_kv_blocks = 0; see AUTO_POOL_MEMORY_SHARE."""
AUTO_POOL_MEMORY_SHARE = 0.1
"""Largest share of the memory free at the start that such a pool takes."""


@dataclass(frozen=True, slots=True)
class PoolNeed:
    """What every rank of a group must know to say how many blocks it has room for."""

    block_size: int
    kv_dtype: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    gpu_memory: float
    host_share: float
    """Share of the free memory for a pool that lies in the host's."""
    held_bytes: int
    """Bytes of one block on all ranks of a host together, some of which may hold the same."""
    adapter_bytes: int = 0
    """Memory that is kept for adapters in slots, on all ranks together."""
    rank_adapter_bytes: int = 0
    """The most of it that one rank keeps."""
    adapter_host_bytes: int = 0
    """Memory of the host that is kept for copies of adapters, of all ranks."""
    adapter_sum_bytes: int = 0
    """What a GPU's largest step takes besides where all its rows have adapters."""
    draft_bytes: int = 0
    """Bytes beside each block for the KV of a draft model on a GPU."""
    draft_step_bytes: int = 0
    """Bytes of the draft model's graphs and largest step on a GPU."""

    def to_json(self) -> bytes:
        """JSON that `parse` reads."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def parse(cls, text: bytes) -> PoolNeed:
        """Reads the text of `to_json`."""
        return cls(**json.loads(text))

    def budget(
        self, decoder: Decoder, layout: BlockLayout, *, follows: bool = False, graphs: RunnerConfig | None = None
    ) -> MemoryBudget:
        """What this rank, or the only process, has for blocks of `layout`, its own slices. On a GPU all ranks run the
        largest step together, without adapters, whose sums are counted: `follows` and `graphs` as for
        `measure_budget`. Blocking. Raises ConfigError, RankLost."""
        if decoder.device.type == "cpu":
            available = max(0, psutil.virtual_memory().available - self.adapter_bytes - self.adapter_host_bytes)
            free = available * layout.block_bytes // self.held_bytes
            return MemoryBudget(free, step_bytes=0, share=self.host_share)
        found = measure_budget(
            decoder,
            layout,
            self.max_num_seqs,
            self.max_num_batched_tokens,
            self.max_model_len,
            self.gpu_memory,
            follows=follows,
            graphs=graphs,
        )
        step_bytes = found.step_bytes + self.adapter_sum_bytes + self.draft_step_bytes
        left = max(0, found.free_bytes - self.rank_adapter_bytes)
        # Each block takes a part of a draft's with it.
        left -= max(0, left - step_bytes) * self.draft_bytes // (layout.block_bytes + self.draft_bytes)
        return replace(found, free_bytes=left, step_bytes=step_bytes)


def pool_need(settings: WorkerSettings, layout: BlockLayout, max_len: int, held_bytes: int) -> PoolNeed:
    """`layout`: of whole blocks; `held_bytes` as in PoolNeed."""
    degrees, kept = settings.degrees, settings.adapter_bytes if settings.has_adapters else 0
    return PoolNeed(
        layout.block_size,
        layout.dtype,
        settings.max_num_seqs,
        settings.max_num_batched_tokens,
        max_len,
        settings.gpu_memory,
        1.0 if settings.num_kv_blocks else AUTO_POOL_MEMORY_SHARE,
        held_bytes,
        kept,
        share_of_rank(kept, degrees.tensor, degrees.expert),
        settings.adapter_host_bytes if settings.has_adapters else 0,
        gpu_sum_bytes(settings.max_num_batched_tokens, settings.adapter_max_rank) if settings.has_adapters else 0,
    )


def most_blocks(settings: WorkerSettings, layout: BlockLayout, max_len: int) -> int:
    """Upper bound of a pool's number of blocks when no number is configured."""
    if settings.is_on_gpu:
        return sys.maxsize
    of_one = layout.groups.num_blocks(max_len, settings.max_num_batched_tokens)
    return AUTO_POOL_SEQUENCES * of_one + layout.groups.size
