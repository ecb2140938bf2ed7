"""`python -m loadtest.bench structured`: what it costs that answers follow a structure.

Masks: random answers to random schemas, token by token, the time from a token to the mask behind it. Steps: a batch
that decodes freely and one whose every row is structured, in turns, on the same runner.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median
from typing import Annotated

import numpy as np
import torch
import typer

from loadtest.bench.shapes import SHAPES, checkpoint
from loadtest.bench.structured.schemas import random_schema
from loadtest.command_line import Out
from loadtest.figures import Result, machine, table, write
from shared.engine.plan import PlannedSequence, SampledToken, SampleSpec, StepPlan
from shared.engine.runner.runner import Runner, RunnerConfig
from shared.engine.sampling_params import SamplingParams
from shared.engine.structured_output import StructuredOutput, StructureKind
from shared.model.config import ModelConfig
from shared.model.decoder import Decoder
from shared.model.tokenizer import Tokenizer
from shared.structure.compiler import StructureCompiler
from shared.structure.matchers import SequenceMatchers, StructuredRow

BLOCK_SIZE = 16
MAX_ANSWER_LEN = 200
DEMO = Path(__file__).parents[3] / "models" / "demo"
ENDLESS = {
    "type": "array",
    "items": {"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer"}}},
}


def mask_times(
    compiler: StructureCompiler, eos: frozenset[int], num_schemas: int, clock: Callable[[], float]
) -> list[float]:
    """Seconds from each token to the mask behind it, over one answer to each schema."""
    times: list[float] = []
    for seed in range(num_schemas):
        structure = StructuredOutput(StructureKind.JSON_SCHEMA, json.dumps(random_schema(seed)))
        compiler.compile(structure)
        choose, matchers, tokens = Random(seed), SequenceMatchers(compiler), list[int]()
        while len(tokens) < MAX_ANSWER_LEN and not (tokens and tokens[-1] in eos):
            row = StructuredRow("a", structure, len(tokens), tokens[-1] if tokens else None, (), ())
            begun = clock()
            matchers.begin_step()
            masks = matchers.fill((row,))
            times.append(clock() - begun)
            assert not masks.faults, masks.faults
            allowed = np.flatnonzero(np.unpackbits(masks.words[0].view(np.uint8), bitorder="little"))
            tokens.append(int(choose.choice(allowed)))
    return times


class Steps:
    """Two batches of one runner, which decode in turns, each row behind its own cached tokens."""

    def __init__(self, folder: Path, batch: int, context: int, num_steps: int, sampling: SamplingParams) -> None:
        decoder = Decoder.load(folder, torch.bfloat16, "cpu")
        config = decoder.config
        tokenizer = Tokenizer.load(folder)
        ends = config.eos_token_ids or (tokenizer.eos_token_id or 0,)
        structures = StructureCompiler(lambda: tokenizer, ends, config.vocab_size)
        self._blocks = -(-(context + num_steps + 1) // BLOCK_SIZE)
        layout = config.block_layout(BLOCK_SIZE, "bfloat16")
        self._runner = Runner(decoder, layout, 2 * batch * self._blocks, RunnerConfig(batch), structures=structures)
        self._runner.kv_blocks.fill_(0.01)
        self._context = context
        structure = StructuredOutput(StructureKind.JSON_SCHEMA, json.dumps(ENDLESS))
        held = SamplingParams(temperature=sampling.temperature, seed=0, max_tokens=1, structured_output=structure)
        self._params = (sampling, held)
        self._tokens: list[list[list[int]]] = [[[] for _ in range(batch)] for _ in range(2)]

    def step_s(self, structured: bool, number: int) -> float:
        """Seconds of the step that gives each row its token of this number."""
        kind = int(structured)
        plan = StepPlan(tuple(self._share(kind, row, number) for row in range(len(self._tokens[kind]))))
        begun = time.perf_counter()
        with torch.inference_mode():
            sampled = self._runner.execute(plan).sampled
        took = time.perf_counter() - begun
        for tokens, token in zip(self._tokens[kind], sampled, strict=True):
            assert isinstance(token, SampledToken), token
            tokens.append(token.token_id)
        return took

    def _share(self, kind: int, row: int, number: int) -> PlannedSequence:
        tokens = self._tokens[kind][row]
        first = (kind * len(self._tokens[kind]) + row) * self._blocks
        start = self._context + number - 1
        return PlannedSequence(
            f"{kind}/{row}",
            (tokens[-1] if tokens else 5,),
            start,
            tuple(range(first, first + self._blocks)),
            self._context,
            SampleSpec(self._params[kind], start + 1),
        )


def steps(folder: Path, batch: int, context: int, num_pairs: int, temperature: float) -> list[Result]:
    """Medians of both kinds of step, and of the quotients of neighbours."""
    sampling = SamplingParams(temperature=temperature, seed=0, max_tokens=1)
    measured = Steps(folder, batch, context, num_pairs + 4, sampling)
    pairs = []
    for number in range(num_pairs + 3):
        order = (False, True) if number % 2 else (True, False)
        took = {structured: measured.step_s(structured, number) for structured in order}
        pairs.append((took[False], took[True]))
    pairs = pairs[3:]  # the first ones build what later ones find
    name = f"decode {batch} at {context}, temperature {temperature:g}"
    return [
        Result(f"{name}, free", 1e3 * median(free for free, _ in pairs), "ms"),
        Result(f"{name}, structured", 1e3 * median(held for _, held in pairs), "ms"),
        Result(f"{name}, structured / free", median(held / free for free, held in pairs), "×", 1.10),
    ]


def main(
    model: Annotated[str, typer.Option(help=f"of the steps: a model folder, or {', '.join(SHAPES)}")] = "125m",
    vocabulary: Annotated[Path, typer.Option(help="of the masks: a folder with tokenizer.json")] = DEMO,
    schemas: Annotated[int, typer.Option(help="random schemas, an answer each; 0 = no masks")] = 300,
    batch: Annotated[int, typer.Option(help="sequences that decode; 0 = no steps")] = 32,
    context: Annotated[int, typer.Option(help="cached tokens of each")] = 256,
    pairs: Annotated[int, typer.Option(help="steps of each kind")] = 60,
    out: Out = None,
) -> None:
    """Measure the masks of structured answers, and decode steps with and without them."""
    results: list[Result] = []
    if schemas:
        tokenizer = Tokenizer.load(vocabulary)
        eos = tokenizer.eos_token_id
        ends = ModelConfig.load(vocabulary).eos_token_ids if (vocabulary / "config.json").exists() else (eos or 0,)
        compiler = StructureCompiler(lambda: tokenizer, ends)
        for name, clock in (("of a core", time.thread_time), ("of the clock", time.perf_counter)):
            times = 1e6 * np.array(mask_times(compiler, frozenset(ends), schemas, clock))
            label = f"mask of {tokenizer.vocab_size} tokens, {name}"
            results.append(Result(f"{label}, p50 of {len(times)}", float(np.quantile(times, 0.5)), "µs", 100.0))
            results.append(Result(f"{label}, p99", float(np.quantile(times, 0.99)), "µs", 1000.0))
    if batch:
        folder = checkpoint(model) if model in SHAPES else Path(model)
        for temperature in (0.0, 1.0):
            results += steps(folder, batch, context, pairs, temperature)
    print(f"{model}, on {machine()}\n")
    print(table(results))
    if out is not None:
        write(out, results)
