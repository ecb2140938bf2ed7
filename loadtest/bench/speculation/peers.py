"""`python -m loadtest.bench speculation-peers`: what guesses gain here and in peers, on the same weights, in turns."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated

import torch

from loadtest.bench.peers.adapter import DRAFT, NGRAM, PLAIN
from loadtest.bench.peers.measure import OURS, conclude, has_started
from loadtest.bench.peers.turns import PAUSE_S, CannotRun, EngineProcess
from loadtest.bench.peers.venvs import PEERS_IN_FEWER_BITS, install, python
from loadtest.bench.speculation.texts import CASES
from loadtest.rig.command_line import Option, Out, choice, integers, names
from loadtest.rig.measure import median_ratio, turns
from loadtest.rig.models import DEMO, SHAPES, checkpoint
from loadtest.rig.results import Report, Result
from loadtest.rig.successors import as_successors, is_answer, successors
from shared.model.text.tokenizer import Tokenizer

OFF = "off"
WAYS = (OFF, NGRAM, DRAFT)
KINDS = ("edit", "quotes", "chat")
"""CASES without a structure and with a text of their own."""


@dataclass(frozen=True)
class Runs:
    """What is measured, and how often."""

    venvs: Annotated[Path, Option(help="folder in which the peers are installed")] = Path(".venv-peers")
    prompt: Annotated[int, Option(help="most tokens of a prompt")] = 384
    tokens: Annotated[int, Option(help="of an answer")] = 128
    guesses: Annotated[str, Option(help="numbers of guesses that peers make, each measured")] = "5 10"
    wrong: Annotated[float, Option(help="share of the draft's guesses that are wrong")] = 0.25
    rounds: Annotated[int, Option()] = 3
    threads: Annotated[int, Option()] = 2


@dataclass(frozen=True)
class _Entry:
    """An engine that guesses in one way."""

    process: EngineProcess
    engine: str
    way: str
    num_guesses: int  # 0: none, or as many as it chooses

    @property
    def name(self) -> str:
        return f"{self.engine}, {self.way}" + (f" {self.num_guesses}" if self.num_guesses else "")


def main(
    runs: Runs,
    model: Annotated[str, Option(help="a shape with plain layers: 125m, 1b or 4b")] = "1b",
    draft: Annotated[str, Option(help="likewise, of the draft model")] = "125m",
    peers: Annotated[str, Option(help="peers to measure")] = " ".join(PEERS_IN_FEWER_BITS),
    ways: Annotated[str, Option(help=f"of guessing: {', '.join(WAYS)}")] = " ".join(WAYS),
    case: Annotated[str, Option(help=f"kinds of answers: {', '.join(KINDS)}")] = " ".join(KINDS),
    form: Annotated[str, Option(help="of the weights: plain, int8, int4")] = PLAIN,
    out: Out = None,
) -> None:
    """Compare what guesses gain with OpenVINO GenAI's prompt lookup and draft, and llama.cpp's, in turns."""
    choice(model, "model", SHAPES)
    engines = [OURS, *names(peers, "peers", PEERS_IN_FEWER_BITS)]
    torch.set_num_threads(runs.threads)
    kinds = names(case, "case", KINDS)
    report, reasons = asyncio.run(
        _compare(model, choice(draft, "draft", SHAPES), engines, names(ways, "ways", WAYS), kinds, form, runs, out)
    )
    conclude(report, f"{model}, {form} weights, one stream; ratios are our rate over the peer's", reasons)


async def _compare(
    model: str,
    draft: str,
    engines: Sequence[str],
    ways: Sequence[str],
    kinds: Sequence[str],
    form: str,
    runs: Runs,
    out: Path | None,
) -> tuple[Report, dict[str, str]]:
    refused = install(runs.venvs, {PEERS_IN_FEWER_BITS[name] for name in engines if name != OURS})
    folder = successors(model)
    draft_folder = successors(draft, runs.wrong) if DRAFT in ways else None
    scratch = checkpoint(model).parent.parent / "peers" / folder.name
    report, reasons, entries = Report(out), dict[str, str](), list[_Entry]()
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            venv = PEERS_IN_FEWER_BITS.get(engine)
            if venv in refused:
                reasons[engine] = refused[venv]
                continue
            interpreter = python(runs.venvs, venv)
            for way in ways:
                guesses_by = "" if way == OFF else way
                process = await stack.enter_async_context(
                    EngineProcess(
                        engine, interpreter, folder, scratch, runs.threads, form=form, guesses_by=guesses_by,
                        draft=draft_folder if way == DRAFT else None,
                    )
                )  # fmt: skip
                if not await has_started(process, reasons):
                    continue
                chosen = [0] if way == OFF or engine == OURS else integers(runs.guesses, "guesses")
                entries += [_Entry(process, engine, way, count) for count in chosen]
        for kind in kinds:
            measured = await _measure(kind, entries, runs)
            report.add(_results(kind, measured, entries))
            reasons |= measured.failures
    return report, reasons


@dataclass
class _Measured:
    rates: dict[str, list[float]] = field(default_factory=dict)  # tokens a second, by entry
    failures: dict[str, str] = field(default_factory=dict)


async def _measure(kind: str, entries: Sequence[_Entry], runs: Runs) -> _Measured:
    """Rounds of all entries behind a warm-up. An engine that gives another answer has none."""
    text = CASES[kind](0)
    prompt = as_successors(Tokenizer.load(DEMO), text.prompt, text.answer, runs.prompt, runs.tokens)
    measured = _Measured()
    for number, entry in turns(entries, runs.rounds + 1):
        if entry.name in measured.failures:
            continue
        await asyncio.sleep(PAUSE_S)
        try:
            seconds, tokens = await entry.process.ask(
                op="answer", prompt=prompt, num_tokens=runs.tokens, num_guesses=entry.num_guesses
            )
        except CannotRun as error:
            measured.failures[entry.name] = f"{kind}: {error}"
            continue
        if len(tokens) != runs.tokens or not is_answer(tokens):
            measured.failures[entry.name] = f"{kind}: it gives another answer: {tokens[:16]} …"
        elif number:
            rate = (runs.tokens - 1) / seconds
            measured.rates.setdefault(entry.name, []).append(rate)
            print(f"{kind}: {entry.name}: {rate:.4g} tok/s", flush=True)
    for name in measured.failures:
        measured.rates.pop(name, None)
    return measured


def _results(kind: str, measured: _Measured, entries: Sequence[_Entry]) -> Iterator[Result]:
    """A row for each entry: the ratio of ours is to itself without guesses, that of a peer's is ours, guessing alike,
    over its."""
    rates = measured.rates
    for entry in entries:
        if entry.name not in rates:
            continue
        ours = f"{OURS}, {OFF if entry.engine == OURS else entry.way}"
        ratio = None
        if ours in rates and ours != entry.name:
            pair = rates[ours], rates[entry.name]
            ratio = median_ratio(*(pair if entry.engine != OURS else reversed(pair)))
        yield Result(f"{kind}, {entry.name}", median(rates[entry.name]), "tok/s", peer=ours, ratio=ratio)
        own = rates.get(f"{entry.engine}, {OFF}")
        if entry.way != OFF and own is not None:
            gain = median_ratio(rates[entry.name], own)
            yield Result(f"{kind}, {entry.name}, gain", gain, "")
