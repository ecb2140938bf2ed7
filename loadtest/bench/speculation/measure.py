"""`python -m loadtest.bench speculation`: answers with guesses beside the same answers without, in turns.

The weights are random, so a text is given as the answer: every step is computed in full, and each token that it chose
is replaced by the text's. So steps take what they take, and guesses are right as often as in real texts. A draft model
likewise computes with random weights, and guesses what the demo model's draft guesses of the demo model's answers.
"""

from __future__ import annotations

import itertools
import queue
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated

import torch

from loadtest.bench.peers.ours import BLOCK_SIZE
from loadtest.bench.speculation.draft_pair import Aside, answer_of, paired_draft, paired_steps
from loadtest.bench.speculation.given_answers import GivenAnswers, StepTimes
from loadtest.bench.speculation.texts import CASES, Text
from loadtest.rig.command_line import Option, Out, integers, names
from loadtest.rig.measure import median_ratio, turns
from loadtest.rig.models import DEMO, SHAPES, checkpoint
from loadtest.rig.results import Report, Result, machine
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
from shared.errors import ConfigError
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

OF_DRAFTS = ("greedy", "sampled")
"""Cases in which a draft model guesses too."""
GOALS = {"edit": 2.0, "quotes": 2.0, "chat": 0.98, "json": 1.5, "record": 1.5, "greedy": 1.5, "sampled": 1.5}
"""Goals for the ratio of one stream, with a draft model where there is one."""


GOAL_OF_HEADS = 1.8
"""Goal for the ratio of one stream in OF_DRAFTS."""


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


def measure(
    bench: Bench, case: str, batch: int, num_tokens: int, pairs: int, warm_up: int, follow: int = 0
) -> Iterator[Result]:
    """The rate of each way over that without guesses, median of pairs in turns; what was guessed in it. Then the same
    by the times of kinds of steps, which a busy moment of the machine does not change. With `follow`, the number of
    further answers of each place, the next one begins where one has ended, and only steps count in which every place
    is taken."""
    texts = [CASES[case](number) for number in range(batch * (1 + follow))]
    ways = [way for way in bench.speculators if case in OF_DRAFTS or way not in (DRAFT, DRAFT_ALONE, HEADS)]
    num_answered = batch * (num_tokens - 1)

    def rate(way: str) -> float:
        if follow:
            return bench.full_rate(way, texts, batch, num_tokens)
        return num_answered / bench.seconds(way, texts, num_tokens)

    bench.note_steps(None)
    for way in warm_up * ways:  # what they learn is known
        rate(way)
    before = {way: _counts(bench, way) for way in ways}
    steps = None if bench.is_async else StepTimes()
    bench.note_steps(steps)
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for _, way in turns(ways, pairs):
        rates[way].append(rate(way))
    name = f"{case} {batch}, full" if follow else f"{case} {batch}"
    yield Result(f"{name}, {OFF}", median(rates[OFF]), "tok/s")
    for way in ways[1:]:
        ratio = median_ratio(rates[way], rates[OFF])
        yield Result(f"{name}, {way}", median(rates[way]), "tok/s", peer=OFF, ratio=ratio)
        guessed, right = (now - then for now, then in zip(_counts(bench, way), before[way], strict=True))
        if guessed:
            yield Result(f"{name}, {way}, right guesses", 100 * right / guessed, "%")
    if steps is None:
        return
    if follow:
        yield from _by_kinds(name, steps.rates(batch), ways)
        return
    for way in ways:
        yield Result(f"{name}, {way}, decode steps", steps.num_steps(way), "steps")
    yield from _by_kinds(name, {way: num_answered / seconds for way, seconds in steps.run_s().items()}, ways)


def _by_kinds(name: str, rates: Mapping[str, float], ways: Sequence[str]) -> Iterator[Result]:
    """Each way's rate by `StepTimes`, over that without guesses; that of `auto` over the best other one."""
    for way in ways:
        ratio = rates[way] / rates[OFF]
        yield Result(f"{name}, {way}, by kinds of steps", rates[way], "tok/s", peer=OFF, ratio=ratio)
    best = max((way for way in ways if way == OFF or way.isdecimal()), key=rates.__getitem__)
    ratio = rates[AUTO] / rates[best]
    yield Result(f"{name}, {AUTO} over the best, by kinds of steps", rates[AUTO], "tok/s", peer=best, ratio=ratio)


def _counts(bench: Bench, way: str) -> tuple[int, int]:
    speculator = bench.speculators[way]
    if speculator is None:
        return 0, 0
    counters = speculator.counters
    return sum(counters.num_guesses.values()), sum(counters.num_accepted.values())


def main(
    model: Annotated[str, Option(help=f"a model folder, or a shape: {', '.join(SHAPES)}")] = "1b",
    case: Annotated[str, Option(help=f"kinds of answers: {', '.join(CASES)}")] = " ".join(CASES),
    batch: Annotated[str, Option(help="answers that run together")] = "1 8",
    draft: Annotated[
        str, Option(help="a folder, or a shape as of MODEL, of what a draft model computes; empty: none")
    ] = "",
    heads: Annotated[
        str,
        Option(help="the folder that make demo-head writes, of a head whose guesses are measured; empty: none"),
    ] = "",
    fixed: Annotated[str, Option(help="numbers of guesses that are made whatever they cost; empty: none")] = "",
    prompt: Annotated[int, Option(help="most tokens of a prompt; 0 = all")] = 0,
    penalty: Annotated[float, Option(help="repetition_penalty of all answers")] = 1.0,
    tokens: Annotated[int, Option(help="of each answer")] = 256,
    pairs: Annotated[int, Option(help="runs of each way")] = 5,
    warm_up: Annotated[int, Option(help="runs of each way before, from which auto learns")] = 1,
    follow: Annotated[
        int, Option(help="answers that begin in each place of a batch as it becomes free; 0: none, a batch runs out")
    ] = 0,
    again: Annotated[bool, Option(help="measure equal ways twice, to see what the machine does")] = False,
    threads: Annotated[int, Option(help="compute threads; 0 = all cores")] = 0,
    device: Annotated[str, Option(help="cpu, or a GPU as torch names it: without draft, heads and structures")] = "cpu",
    out: Out = None,
) -> None:
    """Measure answers with guesses beside the same without: copied text, prose and JSON, alone and in batches."""
    if device != "cpu" and (draft or heads):
        raise ConfigError("draft models and heads are measured on CPUs", field="device", value=device)
    folder, of_draft = (checkpoint(name) if name in SHAPES else Path(name) for name in (model, draft or model))
    report, batches = Report(out), integers(batch, "batch")
    bench = Bench(
        folder,
        threads,
        integers(fixed, "fixed"),
        of_draft if draft else None,
        Path(heads) if heads else None,
        prompt or None,
        penalty,
        device,
        again,
        max(batches),
    )
    try:
        for name in names(case, "case", CASES):
            if device != "cpu" and CASES[name](0).structure is not None:
                continue  # masks of steps ahead follow what the device chose, not the text
            for count in batches:
                report.add(measure(bench, name, count, tokens, pairs, warm_up, follow))
    finally:
        bench.close()
    where = machine() if device == "cpu" else torch.cuda.get_device_name(device)
    print(f"{model} in bf16 on {where}; ratios are times without guesses over times with\n")
    report.print()
    ratios = {result.name: result.ratio for result in report.results if result.ratio is not None}
    for name, goal in GOALS.items():
        way = DRAFT if name in OF_DRAFTS else AUTO
        if (ratio := ratios.get(f"{name} 1, {way}")) is not None:
            print(f"{'met' if ratio >= goal else 'missed'}: {name}: {ratio:.2f}, the goal is {goal:g}")
    for name in OF_DRAFTS:
        if (ratio := ratios.get(f"{name} 1, {HEADS}")) is not None:
            met = "met" if ratio >= GOAL_OF_HEADS else "missed"
            print(f"{met}: {name} with heads: {ratio:.2f}, the goal is {GOAL_OF_HEADS:g}")
