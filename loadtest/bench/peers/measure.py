"""`python -m loadtest.bench peers`: Tandem's engine and its peers on the same random weights, measured in turns."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import torch

from loadtest.bench.peers.adapter import PLAIN, random_prompt
from loadtest.bench.peers.hidden_isa import CannotHide, environment
from loadtest.bench.peers.turns import CannotRun, Case, EngineProcess, Measured, named, take_turns
from loadtest.bench.peers.venvs import PEERS, VENV_OF, install, preloading, python
from loadtest.rig.command_line import Option, Out, choice, integers, names
from loadtest.rig.measure import median_ratio
from loadtest.rig.models import SHAPES, checkpoint
from loadtest.rig.results import Report, Result, machine
from shared.errors import ConfigError
from shared.kernels.cpu import isa

OURS = "ours"
ISAS = ("auto", *(each.name for each in isa.BUILT), "torch")
EMBED_LEN = 128
"""Tokens of a text that is embedded, on average."""


@dataclass(frozen=True)
class Turns:
    """What is measured, and how often: options of each comparison."""

    venvs: Annotated[Path, Option(help="folder in which the peers are installed")] = Path(".venv-peers")
    prefill: Annotated[str, Option(help="prompt lengths")] = "512 2048"
    batch: Annotated[str, Option(help="sequences that decode together")] = "1 8 32"
    context: Annotated[int, Option(help="prompt tokens of each sequence")] = 256
    embed: Annotated[str, Option(help="texts of 128 tokens on average that are embedded at once")] = ""
    steps: Annotated[int, Option(help="decode steps of a turn; their median is the figure")] = 12
    rounds: Annotated[int, Option()] = 5
    threads: Annotated[int, Option()] = 2

    def cases(self, ending: str = "") -> list[Case]:
        """Prompts, then batches; `ending`: of their names. Raises ConfigError."""
        prompts = [Case(f"prefill {n}{ending}", 1, n) for n in integers(self.prefill, "prefill")]
        batches = integers(self.batch, "batch")
        decodes = [Case(f"decode {n}{ending}", n, self.context, self.steps) for n in batches]
        texts = integers(self.embed, "embed") if self.embed else []
        return prompts + decodes + [Case(f"embed {n}{ending}", n, EMBED_LEN, embeds=True) for n in texts]


def main(
    how: Turns,
    model: Annotated[str, Option(help=f"a shape: {', '.join(SHAPES)}")] = "125m",
    peers: Annotated[str, Option(help="peers to measure")] = " ".join(PEERS),
    cpu_isa: Annotated[
        str, Option(help=f"widest instruction set: {', '.join(ISAS)}; hidden from the peers too")
    ] = "auto",
    out: Out = None,
) -> None:
    """Compare Tandem's engine with its peers on the same random weights, in turns."""
    choice(model, "model", SHAPES)
    choice(cpu_isa, "cpu-isa", ISAS)
    wanted = names(peers, "peers", PEERS)
    cases = how.cases()
    torch.set_num_threads(how.threads)
    folder = checkpoint(model)
    try:
        hidden = environment(cpu_isa, folder.parent.parent / "peers")
    except CannotHide as error:
        raise ConfigError(str(error), field="cpu-isa") from None
    engines = [(name, PLAIN) for name in (OURS, *wanted)]
    results, reasons = asyncio.run(compare(model, folder, engines, cases, how, cpu_isa, hidden))
    report = Report(out)
    report.add(results)
    conclude(report, f"{model} in bf16", reasons)


def conclude(report: Report, what: str, reasons: Mapping[str, str]) -> None:
    """Prints the table, and which engines are not in it."""
    print(f"\n{what}, on {machine()}\n")
    report.print()
    print()
    for name, reason in reasons.items():
        print(f"{name} gives no figures: {reason}")


async def has_started(process: EngineProcess, reasons: dict[str, str]) -> bool:
    """Starts an engine and prints what it is; where it cannot run, `reasons` gets why by its name."""
    try:
        await process.start()
    except CannotRun as error:
        reasons[process.name] = str(error)
        return False
    print(f"{process.name}: {process.description}", flush=True)
    return True


async def compare(
    model: str,
    folder: Path,
    engines: Sequence[tuple[str, str]],
    cases: list[Case],
    how: Turns,
    cpu_isa: str = "auto",
    hidden: Mapping[str, str] | None = None,
) -> tuple[list[Result], dict[str, str]]:
    """Installs missing peers and measures all engines, (name, form of its weights), beside the first; returns the
    results, and engine → why it has none. All engines' environments get what is `hidden`."""
    refused = install(how.venvs, {venv for name, _ in engines if (venv := VENV_OF.get(name)) is not None})
    running, reasons = [], {}
    async with contextlib.AsyncExitStack() as stack:
        for name, form in engines:
            venv = VENV_OF.get(name)
            if venv is not None and venv in refused:
                reasons[named(name, form)] = refused[venv]
                continue
            interpreter = python(how.venvs, venv)
            scratch = folder.parent.parent / "peers" / model
            environment_of = preloading(name, interpreter, hidden)
            process = await stack.enter_async_context(
                EngineProcess(name, interpreter, folder, scratch, how.threads, cpu_isa, environment_of, form)
            )
            if await has_started(process, reasons):
                running.append(process)
        agreement = await _agreement({process.name: process for process in running})
        measured, failures = await take_turns(running, cases, how.rounds, _print_round)
    own = named(*engines[0])
    return agreement + [result for item in measured for result in results_of(item, own)], reasons | failures


def _print_round(measured: Measured) -> None:
    latest = ", ".join(f"{name} {rates[-1]:.4g}" for name, rates in measured.rates.items())
    print(f"{measured.case.name}: {latest or 'warmed up'}", flush=True)


def results_of(measured: Measured, own: str) -> list[Result]:
    """A row for each engine; that of another one than `own` has its ratio to it."""
    rows = []
    for name, rates in measured.rates.items():
        ratio = None if name == own or own not in measured.rates else median_ratio(measured.rates[own], rates)
        rows.append(Result(measured.case.name, median(rates), "tok/s", peer=name, ratio=ratio))
    return rows


async def _agreement(running: dict[str, EngineProcess]) -> list[Result]:
    """Difference of Tandem's logits from transformers' over one prompt: mean distance in units of their spread, and
    the share of equal greedy choices."""
    if not {OURS, "transformers_sdpa"} <= running.keys():
        return []
    prompt = random_prompt(48, random.Random(1))
    ours, theirs = [
        torch.tensor(await running[name].ask(op="logits", prompt=prompt)) for name in (OURS, "transformers_sdpa")
    ]
    distance = float((ours - theirs).abs().mean() / theirs.std())
    same = float((ours.argmax(-1) == theirs.argmax(-1)).float().mean())
    peer = "transformers_sdpa"
    return [
        Result("logits, mean distance / spread", distance, "", peer=peer),
        Result("logits, greedy choices in common", same, "", peer=peer),
    ]
