"""Decode steps over tensors that never move, at fixed batch sizes: what a CUDA graph can capture."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.engine.plan import StepPlan
from shared.engine.runner.cuda_graphs import CudaGraphs, Replayable, capture_sizes, padded_size
from shared.engine.runner.device_link import DeviceLink
from shared.engine.runner.static_inputs import StaticInputs, StaticTables
from shared.kernels.batch import AttentionBatch
from shared.model.decoder import Decoder


class StaticDecode:
    """Runs steps in which every sequence computes one token and samples the next.

    A step is padded to the next of the capture sizes. Padding rows read and write one block of the pool that no
    sequence uses. With graphs, `start()` captures each size; without, the same function runs eagerly.
    """

    def __init__(
        self,
        decoder: Decoder,
        # [num_blocks + 1, num_layers, num_planes, num_kv_heads, block_size, head_dim]: the last is for padding
        kv_blocks: Tensor,
        max_batch: int,
        max_seq_len: int,
        link: DeviceLink,
        graphs: CudaGraphs | None,
    ) -> None:
        """Allocates the buffers of every capture size; max_seq_len in tokens. `graphs`: None = steps run eagerly."""
        self._decoder = decoder
        self._kv_blocks = kv_blocks
        self._block_size = kv_blocks.shape[4]
        self._sizes = capture_sizes(max_batch)
        self._inputs = {size: StaticInputs(size, link) for size in self._sizes}
        self._tables = StaticTables(max_batch, -(-max_seq_len // self._block_size), kv_blocks.shape[0] - 1, link)
        device = link.device
        self._query_start = torch.arange(max_batch + 1, dtype=torch.int32, device=device)
        self._logit_rows = torch.arange(max_batch, dtype=torch.int64, device=device)
        self.sampled: Tensor = torch.zeros(max_batch, dtype=torch.int64, device=device)
        """[max_batch] int64, the tokens that the last step sampled; -1 where there was nothing to choose."""
        self._graphs = graphs
        self._captured: dict[int, tuple[Replayable, Tensor]] = {}  # by size, with its logits

    def start(self) -> None:
        """Captures the graphs, where there are graphs; the largest first, so that the others fit into its memory."""
        if self._graphs is None:
            return
        for size in reversed(self._sizes):
            self._captured[size] = self._graphs.capture(
                lambda size=size: self._forward(size, (1,) * size)  # type: ignore[misc]
            )

    def takes(self, plan: StepPlan) -> bool:
        """Whether `run` can run this step."""
        if len(plan.sequences) > self._sizes[-1]:
            return False
        width = self._tables.width
        for item in plan.sequences:
            if item.sample is None or len(item.token_ids) != 1 or item.targets or len(item.block_ids) > width:
                return False
        return True

    def run(self, plan: StepPlan) -> tuple[Tensor, Tensor]:
        """([n, vocab_size] fp32 logits, [n] int64 tokens) of the plan's n sequences; both hold until the next step.

        Tokens are sampled from the logits as they are: no penalties, nothing banned.
        """
        items = plan.sequences
        size = padded_size(self._sizes, len(items))
        self._inputs[size].fill(items)
        self._tables.fill([item.block_ids for item in items], size)
        if self._graphs is None:
            logits = self._forward(size, [*(item.end for item in items), *[1] * (size - len(items))])
        else:
            graph, logits = self._captured[size]
            graph.replay()
        return logits[: len(items)], self.sampled[: len(items)]

    def _forward(self, size: int, kv_lens: Sequence[int]) -> Tensor:
        """[size, vocab_size] logits of the present inputs; writes `sampled`. Does nothing that a graph cannot hold.

        Kernels that follow the lengths on the device ignore `kv_lens`.
        """
        inputs, tables = self._inputs[size], self._tables.tables[:size]
        earlier = self.sampled.index_select(0, inputs.pending.clamp(min=0)).clamp(min=0)
        token_ids = torch.where(inputs.pending < 0, inputs.token_ids, earlier)
        positions = inputs.seq_lens.long() - 1
        blocks = tables.gather(1, (positions // self._block_size)[:, None])[:, 0].long()
        batch = AttentionBatch(
            query_start=self._query_start[: size + 1],
            seq_lens=inputs.seq_lens,
            block_tables=tables,
            slots=blocks * self._block_size + positions % self._block_size,
            query_lens=(1,) * size,
            kv_lens=tuple(kv_lens),
            block_size=self._block_size,
        )
        lengths = inputs.rope_lengths if self._decoder.rotary.needs_lengths else None
        rows = self._logit_rows[:size]
        logits = self._decoder.forward(token_ids, positions, self._kv_blocks, batch, rows, lengths)
        self.sampled[:size].copy_(self._decoder.kernels.sample_tokens(logits, inputs.rows()))
        return logits
