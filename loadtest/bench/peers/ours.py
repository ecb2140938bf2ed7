"""Tandem's own engine, its step loop included."""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from loadtest.bench.peers.adapter import DRAFT, MAX_BATCH, MAX_TOKENS, STEP_TOKENS, Settings, spare_steps
from shared.engine.engine import Engine
from shared.engine.messages import AddSequence, EngineDied, Event, SequenceFailed, StepOutput
from shared.engine.runner.draft import draft_layout, load_draft, open_draft
from shared.engine.runner.runner import Runner, RunnerConfig
from shared.engine.sampling_params import SamplingParams
from shared.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from shared.engine.sequence import EngineSequence, Goal
from shared.engine.speculation.ngram import NgramDrafter
from shared.engine.speculation.speculator import Speculator
from shared.kernels.backends.registry import AUTO
from shared.kernels.batch import AttentionBatch
from shared.kernels.pool_view import PoolView
from shared.kv.pool import BlockPool
from shared.model.decoder import Decoder
from shared.model.weights.plan import AS_STORED, QUANTIZATIONS

BLOCK_SIZE = 16


@dataclass(frozen=True)
class _Step:
    """The time of a step's tokens, and their number."""

    at_s: float
    metered: float  # the meter at that time
    token_ids: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class Ours:
    """See `EngineAdapter`."""

    def __init__(self, settings: Settings, max_batch: int = MAX_BATCH) -> None:
        """`max_batch`: sequences of up to 512 tokens that it has room for."""
        torch.set_num_threads(settings.num_threads)
        rounded = next((kind for kind in QUANTIZATIONS if kind == settings.form), AS_STORED)
        self.decoder = Decoder.load(
            settings.folder, torch.bfloat16, "cpu", kernels=_kernels(settings.cpu_isa), quantization=rounded
        )
        config = self.decoder.config
        layout = config.block_layout(BLOCK_SIZE, "bfloat16")
        max_batch = max(max_batch, MAX_BATCH)
        groups = layout.groups
        num_blocks = max_batch * groups.num_blocks(512, 512) + groups.num_blocks(MAX_TOKENS, STEP_TOKENS)
        self._runner = Runner(self.decoder, layout, num_blocks, RunnerConfig(max_batch))
        self._events: queue.SimpleQueue[_Step | BaseException] = queue.SimpleQueue()
        self._meter: Callable[[], float] = lambda: 0.0
        self._names = (f"s{i}" for i in itertools.count())
        scheduler = Scheduler(
            BlockPool(num_blocks, BLOCK_SIZE),
            SchedulerConfig(max_batch, STEP_TOKENS),
            groups=groups,
            speculator=_speculator(settings, config.vocab_size),
        )
        self._engine = Engine(scheduler, self._runner, self._on_event)
        self._engine.start()

    def describe(self) -> str:
        """See `EngineAdapter`."""
        weights = self.decoder.quantization or "bf16"
        return f"kernels {self.decoder.kernels.name}, {weights} weights, activations in bf16, sums in fp32"

    def prefill_s(self, prompt: list[int]) -> float:
        """See `EngineAdapter`."""
        start = time.perf_counter()
        self._add(prompt, 1)
        return self._next_step().at_s - start

    def decode_steps_s(self, prompts: list[list[int]], num_steps: int) -> list[float]:
        """See `EngineAdapter`."""
        return [seconds for seconds, _ in self.decode_steps(prompts, num_steps, lambda: 0.0)]

    def decode_steps(
        self,
        prompts: list[list[int]],
        num_steps: int,
        meter: Callable[[], float],
        sampling: Mapping[str, float] = MappingProxyType({}),
    ) -> list[tuple[float, float]]:
        """Seconds of each step, and the increase of the meter, which is read in the engine's thread; `sampling`:
        settings of the answers, which are greedy.

        A few more steps are computed than requested, because the prefills may end in different steps; once more where
        the first answer had ended before the last one was asked for, on a machine that others keep busy.
        """
        self._meter = meter
        num_tokens = num_steps + spare_steps(prompts) + 1
        times: list[tuple[float, float]] = []
        while not times:
            for prompt in prompts:
                self._add(prompt, num_tokens, **sampling)
            left, full = len(prompts) * num_tokens, list[_Step]()
            while left > 0:
                step = self._next_step()
                left -= step.num_tokens
                if step.num_tokens == len(prompts):
                    full.append(step)
            times = [(b.at_s - a.at_s, b.metered - a.metered) for a, b in itertools.pairwise(full)]
        return times[-num_steps:]

    def embed_s(self, prompts: list[list[int]]) -> float:
        """See `Embeds`."""
        start, left = time.perf_counter(), len(prompts)
        for prompt in prompts:
            self._add(prompt, 1, pooling="last")
        while left > 0:
            step = self._next_step()
            left -= step.num_tokens
        return step.at_s - start

    def answer(self, prompt: list[int], num_tokens: int, num_guesses: int) -> tuple[float, list[int]]:  # noqa: ARG002
        """See `Answers`."""
        self._add(prompt, num_tokens)
        step = first = self._next_step()
        tokens = list(first.token_ids)
        while len(tokens) < num_tokens:
            step = self._next_step()
            tokens += step.token_ids
        return step.at_s - first.at_s, tokens

    def logits(self, prompt: list[int]) -> list[list[float]]:
        """See `EngineAdapter`."""
        size, groups = len(prompt), self._runner.layout.groups
        table = list(range(-(-len(prompt) // BLOCK_SIZE) * groups.size))
        first, *later = (
            AttentionBatch.from_lists([size], [size], [table[group :: groups.size]], BLOCK_SIZE)
            for group in range(groups.size - groups.num_states)
        )
        batch = first if groups.is_plain else first.with_groups(later)
        if groups.num_states:
            states = torch.tensor([groups.state_blocks(table, 0, size)], dtype=torch.int32)
            batch = replace(batch, state_blocks=states)
        pool = PoolView.of(torch.zeros_like(self._runner.kv_blocks[: len(table)]), self._runner.layout)
        rows = torch.arange(size)
        with torch.inference_mode():
            found = self.decoder.forward(torch.tensor(prompt), rows, pool, batch, rows)
        return found.tolist()

    def close(self) -> None:
        """Ends the engine's thread."""
        self._engine.close()

    def _add(self, prompt: list[int], num_tokens: int, **further: Any) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, seed=0, **further)
        name = next(self._names)
        self._engine.submit(
            AddSequence(
                EngineSequence(
                    name,
                    list(prompt),
                    len(prompt),
                    sampling,
                    name.encode().rjust(16),  # no prefix of an earlier prompt is found
                    Goal.COMPLETION,
                    len(prompt) + num_tokens,
                    frozenset(),
                )
            )
        )

    def _on_event(self, event: Event) -> None:
        """Called by the engine's thread."""
        match event:
            case StepOutput(tokens=tokens) if tokens:
                self._events.put(_Step(time.perf_counter(), self._meter(), [t.token.token_id for t in tokens]))
            case EngineDied(error) | SequenceFailed(_, error):
                self._events.put(error)

    def _next_step(self) -> _Step:
        event = self._events.get()
        if isinstance(event, BaseException):
            raise event
        return event


def _speculator(settings: Settings, vocab_size: int) -> Speculator | None:
    """As a worker on a CPU has it."""
    if not settings.guesses_by:
        return None
    model = None
    if settings.guesses_by == DRAFT:
        assert settings.draft is not None
        draft = load_draft(settings.draft, torch.bfloat16, vocab_size, _kernels(settings.cpu_isa))
        model = open_draft(draft, draft_layout(draft, BLOCK_SIZE), MAX_TOKENS // BLOCK_SIZE, MAX_BATCH)
    return Speculator([NgramDrafter()], model=model, processor_clock=time.thread_time)


def _kernels(cpu_isa: str) -> str:
    """The backend's name for the registry."""
    return {"auto": AUTO, "torch": "torch"}.get(cpu_isa, f"cpu:{cpu_isa}")
