"""`make bench-peers`: tokens a second of our engine and its peers on the same random weights, taking turns."""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
from pathlib import Path
from statistics import median

import torch

from loadtest.bench.peers.contestant import random_prompt
from loadtest.bench.peers.install import install, python
from loadtest.bench.peers.turns import CannotRun, Case, Measured, Process, take_turns
from loadtest.bench.shapes import SHAPES, checkpoint
from loadtest.figures import Result, machine, table, write

OURS = "ours"
PEERS = {"vllm_cpu": "vllm", "openvino_genai": "openvino", "transformers_sdpa": "vllm"}
"""Peer → the venv it lives in."""


def main() -> None:
    """Prints the table and, with --out, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(SHAPES), default="125m")
    parser.add_argument("--venvs", type=Path, default=Path(".venv-peers"), help="where the peers are installed")
    parser.add_argument("--peers", nargs="*", choices=sorted(PEERS), default=list(PEERS))
    parser.add_argument("--prefill", type=int, nargs="*", default=[512, 2048], help="prompt lengths")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32], help="sequences that decode together")
    parser.add_argument("--context", type=int, default=256, help="prompt tokens of each of them")
    parser.add_argument("--steps", type=int, default=12, help="decode steps of a turn, of which the median counts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folder = checkpoint(args.model)
    refused = install(args.venvs)
    cases = [Case(f"prefill {n}", 1, n) for n in args.prefill]
    cases += [Case(f"decode {n}", n, args.context, args.steps) for n in args.batch]
    with contextlib.ExitStack() as stack:
        running, reasons = [], {}
        for name in (OURS, *args.peers):
            venv = PEERS.get(name)
            if venv in refused:
                reasons[name] = refused[venv]
                continue
            interpreter = Path(sys.executable) if venv is None else python(args.venvs, venv).absolute()
            scratch = folder.parent.parent / "peers" / args.model
            process = stack.enter_context(Process(name, interpreter, folder, scratch, args.threads))
            try:
                process.start()
                running.append(process)
                print(f"{name}: {process.description}", flush=True)
            except CannotRun as error:
                reasons[name] = str(error)
        agreement = _agreement({process.name: process for process in running})
        measured, failures = take_turns(running, cases, args.rounds, _print_round)
    results = agreement + [result for item in measured for result in _results(item)]
    print(f"\n{args.model} in bf16, on {machine()}\n\n{table(results)}\n")
    for name, reason in (reasons | failures).items():
        print(f"{name} gives no figures: {reason}")
    if args.out:
        write(args.out, results)


def _print_round(measured: Measured) -> None:
    latest = ", ".join(f"{name} {rates[-1]:.4g}" for name, rates in measured.rates.items())
    print(f"{measured.case.name}: {latest or 'warmed up'}", flush=True)


def _results(measured: Measured) -> list[Result]:
    """A row for each engine, the peers' with our ratio."""
    rows = []
    for name, rates in measured.rates.items():
        ratio = None if name == OURS or OURS not in measured.rates else measured.ratio(OURS, name)
        rows.append(Result(measured.case.name, median(rates), "tok/s", peer=name, ratio=ratio))
    return rows


def _agreement(running: dict[str, Process]) -> list[Result]:
    """How far our logits are from transformers', over one prompt: mean distance in units of their spread, and greedy
    choices in common."""
    if not {OURS, "transformers_sdpa"} <= running.keys():
        return []
    prompt = random_prompt(48, random.Random(1))
    ours, theirs = (torch.tensor(running[name].ask(op="logits", prompt=prompt)) for name in (OURS, "transformers_sdpa"))
    distance = float((ours - theirs).abs().mean() / theirs.std())
    same = float((ours.argmax(-1) == theirs.argmax(-1)).float().mean())
    peer = "transformers_sdpa"
    return [
        Result("logits, mean distance / spread", distance, "", peer=peer),
        Result("logits, greedy choices in common", same, "", peer=peer),
    ]


if __name__ == "__main__":
    main()
