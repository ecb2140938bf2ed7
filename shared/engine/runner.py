"""Tensors on the other side of the plan: inputs of one step, the model, the sampler, the KV pool's memory."""

from __future__ import annotations

from itertools import accumulate, chain

import torch
from torch import Tensor

from shared.engine.plan import PlannedSequence, StepPlan, StepResult
from shared.engine.sampler import sample
from shared.kernels.batch import AttentionBatch
from shared.kv.checksum import BlockChecksum
from shared.kv.layout import BlockLayout
from shared.model.decoder import Decoder


class Runner:
    """Runs planned steps of one model over one KV pool. Called by the engine thread alone."""

    def __init__(self, decoder: Decoder, layout: BlockLayout, num_blocks: int) -> None:
        """Allocates the pool: num_blocks * layout.block_bytes bytes on the model's device."""
        self.layout = layout
        self._decoder = decoder
        self._device = decoder.device
        dtype = getattr(torch, layout.dtype)
        # [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]; zeros, because a masked-out position of a
        # block never written must not be NaN (0 * NaN is NaN).
        self.kv_blocks: Tensor = torch.zeros(layout.shape(num_blocks), dtype=dtype, device=self._device)
        self._checksum = BlockChecksum(layout.block_bytes // 8, self._device)

    def execute(self, plan: StepPlan) -> StepResult:
        """Computes the plan's tokens, writes their K and V into the pool, samples where the plan says so."""
        items = plan.sequences
        token_ids = torch.tensor(list(chain.from_iterable(item.token_ids for item in items)), dtype=torch.int64)
        positions = torch.cat([torch.arange(item.start, item.end, dtype=torch.int64) for item in items])
        query_lens = [len(item.token_ids) for item in items]
        batch = AttentionBatch.from_lists(
            query_lens,
            [item.end for item in items],
            [item.block_ids for item in items],
            self.layout.block_size,
            self._device,
        )
        ends = accumulate(query_lens)
        rows = [end - 1 for end, item in zip(ends, items, strict=True) if item.sample is not None]
        lengths = _rope_lengths(items) if self._decoder.rotary.needs_lengths else None
        logits = self._decoder.forward(
            token_ids.to(self._device),
            positions.to(self._device),
            self.kv_blocks,
            batch,
            torch.tensor(rows, dtype=torch.int64, device=self._device),
            lengths.to(self._device) if lengths is not None else None,
        )
        specs = [item.sample for item in items if item.sample is not None]
        return StepResult(sample(logits, specs) if specs else ())

    def checksums(self, block_ids: list[int]) -> list[int]:
        """Checksums of these blocks as they are now."""
        return self._checksum.checksum_blocks(self.kv_blocks, block_ids)

    def block_bytes(self, block_id: int) -> memoryview:
        """The memory of one block, writable, without a copy: what the transfer sends from and receives into."""
        flat = self.kv_blocks[block_id].reshape(-1).view(torch.uint8)
        return memoryview(flat.numpy())  # type: ignore[arg-type]  # an ndarray is a buffer


def _rope_lengths(items: tuple[PlannedSequence, ...]) -> Tensor:
    """For dynamic rope scaling, the sequence length that each token's frequencies are for: [num_tokens] int64.

    A prompt token takes its prompt's length, an output token its own position + 1, so that the rotation of a token
    depends on neither chunking nor the worker.
    """
    lengths = [max(item.num_prompt_tokens, position + 1) for item in items for position in range(item.start, item.end)]
    return torch.tensor(lengths, dtype=torch.int64)
