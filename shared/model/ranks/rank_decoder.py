"""A decoder's part on one rank of a group: its heads, columns and experts, its rows of the vocabulary, its stage's
layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from shared.collectives.rank_links import RankLinks
from shared.kernels.backend import Kernels
from shared.kernels.backends.registry import choose_kernels
from shared.kernels.batch import AttentionBatch
from shared.kernels.cpu.torch_threads import in_this_thread
from shared.kernels.layer_stack import LayerInputs
from shared.kernels.lora.parts import MAX_RANK
from shared.kernels.lora.step import Loras
from shared.kernels.pool_view import PoolView
from shared.kv.layout import BlockLayout
from shared.model.adapters.adapter import MAX_BYTES, Adapter, read_adapter
from shared.model.decoder import Decoder
from shared.model.families.registry import load_config
from shared.model.layers.expert_copies import slot_owners
from shared.model.layers.expert_placement import Placement
from shared.model.layers.parameters import DecoderParameters
from shared.model.ranks.adapter_part import ShardOfAdapter
from shared.model.ranks.shard import Degrees, Shard, Span
from shared.model.ranks.shard_weights import allocate_shard, load_shard
from shared.model.ranks.split_vocabulary import SplitVocabulary
from shared.model.weights.checkpoint import Checkpoint
from shared.model.weights.loader import OnProgress, ask_for_huge_pages
from shared.model.weights.plan import AS_STORED, Quantization, WeightPlan


class MicroBatch(NamedTuple):
    """Some sequences of a step, as `Decoder.forward` takes them."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    batch: AttentionBatch
    logit_rows: Tensor  # [num_logits] int64
    rope_lengths: Tensor | None  # [num_tokens] int64
    loras: Loras | None = None


class RankDecoder(Decoder):
    """See `Decoder`. Every rank of the group makes the same calls; only the leader gets logits.

    KV blocks are the whole model's, in memory that the ranks share: each reads and writes its own layers and heads. Or
    they are this rank's slices alone, `own_layout`, in a pool of its own. Latents are one head of all ranks of a stage,
    which write the same bits.
    """

    is_split = True

    def __init__(self, shard: Shard, parameters: DecoderParameters, kernels: Kernels, links: RankLinks) -> None:
        """`parameters`: as `allocate_shard` makes them."""
        layers = shard.layers
        # Where layers have states, a stage's KV and states lie among those of the whole model's KV groups.
        places = None if shard.config.delta is None else shard.config.layer_places[layers.begin : layers.end]
        super().__init__(shard.local_config, parameters, kernels, links.stage, places)
        self.config = shard.config
        self.num_stages = shard.degrees.pipeline
        self.waits_for_ranks = not links.on_device
        self._shard = shard
        self._links = links
        self._owners = {layer: slot_owners(shard.expert_sets(layer)) for layer in self.pieces.num_chosen}
        self._vocabulary = SplitVocabulary(shard, self._modules, links.stage, links.head)

    @classmethod
    def load_rank(
        cls,
        folder: Path,
        dtype: torch.dtype,
        kernels: str,
        degrees: Degrees,
        links: RankLinks,
        on_progress: OnProgress | None = None,
        placement: Placement = (),
        device: torch.device | str = "cpu",
        quantization: Quantization = AS_STORED,
    ) -> RankDecoder:
        """Reads this rank's slice of a model folder onto its device; `placement` is the same on all ranks, and so is
        `quantization`, as for `Decoder.load`.

        Raises:
            ConfigError: the model cannot be split so; see `Degrees.check` and `load_shard`. Those kernels cannot serve
                this dtype.
            ModelLoadError: the folder cannot be served; see `load_config` and `load_shard`.
        """
        if torch.device(device).type == "cpu":
            ask_for_huge_pages()
        config = load_config(folder)
        degrees.check(config)
        shard = Shard(config, degrees, links.everyone.rank, placement)
        with Checkpoint.of(folder, ahead=torch.device(device).type == "cuda") as checkpoint:
            plan = WeightPlan.make(checkpoint, config, quantization, device=device)
            parameters = allocate_shard(shard, dtype, device, plan.specs)
            load_shard(checkpoint, shard, plan, parameters, on_progress)
        decoder = cls(shard, parameters, choose_kernels(device, dtype, kernels), links)
        decoder.quantization = plan.kinds
        return decoder

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        pool: PoolView,
        batch: AttentionBatch,
        logit_rows: Tensor,
        rope_lengths: Tensor | None = None,
        num_candidates: int = 0,
        loras: Loras | None = None,
    ) -> Tensor:
        """See `Decoder`; `loras` are of this rank's slices. Raises RankLost."""
        whole = MicroBatch(token_ids, positions, batch, logit_rows, rope_lengths, loras)
        return self.forward_parts((whole,), pool, num_candidates)

    def forward_parts(self, parts: Sequence[MicroBatch], pool: PoolView, num_candidates: int = 0) -> Tensor:
        """`forward` for several batches of one step, one behind the other through the stages: [num_logits, vocab_size]
        of all parts on the leader, unspecified elsewhere.

        Logits follow when all parts have passed: no stage waits for one that comes after it.
        """
        pool = self._own(pool)
        normed = [self._through(part, pool) for part in parts]
        return self._vocabulary.logits(torch.cat(normed), num_candidates)

    def spread(self, token_ids: Tensor) -> None:
        """Fills `token_ids` [num_tokens] int64 with the leader's on the ranks that embed them, in the order of their
        calls; the others' mean nothing. Raises RankLost."""
        if self._links.behind is None and self._links.stage is not None:
            self._links.stage.broadcast(token_ids)

    def read_adapter(self, folder: Path, *, max_rank: int = MAX_RANK, max_bytes: int = MAX_BYTES) -> Adapter:
        """See `Decoder`: this rank's part."""
        return read_adapter(folder, self.config, ShardOfAdapter(self._shard), max_rank=max_rank, max_bytes=max_bytes)

    def expert_tokens(self) -> list[int]:
        """See `Decoder`: of this stage's layers and ranks. A choice counts for each rank with a part of the copy that
        computes it."""
        degrees = self._shard.degrees
        of_sets = torch.zeros(degrees.expert, dtype=torch.int64, device="cpu")
        for layer, counts in self.pieces.num_chosen.items():
            of_sets.scatter_add_(0, self._owners[layer].flatten(), counts.flatten())
        return [int(of_sets[part // degrees.expert_slices]) for part in range(degrees.tensor)]

    def expert_counts(self) -> dict[int, tuple[int, ...]]:
        """For this stage's layers with experts, numbered as in the whole model: tokens that chose each expert since
        start, [num_experts]. From any thread."""
        chosen = self.pieces.num_chosen.items()
        return {self._shard.layers.begin + layer: tuple(counts.sum(1).tolist()) for layer, counts in chosen}

    def own_layout(self, block_size: int, kv_dtype: str) -> BlockLayout:
        """Layout of this rank's slices of blocks; arguments as for `ModelConfig.block_layout`."""
        grouped = self._shard.degrees.has_kv_groups
        return self._shard.local_config.block_layout(block_size, kv_dtype, grouped=grouped)

    def _own(self, pool: PoolView) -> PoolView:
        layers, heads = self._shard.layers, self._shard.kv_heads
        if self.config.delta is not None:
            layers = Span(0, pool.num_layers)
        if pool.num_layers <= layers.length and pool.num_kv_heads == heads.length:
            return pool
        return pool.part(slice(layers.begin, layers.end), slice(heads.begin, heads.end))

    def _through(self, part: MicroBatch, pool: PoolView) -> Tensor:
        """This stage's layers: [num_logits, hidden_size] of the wanted rows, on the last stage normed."""
        links, batch = self._links, part.batch
        if links.behind is None:
            x = self._vocabulary.embed(part.token_ids)
        else:
            shape = batch.num_tokens, self.config.hidden_size
            x = torch.empty(shape, dtype=self.dtype, device=self.device)
            links.behind.broadcast(x)
        with in_this_thread(x, x.numel()):
            cos, sin = self.rotary.cos_sin(part.positions, part.rope_lengths)
        inputs = LayerInputs(x, cos, sin, pool, batch, part.loras)
        if links.ahead is None:
            return self._run(inputs, part.logit_rows)
        links.ahead.broadcast(self._residual(inputs))
        return x[part.logit_rows]  # of no meaning but its shape

    def _residual(self, inputs: LayerInputs) -> Tensor:
        """[num_tokens, hidden_size] behind this stage's last layer."""
        if self._stack is None:
            return self.pieces.residual(inputs)
        self._stack.run(inputs, torch.arange(inputs.batch.num_tokens, device=inputs.x.device))
        return inputs.x  # the residual stream is kept there
