"""Runs planned steps on tensors: a step's inputs, the model, the sampler, the KV pool's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Protocol

import torch
from torch import Tensor

from shared.engine.plan import PlannedSequence, StepPlan, StepResult
from shared.engine.runner.block_access import BlockAccess, BlockSums, DeviceBlocks, DirectBlocks, StagedBlocks
from shared.engine.runner.cuda_graphs import CudaGraphs
from shared.engine.runner.device_link import DeviceLink
from shared.engine.runner.eager_steps import EagerSteps
from shared.engine.runner.heads import HeadInputs, Heads
from shared.engine.runner.logprobs import PendingTargets, TopLogprobs, split
from shared.engine.runner.numerics import NumericsProbe
from shared.engine.runner.piecewise import PiecewiseSteps
from shared.engine.runner.pool_memory import HostArena, allocate_pool
from shared.engine.runner.sampler import PendingStep, Sampler, guesses_before
from shared.engine.runner.static_decode import StaticDecode
from shared.engine.runner.structure_masks import StructureMasks
from shared.engine.runner.warm_up import warm_up_plans
from shared.kernels.backend import Kernels, PreparesThreads
from shared.kernels.lora.step import HoldsLoras, PackedAdapter
from shared.kernels.pool_view import PoolView
from shared.kv.layout import BlockLayout
from shared.model.decoder import Decoder
from shared.structure.compiler import StructureCompiler


class Announcer(Protocol):
    """Sends plans from a group's leader to the others."""

    def __call__(self, plan: StepPlan) -> None:
        """Sends a plan, and does not wait until it is read. Raises RankLost."""
        ...

    def check(self) -> None:
        """Raises RankLost where a rank is known to be gone: what a device was given by it means nothing."""
        ...

    def place_adapter(self, slot: int, number: int) -> None:
        """The others place their parts of the adapter of that number, or empty the slot for 0, before the next plan.
        Raises RankLost."""
        ...


class WholeBlocks(BlockAccess, Protocol):
    """Whole blocks of which this runner's pool has a slice each."""

    def checksums(self, block_ids: Sequence[int]) -> list[int]:
        """See `Runner`."""
        ...


PIECEWISE_TOKENS = 512
"""Up to here steps in pieces save launches; longer ones compute for longer than Python takes to launch them."""
OpenSlices = Callable[[Tensor, DeviceLink, HostArena | None], WholeBlocks]
"""Opens the access to whole blocks, given a runner's own pool, its link and its arena."""


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """Options for how steps are run."""

    max_num_seqs: int = 64
    """Most sequences of a step, the size of the static buffers."""
    max_seq_len: int = 0
    """Longest sequence in tokens, the width of the static block tables; 0 = what the pool holds."""
    max_num_batched_tokens: int = 512
    """Most tokens of a step."""
    warm_up: bool | None = None
    """Run prompt and mixed steps at the start, so that their kernels are compiled then; None = on CUDA."""
    static_decode: bool | None = None
    """Decode over static buffers, padded to the capture sizes; None = where Triton's kernels run on CUDA, as graphs."""
    piecewise_tokens: int | None = 0
    """Longest step of prompts, or mixed, whose pieces between attention calls are captured as graphs; 0 = none, None =
    `PIECEWISE_TOKENS` where Triton's kernels run on CUDA. Off CUDA they run eagerly, padded all the same."""
    staged_transfer: bool | None = None
    """Blocks are sent and received through buffers in host memory; None = where the pool is on a GPU."""
    device_transfer: bool = False
    """Blocks are sent and received by device pointers, without buffers."""
    num_host_blocks: int = 0
    """Blocks of host memory for preempted sequences; equal to the scheduler's `num_host_blocks`."""
    adapter_slots: int = 0
    """Slots of adapters that static decode steps compute with; 0 = steps with adapters are none of these."""
    adapter_max_rank: int = 0
    """The highest rank of what is placed there."""
    most_guesses: int = 0
    """Most guesses of a sequence in one step: kernels that check up to this number are compiled at the start."""
    debug_numerics: bool = False
    """Name the part of the model where NaN or infinite logits come from; slower, and without graphs."""


@dataclass(frozen=True, slots=True)
class _FixedShapes:
    """Which steps run over tensors that never move, padded; all others are `EagerSteps`."""

    static_decode: bool
    piecewise_tokens: int  # of the longest step that runs in pieces; 0 = none does

    @classmethod
    def of(cls, config: RunnerConfig, decoder: Decoder, link: DeviceLink) -> _FixedShapes:
        """The fixed shapes that the options ask for, as far as this decoder's kernels and device can run them."""
        # Which experts were chosen is read on the host by all kernels but Triton's, what no graph can hold.
        of_triton = decoder.kernels.name.startswith("triton")
        is_capturable = decoder.config.moe is None or of_triton or not link.is_async
        # The other backends read lengths on the host: a graph of theirs would keep the lengths of its capture.
        has_graphs = link.is_async and of_triton
        if not is_capturable or config.debug_numerics or decoder.is_split:
            return cls(static_decode=False, piecewise_tokens=0)
        in_pieces = config.piecewise_tokens
        if in_pieces is None:
            in_pieces = PIECEWISE_TOKENS if has_graphs else 0
        is_static = has_graphs if config.static_decode is None else config.static_decode
        return cls(is_static, min(in_pieces, config.max_num_batched_tokens))

    @property
    def is_padded(self) -> bool:
        """Whether the pool needs a block for rows of padding."""
        return self.static_decode or self.piecewise_tokens > 0


class Runner:
    """Runs planned steps of one model over one KV pool. Called by the engine thread alone."""

    def __init__(
        self,
        decoder: Decoder,
        layout: BlockLayout,
        num_blocks: int,
        config: RunnerConfig = RunnerConfig(),
        link: DeviceLink | None = None,
        structures: StructureCompiler | None = None,
        pool: Tensor | None = None,
        announce: Announcer | None = None,
        slices: OpenSlices | None = None,
    ) -> None:
        """Allocates the pool: num_blocks * layout.block_bytes bytes on the model's device. `link`: by default that to
        the model's device. `structures`: without it, plans have no structured output.

        A group's ranks give a `pool` that they share, [num_blocks, num_layers, 2, num_kv_heads, head_bytes] uint8,
        or have one of their own each, whose `layout` is that of their slices: `slices` is then what makes whole blocks
        of the leader's. Its runner calls `announce` for each plan, when its copies are done and nothing is computed
        yet.

        Raises ConfigError where they do not fit; the message names how many would. Host memory for preempted sequences
        likewise.
        """
        self.layout = layout
        self._config = config
        self._probe = NumericsProbe(decoder.kernels) if config.debug_numerics else None
        self._decoder = self._probe.attach(decoder) if self._probe else decoder
        self.link = self._link = link = link or DeviceLink(decoder.device)
        fixed = _FixedShapes.of(config, decoder, link)
        assert pool is None or not fixed.is_padded, "a shared pool has no block for padding"
        self._num_blocks = num_blocks
        self._shares_pool = pool is not None
        allocated = num_blocks + fixed.is_padded
        # [num_blocks, num_layers, num_planes, num_kv_heads, head_bytes] uint8; padding has one block more.
        self.kv_blocks: Tensor = allocate_pool(layout, allocated, decoder.device) if pool is None else pool
        assert self.kv_blocks.shape == layout.shape(allocated)
        self.pool = PoolView.of(self.kv_blocks, layout)
        """`kv_blocks` as kernels take them."""
        self._announce = announce
        self._check: Callable[[], None] = _nothing if announce is None else announce.check
        self.arena = HostArena(layout, config.num_host_blocks, self.kv_blocks, link)
        """Host memory of preempted sequences' blocks, and copies within the pool."""
        self.blocks, self._checksums = self._open_blocks(decoder.kernels, slices)
        """The pool as the transfer plane sees it, and what gives its blocks' checksums."""
        self._eager = EagerSteps(self._decoder, self.pool, link, layout.groups, leads=announce is not None)
        graphs = CudaGraphs(decoder.device) if fixed.is_padded and link.is_async else None
        self._pieces = self._open_pieces(fixed.piecewise_tokens, graphs) if fixed.piecewise_tokens else None
        self._static = self._open_static(graphs) if fixed.static_decode else None
        if self._static is not None:
            self._eager.sampled = self._static.sampled
        self._sampler = Sampler(decoder.kernels, link, config.max_num_seqs)
        self._masks = None if structures is None else StructureMasks(structures, link)
        self._last: PendingStep | None = None
        has_head = decoder.head is not None
        self.heads = Heads(decoder, self.pool, layout.groups, link, config.max_num_seqs) if has_head else None
        """Where the decoder has a head: the layout is one with its layer."""

    def _open_pieces(self, most_tokens: int, graphs: CudaGraphs | None) -> PiecewiseSteps:
        groups = self.layout.groups
        num_tables = None if groups.is_plain else groups.size - self.layout.num_states
        return PiecewiseSteps(self._decoder, self.pool, most_tokens, graphs, num_tables)

    def _open_static(self, graphs: CudaGraphs | None) -> StaticDecode:
        config, decoder, layout = self._config, self._decoder, self.layout
        max_seq_len = config.max_seq_len or self._num_blocks * layout.block_size
        loras = None
        if config.adapter_slots and isinstance(decoder.kernels, HoldsLoras):
            num_layers, rank = decoder.config.num_layers, config.adapter_max_rank
            loras = decoder.kernels.hold_loras(
                num_layers, config.adapter_slots, config.max_num_seqs, rank, self.kv_blocks
            )
        return StaticDecode(
            decoder, self.pool, config.max_num_seqs, max_seq_len, self._link, graphs, layout.groups, loras
        )

    def _open_blocks(
        self, kernels: Kernels, slices: OpenSlices | None
    ) -> tuple[BlockAccess, Callable[[list[int]], list[int]]]:
        layout, link = self.layout, self._link
        if slices is not None:
            sliced = slices(self.kv_blocks, link, self.arena)
            return sliced, sliced.checksums
        checksums = BlockSums(layout, self.kv_blocks, kernels, link).of
        if self._config.device_transfer:
            sums = BlockSums(layout, self.kv_blocks, kernels, link)  # the engine thread has another
            return DeviceBlocks(self.kv_blocks, link, sums), checksums
        is_staged = self._config.staged_transfer
        if link.is_async if is_staged is None else is_staged:
            return StagedBlocks(self.kv_blocks, link), checksums
        return DirectBlocks(self.kv_blocks), checksums

    @property
    def is_async(self) -> bool:
        """True where `launch` returns while the device computes, so that planning ahead gains time."""
        return self._link.is_async and not self._decoder.waits_for_ranks

    def start(self) -> None:
        """Prepares what steps will use; call it once, in inference mode, before the first step.

        Sets torch's process-wide switches for sums of 16-bit products: they are taken in fp32 throughout.
        """
        self._link.bind_thread()
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        if self._link.is_async if self._config.warm_up is None else self._config.warm_up:
            self._warm_up()
        if self._pieces is not None:
            self._pieces.start()
        if self._static is not None:
            self._static.start()

    def prepare_thread(self) -> None:
        """Prepares the thread that will take the steps, before its first; in inference mode. A no-op on a CPU."""
        self._link.bind_thread()
        decoder, kernels = self._decoder, self._decoder.kernels
        is_plain = not decoder.is_split and decoder.config.latent is None and not kernels.is_deterministic
        if self._link.is_async and is_plain and isinstance(kernels, PreparesThreads):
            most = self._config.max_num_batched_tokens
            kernels.prepare_thread(decoder.config.num_heads, decoder.dtype, self.pool, most)

    def _warm_up(self) -> None:
        config = self._config
        plans = warm_up_plans(
            config.max_num_batched_tokens,
            config.max_num_seqs,
            self.layout.groups,
            self._num_blocks,
            config.most_guesses,
        )
        for plan in plans:
            self.execute(plan if self.heads is None else replace(plan, begins_guesses=True))
            if self.heads is not None:
                self.heads.warm_up(plan)
        if self._masks is not None:
            vocab_size, device = self._decoder.config.vocab_size, self._link.device
            words = torch.zeros(1, -(-vocab_size // 32), dtype=torch.int32, device=device)
            row = torch.zeros(1, dtype=torch.int64, device=device)
            self._decoder.kernels.mask_tokens(torch.zeros(1, vocab_size, device=device), words, row)
        used = max(max(item.block_ids) for plan in plans for item in plan.sequences) + 1
        self.checksums(list(range(used)))
        self.kv_blocks[:used].zero_()  # as `allocate_pool` left them

    def execute(self, plan: StepPlan) -> StepResult:
        """Computes the plan's tokens, writes their K and V into the pool, samples where the plan has a `sample`."""
        return self.launch(plan).result()

    def launch(self, plan: StepPlan) -> PendingStep:
        """Begins a step: its copies, then what it computes. At most one more step may be launched before this one's
        result is read.

        `PlannedSequence.pending` counts among the tokens sampled by the step launched before.
        """
        self._link.bind_thread()
        items = plan.sequences
        specs = list(chain.from_iterable([item.samples for item in items]))
        names = [item.sequence_id for item in items for _ in item.samples]
        self._copy(plan)
        if self._announce is not None:
            self._announce(plan)
        targets: PendingTargets | None = None
        pooled: Tensor | None = None
        masks = None if self._masks is None else self._masks.begin(items, self._sampled_before())
        if not items:
            nothing = torch.empty(0, dtype=torch.int64, device=self._link.device)
            self._last = PendingStep(nothing, None, (), self._link, _unknown, check=self._check)
            return self._last
        is_pooling = any(item.num_pooled for item in items)
        for_head: HeadInputs | None
        if self._static is not None and not is_pooling and self._static.takes(plan):
            logits, tokens, for_head = self._static.run(plan)
            row_masks = None if masks is None else masks.row_masks()
            self._sampler.resample(tokens, logits, names, specs, row_masks, guesses_before(items))
        else:
            logits, for_head, pooled = self._run(items, is_pooling=is_pooling)
            logits, targets = split(logits, items, self._link)
            row_masks = None if masks is None else masks.row_masks()
            tokens = self._sampler.sample(logits, names, specs, row_masks, guesses_before(items))
            if not plan.num_guesses:  # behind guesses no token is pending
                self._remember(tokens)
        if self.heads is not None:
            assert for_head is not None
            self.heads.follow(plan, for_head, tokens)
        logprobs = TopLogprobs.of(logits, tokens, specs, self._link.send)
        faults = {} if row_masks is None else row_masks.faults
        self._last = PendingStep(
            tokens, logprobs, specs, self._link, self._source_of(items), faults, targets, self._check, pooled
        )
        return self._last

    def _run(
        self, items: tuple[PlannedSequence, ...], *, is_pooling: bool
    ) -> tuple[Tensor, HeadInputs | None, Tensor | None]:
        """A step of any mix: its logits, what a head reads, and what `EagerSteps.hidden` pools."""
        if self._pieces is not None and not is_pooling and _takes(self._pieces, items):
            return *self._pieces.run(self._eager.inputs(items)), None
        if not is_pooling and self.heads is None:
            return self._eager.logits(items), None, None
        inputs = self._eager.inputs(items)
        hidden, logits, pooled = self._eager.hidden(items, inputs)
        return logits, HeadInputs(inputs.positions, inputs.batch, hidden), pooled

    def follow(self, plan: StepPlan) -> None:
        """A follower's part of a step that its leader has launched: the copies of its own pool's slices, and what it
        computes. In a pool that ranks share the leader has made them, before it said so."""
        if not self._shares_pool:
            self._copy(plan)
        if plan.sequences:
            self._eager.logits(plan.sequences)

    def _copy(self, plan: StepPlan) -> None:
        if plan.copies:
            self.arena.run(plan.copies)

    def _sampled_before(self) -> Callable[[], Sequence[int]]:
        """The tokens of the step launched before, read once they are asked for."""
        last = self._last
        return last.tokens if last is not None else tuple

    def place_adapter(self, slot: int, adapter: PackedAdapter | None) -> None:
        """See `AdapterSlots.place`; the adapter is one of this runner's decoder. In a group the leader's runner is
        called, and its followers place their parts. Raises RankLost."""
        if self._announce is not None:
            self._announce.place_adapter(slot, 0 if adapter is None else adapter.number)
        self._eager.adapters.place(slot, adapter)
        if self._static is not None:
            self._static.place_adapter(slot, adapter)

    def checksums(self, block_ids: list[int]) -> list[int]:
        """Checksums of these blocks as they are now; no step in flight may write to them."""
        return self._checksums(block_ids)

    def _remember(self, tokens: Tensor) -> None:
        """Keeps the sampled tokens [num_rows] for the next step's `pending` tokens; static steps read one buffer."""
        if self._static is None:
            self._eager.sampled = tokens
        else:
            self._static.sampled[: tokens.shape[0]].copy_(tokens)

    def _source_of(self, items: tuple[PlannedSequence, ...]) -> Callable[[int], str | None]:
        """Finds for a row of the step's logits the part of the model whose numbers broke; None without
        `debug_numerics`."""
        if self._probe is None:
            return _unknown
        numerics = self._probe.last_step()
        ends = accumulate(len(item.token_ids) for item in items)
        tokens = [(end - len(item.token_ids), end) for end, item in zip(ends, items, strict=True) for _ in item.samples]
        return lambda row: numerics.source(*tokens[row])


def _takes(pieces: PiecewiseSteps, items: Sequence[PlannedSequence]) -> bool:
    if any(item.adapter for item in items):
        return False
    return pieces.takes(sum(len(item.token_ids) for item in items))


def _unknown(_row: int) -> None:
    return None


def _nothing() -> None:
    """One process alone has no other that could be gone."""
