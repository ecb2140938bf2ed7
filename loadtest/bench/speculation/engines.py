"""An engine for each way to guess, over one model: answers that are given run through each, one engine at a time."""

from __future__ import annotations

import itertools
import queue
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from loadtest.bench.peers.ours import BLOCK_SIZE
from loadtest.bench.speculation.draft_pair import Aside, answer_of, paired_draft, paired_steps
from loadtest.bench.speculation.given_answers import GivenAnswers, StepTimes
from loadtest.bench.speculation.texts import Text
from loadtest.rig.models import DEMO
from shared.engine.engine import Engine
from shared.engine.messages import AddSequence, EngineDied, Event, SequenceFailed, StepOutput
from shared.engine.runner.runner import Runner, RunnerConfig
from shared.engine.sampling_params import MOST_GUESSES, SamplingParams
from shared.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from shared.engine.sequence import EngineSequence, Goal
from shared.engine.speculation.drafter import Drafter
from shared.engine.speculation.grammar import GrammarDrafter
from shared.engine.speculation.guessing_model import GuessingModel
from shared.engine.speculation.head_model import HeadModel
from shared.engine.speculation.ngram import NgramDrafter
from shared.engine.speculation.speculator import Speculator
from shared.kv.groups import KVGroups
from shared.kv.pool import BlockPool
from shared.model.decoder import Decoder
from shared.model.random_weights import add_random_head
from shared.model.text.tokenizer import Tokenizer
from shared.structure.compiler import StructureCompiler

STEP_TOKENS = 512
MAX_BATCH = 64
LEAST_BATCH = 4
"""Answers of 2,048 tokens that there are blocks for at least."""
OFF, AUTO = "off", "auto"
HEADS = "heads"
"""Guesses of a head alone."""
AGAIN = " again"
"""Ends the name of a way that is like another one: what they differ by is the machine's."""
DRAFT, DRAFT_ALONE = "auto and draft", "draft alone"
DEMO_DRAFT = DEMO.with_name("demo-draft")


class Bench:
    """One model, and an engine for each way to guess; one computes at a time."""

    def __init__(
        self,
        folder: Path,
        num_threads: int,
        fixed: Sequence[int],
        draft: Path | None,
        heads: Path | None = None,
        most_prompt_tokens: int | None = None,
        penalty: float = 1.0,
        device: str = "cpu",
        again: bool = False,
        most_batch: int = MAX_BATCH,
    ) -> None:
        """`fixed`: numbers of guesses that are computed whatever they cost, each a way of its own. `draft`: what a
        draft model computes. `heads`: a small model with a head, whose guesses a random one of the model's sizes takes
        as long for. `most_prompt_tokens`: what is taken of each prompt, its beginning. `penalty`: on
        repetitions. `again`: no guesses, and each number of them, as a second way too. `most_batch`: answers that
        run together at most."""
        torch.set_num_threads(num_threads or torch.get_num_threads())
        decoder = Decoder.load(folder, torch.bfloat16, device)
        self._most_prompt_tokens = most_prompt_tokens
        self._penalty = penalty
        self.tokenizer = Tokenizer.load(DEMO)
        structures = StructureCompiler(lambda: self.tokenizer, decoder.config.eos_token_ids, decoder.config.vocab_size)
        num_blocks = max(most_batch, LEAST_BATCH) * 2048 // BLOCK_SIZE
        layout = decoder.config.block_layout(BLOCK_SIZE, "bfloat16")
        config = RunnerConfig(MAX_BATCH, 2048, STEP_TOKENS, piecewise_tokens=None, most_guesses=MOST_GUESSES)
        runner = Runner(decoder, layout, num_blocks, config, structures=structures)
        if runner.is_async:
            with torch.inference_mode():
                runner.start()
        self._aside = Aside()
        self._runner = GivenAnswers(runner, self._aside.wall_s)
        self._eos = frozenset(decoder.config.eos_token_ids)
        self._events: queue.SimpleQueue[tuple[float, Event]] = queue.SimpleQueue()
        self._names = (f"s{i}" for i in itertools.count())
        self._own_answers: dict[tuple[int, ...], list[int]] = {}
        self._encoded: dict[Text, tuple[list[int], list[int]]] = {}
        drafters: list[Drafter] = [NgramDrafter(), GrammarDrafter(structures.prepare)]
        clock = None if runner.is_async else time.thread_time
        self.speculators: dict[str, Speculator | None] = {OFF: None, AUTO: Speculator(drafters, processor_clock=clock)}
        for ending in ("", AGAIN) if again else ("",):
            self.speculators[OFF + ending] = None
            self.speculators |= {f"{count}{ending}": Speculator([NgramDrafter()], count) for count in fixed}
        if draft is not None:
            for way in (DRAFT, DRAFT_ALONE):
                beside: list[Drafter] = []
                if way == DRAFT:
                    beside = [NgramDrafter(), GrammarDrafter(structures.prepare)]
                model = paired_draft(draft, DEMO_DRAFT, DEMO, num_blocks, BLOCK_SIZE, MAX_BATCH, self._aside)
                self.speculators[way] = self._speculator(beside, model)
        self._runners: dict[str, GivenAnswers] = {}
        self._times: StepTimes | None = None
        if heads is not None:
            add_random_head(decoder)
            steps = paired_steps(decoder, heads, num_blocks, BLOCK_SIZE, MAX_BATCH, self._aside)
            positions = decoder.config.max_position_embeddings
            guesses = HeadModel(steps, KVGroups(BLOCK_SIZE), positions, clock=self._aside.wall_s)
            self.speculators[HEADS] = self._speculator([], guesses)
            self._runners[HEADS] = GivenAnswers(steps, self._aside.wall_s, self._runner.answers)
        self._engines = {
            way: self._engine(num_blocks, speculator, self._runners.get(way, self._runner))
            for way, speculator in self.speculators.items()
        }

    def _speculator(self, drafters: Sequence[Drafter], model: GuessingModel) -> Speculator:
        """As a worker on a CPU has it."""
        return Speculator(drafters, model=model, processor_clock=self._aside.processor_s)

    def _engine(self, num_blocks: int, speculator: Speculator | None, runner: GivenAnswers) -> Engine:
        pool, config = BlockPool(num_blocks, BLOCK_SIZE), SchedulerConfig(MAX_BATCH, STEP_TOKENS)
        engine = Engine(
            Scheduler(pool, config, speculator=speculator),
            runner,
            lambda event: self._events.put((self._aside.wall_s(), event)),
            clock=self._aside.wall_s,
        )
        engine.start()
        return engine

    @property
    def is_async(self) -> bool:
        """Whether steps are launched ahead of their results."""
        return self._runner.is_async

    def note_steps(self, times: StepTimes | None) -> None:
        """Notes the next runs' steps there."""
        self._times = times
        for runner in (self._runner, *self._runners.values()):
            runner.times = times

    def close(self) -> None:
        """Ends the engines' threads."""
        for engine in self._engines.values():
            engine.close()

    def seconds(self, way: str, texts: Sequence[Text], num_tokens: int) -> float:
        """Seconds of answers that run together, from the moment at which all have begun to the last token."""
        if self._times is not None:
            self._times.begin_run(way)
        # All at once: the first ones would be over before the last ones begin.
        return self._answered(way, [self._sequence(text, num_tokens) for text in texts])[1]

    def full_rate(self, way: str, texts: Sequence[Text], batch: int, num_tokens: int) -> float:
        """Tokens a second of a batch in which the next answer begins when one has ended, while all places are taken."""
        if self._times is not None:
            self._times.begin_run(way)
        # The first ones are of different lengths: else all would end at once, and the next ones too.
        lengths = [max(2, num_tokens * (place + 1) // batch) for place in range(batch)]
        lengths += [num_tokens] * (len(texts) - batch)
        sequences = [self._sequence(text, length) for text, length in zip(texts, lengths, strict=True)]
        num_answered, seconds = self._answered(way, sequences[:batch], sequences[batch:])
        return num_answered / seconds

    def _answered(
        self, way: str, sequences: Sequence[EngineSequence], following: Sequence[EngineSequence] = ()
    ) -> tuple[int, float]:
        """(tokens, seconds) from the moment at which all `sequences` have begun, to the last token; where others follow
        as places become free, to the moment at which a place stays free."""
        waiting, left = deque(following), {sequence.sequence_id for sequence in sequences}
        for sequence in sequences:
            self._engines[way].submit(AddSequence(sequence))
        not_begun, num_tokens, begins_s, ends_s, is_over = set(left), 0, 0.0, 0.0, False
        while left:
            at_s, event = self._events.get()
            match event:
                case StepOutput(tokens=tokens) if tokens:
                    if not_begun:
                        begins_s = at_s
                        not_begun.difference_update(token.sequence_id for token in tokens)
                    elif not is_over:
                        num_tokens += len(tokens)
                        ends_s = at_s
                    ended = [token.sequence_id for token in tokens if token.finish_reason is not None]
                    left.difference_update(ended)
                    for _ in ended:
                        if waiting:
                            left.add(waiting[0].sequence_id)
                            self._engines[way].submit(AddSequence(waiting.popleft()))
                        else:
                            is_over = bool(following)
                case EngineDied(error) | SequenceFailed(_, error):
                    raise error
        self._runner.answers.clear()
        return num_tokens, ends_s - begins_s

    def _sequence(self, text: Text, num_tokens: int) -> EngineSequence:
        if text not in self._encoded:
            answer = self.tokenizer.encode(text.answer, add_special_tokens=False)
            self._encoded[text] = self.tokenizer.encode(text.prompt)[: self._most_prompt_tokens], answer
        prompt, answer = self._encoded[text]
        name, sampling = (
            next(self._names),
            SamplingParams(
                temperature=text.temperature,
                max_tokens=num_tokens,
                seed=0,
                ignore_eos=True,
                structured_output=text.structure,
                repetition_penalty=self._penalty,
            ),
        )
        answer = self._own_answer(prompt, num_tokens, sampling) if text.is_own else answer[:num_tokens]
        sampling = replace(sampling, max_tokens=len(answer))
        self._runner.answers[name] = answer
        # Prompts are found, so that only the first run computes them. Another engine may have written to these blocks
        # since, as the pools of all are the same memory: what is read there does not change how long that takes.
        root = bytes(16)
        most = len(prompt) + len(answer)
        return EngineSequence(name, list(prompt), len(prompt), sampling, root, Goal.COMPLETION, most, self._eos)

    def _own_answer(self, prompt: list[int], num_tokens: int, sampling: SamplingParams) -> list[int]:
        key = (*prompt, -num_tokens, -int(sampling.temperature * 100))
        if key not in self._own_answers:
            self._own_answers[key] = answer_of(DEMO, prompt, num_tokens, sampling, BLOCK_SIZE)
        return self._own_answers[key]
