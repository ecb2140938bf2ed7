"""Running whole prompts through engines, also through two with a hand-off between them."""

from __future__ import annotations

import queue
from dataclasses import replace
from pathlib import Path
from typing import Self

import torch

from shared.engine.engine import Engine
from shared.engine.messages import (
    AddSequence,
    EngineDied,
    JoinSequence,
    PlaceAdapter,
    ReleaseBlocks,
    ReserveSequence,
    SequenceFailed,
    SequenceReserved,
    StepOutput,
)
from shared.engine.runner.heads import open_heads
from shared.engine.runner.runner import Runner, RunnerConfig
from shared.engine.sampling_params import SamplingParams
from shared.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from shared.engine.sequence import EngineSequence, Goal
from shared.engine.speculation.speculator import Speculator
from shared.kernels.backends.registry import AUTO
from shared.kv.pool import BlockPool
from shared.model.decoder import Decoder
from shared.structure.compiler import StructureCompiler
from tests.waiting import DEADLINE_S

BLOCK_SIZE = 16
MAX_NUM_SEQS = 8


class EngineRun:
    """An engine over its own pool, driven synchronously."""

    def __init__(
        self,
        folder: Path,
        num_blocks: int = 64,
        max_num_batched_tokens: int = 24,
        *,
        kernels: str = AUTO,
        config: RunnerConfig | None = None,
        ahead: bool | None = None,
        device: str = "cpu",
        kv_dtype: str = "float32",
        dtype: torch.dtype = torch.float32,
        deterministic: bool = False,
        structures: StructureCompiler | None = None,
        eos: frozenset[int] = frozenset(),
        speculator: Speculator | None = None,
        has_head: bool = False,
        head_folder: Path | None = None,
        num_guesses: int | None = 0,
        is_queued: bool = False,
        **policy,
    ) -> None:
        """`num_blocks`: of each KV group; `eos`: what ends an answer; `policy`: further fields of the scheduler's
        config. `has_head`: the checkpoint's is loaded, or that in `head_folder`; it guesses `num_guesses` tokens, or as
        many as gain time; `is_queued`: several in a row, as a GPU makes them."""
        has_head = has_head or head_folder is not None
        options = {"kernels": kernels, "deterministic": deterministic, "has_head": has_head}
        self.decoder = Decoder.load(folder, dtype, device, head_folder=head_folder, **options)
        model = self.decoder.config
        config = config or RunnerConfig(max_num_seqs=MAX_NUM_SEQS)
        config = replace(config, num_host_blocks=policy.get("num_host_blocks", 0))
        self.layout = model.block_layout(BLOCK_SIZE, kv_dtype, grouped=True, has_head=has_head)
        groups = self.layout.groups
        num_blocks *= groups.size
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        policy_config = SchedulerConfig(config.max_num_seqs, max_num_batched_tokens, **policy)
        self.runner = Runner(self.decoder, self.layout, num_blocks, config, structures=structures)
        if self.runner.heads is not None and num_guesses != 0:
            heads = open_heads(self.runner.heads)
            heads.is_queued = heads.is_queued or is_queued
            speculator = Speculator([], num_guesses, heads)
        self.scheduler = Scheduler(self.pool, policy_config, groups=groups, speculator=speculator)
        self.eos = eos
        with torch.inference_mode():
            self.runner.start()
        self.events: queue.Queue = queue.Queue()
        self.engine = Engine(self.scheduler, self.runner, self.events.put, ahead)
        self.engine.start()
        self.names = 0

    def close(self) -> None:
        self.engine.close()

    def end(self) -> None:
        """Closes an engine whose sequences have given all blocks back."""
        self.close()
        self.scheduler.check_integrity()
        assert self.pool.num_used == 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def sequence(
        self, token_ids, max_tokens, goal=Goal.COMPLETION, ship=frozenset(), kept=(), **sampling
    ) -> EngineSequence:
        """Of this prompt; another worker gave the tokens `kept` of the answer."""
        self.names += 1
        params = SamplingParams(**{"temperature": 0.0, "seed": 0, "max_tokens": max_tokens, **sampling})
        return EngineSequence(
            f"s{self.names}", [*token_ids, *kept], len(token_ids), params, b"root-of-a-model!", goal,
            len(token_ids) + max_tokens, self.eos, ship,
        )  # fmt: skip

    def next(self, *kinds):
        while True:
            event = self.events.get(timeout=DEADLINE_S)
            if isinstance(event, (EngineDied, SequenceFailed)):
                raise event.error
            if isinstance(event, kinds):
                return event

    def place(self, slot: int, folder: Path) -> None:
        """Puts an adapter into a slot."""
        packed = self.decoder.pack_adapter(self.decoder.read_adapter(folder))
        self.engine.submit(PlaceAdapter(slot, packed))

    def generate(self, *prompts, max_tokens=64, **sampling) -> list[list[int]]:
        """Output tokens of prompts that run together."""
        sequences = [self.sequence(prompt, max_tokens, **sampling) for prompt in prompts]
        for item in sequences:
            self.engine.submit(AddSequence(item))
        return self.collect([item.sequence_id for item in sequences])

    def continued(self, prompt, kept, max_tokens, **sampling) -> list[int]:
        """The tokens behind those that another worker gave of the same answer of `max_tokens`."""
        sequence = self.sequence(prompt, max_tokens, kept=kept, **sampling)
        self.engine.submit(AddSequence(sequence))
        return self.collect([sequence.sequence_id])[0]

    def collect(self, names) -> list[list[int]]:
        outputs = {name: [] for name in names}
        left = set(names)
        while left:
            for token in self.next(StepOutput).tokens:
                if token.sequence_id not in outputs:
                    continue  # a batch mate's
                outputs[token.sequence_id].append(token.token.token_id)
                if token.finish_reason:
                    left.discard(token.sequence_id)
        return [outputs[name] for name in names]


def hand_off(
    prefill: EngineRun, decode: EngineRun, prompt, max_tokens=64, corrupt=None, slots=(0, 0), **sampling
) -> list[int]:
    """One prompt over both engines, its blocks copied from pool to pool; returns its output tokens. `corrupt`: which of
    the blocks, in their order, arrives damaged. `slots`: of its adapter on either."""
    receiving = decode.sequence(prompt, max_tokens, **sampling)
    receiving.adapter = slots[1]
    decode.engine.submit(ReserveSequence(receiving))
    reserved = decode.next(SequenceReserved)
    targets = dict(reserved.needed)
    sending = prefill.sequence(prompt, max_tokens, Goal.FIRST_TOKEN, frozenset(targets), **sampling)
    sending.adapter = slots[0]
    prefill.engine.submit(AddSequence(sending))
    memory = decode.engine.blocks.incoming([block_id for _, block_id in reserved.needed])
    buffers = {index: buffer for (index, _), buffer in zip(reserved.needed, memory, strict=True)}
    checksums, first = {}, None
    while first is None:
        stepped = prefill.next(StepOutput)
        for block in stepped.blocks:
            buffers[block.index][:] = prefill.engine.blocks.outgoing([block.block_id])[0]
            checksums[block.index] = block.checksum
            prefill.engine.submit(ReleaseBlocks((block.block_id,)))
        for token in stepped.tokens:
            first = token.token.token_id
    assert set(checksums) == set(targets)
    if corrupt is not None:
        buffers[sorted(buffers)[corrupt]][5] ^= 1
    decode.engine.blocks.store([(targets[index], buffer) for index, buffer in buffers.items()])
    decode.engine.submit(JoinSequence(receiving.sequence_id, first, checksums))
    return [first, *decode.collect([receiving.sequence_id])[0]]
