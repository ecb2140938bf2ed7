"""For measurements of a draft model's guesses beside models of any size: a small pair says what the answer is and what
is guessed, and models with random weights compute as much as they would. What the small pair takes is not counted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import torch

from shared.engine.plan import NoToken, PlannedSequence, SampledToken, SampleSpec, StepPlan, StepResult
from shared.engine.runner.block_access import BlockAccess
from shared.engine.runner.draft import draft_layout, load_draft
from shared.engine.runner.runner import Runner, RunnerConfig
from shared.engine.runner.sampler import PendingStep
from shared.engine.sampling_params import SamplingParams
from shared.engine.speculation.draft_model import DraftModel
from shared.engine.speculation.head_model import HeadGuess
from shared.kernels.lora.step import PackedAdapter
from shared.kernels.pool_view import dtype_name
from shared.kv.pool import BlockPool
from shared.model.decoder import Decoder
from shared.model.families.registry import load_config


def answer_of(
    folder: Path, prompt: Sequence[int], num_tokens: int, sampling: SamplingParams, block_size: int
) -> list[int]:
    """The first tokens of a model's answer; its end does not end it."""
    decoder = Decoder.load(folder, torch.float32, "cpu")
    num_blocks = -(-(len(prompt) + num_tokens) // block_size)
    runner = Runner(decoder, draft_layout(decoder, block_size), num_blocks, RunnerConfig(max_num_seqs=1))
    tokens, start, table = list(prompt), 0, tuple(range(num_blocks))
    banned = tuple(decoder.config.eos_token_ids)
    with torch.inference_mode():
        while len(tokens) < len(prompt) + num_tokens:
            spec = SampleSpec(sampling, len(tokens), banned_token_ids=banned)
            item = PlannedSequence("answer", tuple(tokens[start:]), start, table, len(prompt), samples=(spec,))
            start = len(tokens)
            (found,) = runner.execute(StepPlan((item,))).sampled
            assert isinstance(found, SampledToken)
            tokens.append(found.token_id)
    return tokens[len(prompt) :]


class Aside:
    """A context manager for what is not to be measured, and clocks that stand still in it. One thread enters it."""

    def __init__(self) -> None:
        self._wall_s = 0.0
        self._processor_s = 0.0
        self._begun_s = 0.0, 0.0

    def __enter__(self) -> None:
        self._begun_s = time.perf_counter(), time.thread_time()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._wall_s += time.perf_counter() - self._begun_s[0]
        self._processor_s += time.thread_time() - self._begun_s[1]

    def wall_s(self) -> float:
        """Seconds, from any moment."""
        return time.perf_counter() - self._wall_s

    def processor_s(self) -> float:
        """Seconds that the calling thread, which is the one that enters, has computed."""
        return time.thread_time() - self._processor_s


class PairedRunner:
    """Computes as one draft and guesses as another one, each over its own pool. Implements `DraftRunner`."""

    def __init__(self, computes: Runner, guesses: Runner, aside: Aside) -> None:
        self._computes, self._guesses, self._aside = computes, guesses, aside

    @property
    def is_async(self) -> bool:
        """See `DraftRunner`."""
        return False

    def execute(self, plan: StepPlan) -> StepResult:
        """See `DraftRunner`."""
        self._computes.execute(plan)
        with self._aside:
            return self._guesses.execute(plan)

    def launch(self, plan: StepPlan) -> PendingStep:
        """See `DraftRunner`."""
        self._computes.execute(plan)
        with self._aside:
            return self._guesses.launch(plan)


def paired_draft(
    computes: Path, guesses: Path, target: Path, num_blocks: int, block_size: int, most_seqs: int, aside: Aside
) -> DraftModel:
    """A draft that takes as long as `computes`, by the clock of `aside`, and guesses as `guesses` does for `target`. In
    bf16, and fp32."""
    config = RunnerConfig(max_num_seqs=most_seqs)
    shape = Decoder.load(computes, torch.bfloat16, "cpu")
    own = load_draft(guesses, torch.float32, load_config(target).vocab_size)
    runners = [Runner(decoder, draft_layout(decoder, block_size), num_blocks, config) for decoder in (shape, own)]
    paired = PairedRunner(runners[0], runners[1], aside)
    pool = BlockPool(num_blocks, block_size)
    return DraftModel(paired, pool, own.config.max_position_embeddings, clock=aside.wall_s)


class PairedSteps:
    """Computes as one model with a head and chooses, and guesses, as another one with a head, over pools of as many
    blocks. Implements `StepRunner` and `HeadRunner`."""

    def __init__(self, computes: Runner, chooses: Runner, aside: Aside) -> None:
        assert computes.heads is not None
        assert chooses.heads is not None
        self._computes, self._chooses, self._aside = computes, chooses, aside
        self._heads = computes.heads, chooses.heads

    @property
    def is_async(self) -> bool:
        """See `StepRunner`."""
        return False

    @property
    def blocks(self) -> BlockAccess:
        """See `StepRunner`."""
        return self._computes.blocks

    def checksums(self, block_ids: list[int]) -> list[int]:
        """See `StepRunner`."""
        return self._computes.checksums(block_ids)

    def place_adapter(self, slot: int, adapter: PackedAdapter | None) -> None:
        """See `StepRunner`."""
        raise NotImplementedError("adapters are not measured with heads")

    def launch(self, plan: StepPlan) -> PendingStep:
        """See `StepRunner`."""
        self._computes.execute(plan)
        with self._aside:
            return self._chooses.launch(plan)

    @property
    def is_queued(self) -> bool:
        """See `HeadRunner`."""
        return False

    def is_ready(self, sequence_id: str, position: int) -> bool:
        """See `HeadRunner`."""
        return all(heads.is_ready(sequence_id, position) for heads in self._heads)

    def guess(self, guesses: Sequence[HeadGuess]) -> list[tuple[SampledToken | NoToken, ...]]:
        """See `HeadRunner`."""
        computes, chooses = self._heads
        computes.guess(guesses)
        with self._aside:
            return chooses.guess(guesses)


def paired_steps(
    computes: Decoder, chooses: Path, num_blocks: int, block_size: int, most_seqs: int, aside: Aside
) -> PairedSteps:
    """Steps of a decoder with a head, and of a small checkpoint with one, which is loaded in fp32."""
    config, small = RunnerConfig(max_num_seqs=most_seqs), Decoder.load(chooses, torch.float32, "cpu", has_head=True)
    layouts = (
        decoder.config.block_layout(block_size, dtype_name(decoder.dtype), has_head=True)
        for decoder in (computes, small)
    )
    big, own = (
        Runner(decoder, layout, num_blocks, config) for decoder, layout in zip((computes, small), layouts, strict=True)
    )
    return PairedSteps(big, own, aside)
