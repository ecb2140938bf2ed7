"""`python -m loadtest.bench parallel`: what splitting a model over processes of this machine costs and gives."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import torch

from loadtest.bench.engine.cpu import DTYPES, Bench
from loadtest.bench.engine.cuda import BLOCK_SIZE, Step
from loadtest.bench.parallel.hosts import measure_hosts
from loadtest.bench.parallel.sums import measure_sums
from loadtest.rig.command_line import Option, Out, choice, integers
from loadtest.rig.measure import median_ratio, times_s, turns
from loadtest.rig.models import SHAPES, model_folder
from loadtest.rig.results import Report, Result, machine
from services.worker.group.leader import RankGroup
from shared.cores.core_choice import CoreShare
from shared.cores.topology import read_topology
from shared.engine.runner.runner import Runner
from shared.errors import TandemError
from shared.kernels.pool_view import dtype_name
from shared.model.ranks.rank_decoder import RankDecoder
from shared.model.ranks.shard import Degrees
from shared.model.weights.loader import fingerprint

GOAL_RATIO = 0.95
STEPS = (Step(1, 0, 512), Step(1, 0, 2048), Step(1, 512, 1), Step(8, 512, 1), Step(32, 512, 1))


def measure_steps(folder: Path, dtype: torch.dtype, degrees: Degrees, pairs: int) -> list[Result]:
    """Tokens a second of the group, and its ratio to one process, by pairs of steps right after each other."""
    num_tokens = max(step.num_kv_tokens for step in STEPS)
    threads = torch.get_num_threads()
    whole = Bench(folder, dtype, "auto", num_tokens)
    results = []
    label = f"tp {degrees.tensor}" + (f", ep {degrees.expert}" if degrees.expert > 1 else "")
    with _group_runner(folder, dtype, whole, degrees) as split:
        for step in STEPS:
            plan = step.plan(whole.decoder.config.vocab_size)
            ways = ((whole.runner, threads), (split, max(1, threads // degrees.tensor)))
            taken: list[list[float]] = [[], []]
            for number, way in turns((0, 1), pairs + 1):
                runner, num_threads = ways[way]
                torch.set_num_threads(num_threads)
                with torch.inference_mode():
                    seconds = times_s(partial(runner.execute, plan), 1, warmup=0)
                taken[way] += seconds if number else []
            torch.set_num_threads(threads)
            ratio = median_ratio(*taken)
            rate = step.batch * step.count / median(taken[1])
            results.append(Result(f"{label}: {step.name}", rate, "tok/s", None, None, "one process", ratio))
    return results


@contextmanager
def _group_runner(folder: Path, dtype: torch.dtype, whole: Bench, degrees: Degrees) -> Iterator[Runner]:
    """The leader's runner of a group whose followers are processes."""
    name = dtype_name(dtype)
    cores = tuple(sorted(os.sched_getaffinity(0)))
    share = CoreShare((), max(degrees.num_ranks, len(cores)))
    group = RankGroup("bench", str(folder), degrees, dtype, whole.decoder.kernels.name, share, read_topology())
    try:
        links = group.meet(_raise)
        decoder = RankDecoder.load_rank(folder, dtype, whole.decoder.kernels.name, degrees, links)
        group.wait_loaded()
        num_blocks = whole.runner.kv_blocks.shape[0]
        layout = decoder.config.block_layout(BLOCK_SIZE, name)
        pool = group.share_pool(layout, num_blocks, fingerprint(folder, name))
        assert pool is not None, "the ranks share one pool"
        pool.fill_(0.01)
        yield Runner(decoder, layout, num_blocks, pool=pool, announce=group.announcer)
    finally:
        group.close()


def _raise(error: TandemError) -> None:
    raise error


def main(
    model: Annotated[str, Option(help=f"model folder or shape ({', '.join(SHAPES)}); empty = sums alone")] = "1b",
    dtype: Annotated[str, Option(help="of weights and computation: bf16 or fp32")] = "fp32",
    ranks: Annotated[str, Option(help="numbers of ranks whose sums are measured")] = "2",
    ep: Annotated[str, Option(help="expert-parallel degrees of the steps, for models with experts")] = "1",
    pairs: Annotated[int, Option(help="pairs of runs")] = 5,
    repeats: Annotated[int, Option(help="sums of 64 KiB in a run; fewer of larger ones")] = 400,
    out: Out = None,
) -> None:
    """Measure sums over ranks beside gloo, messages between two hosts, and steps at tp 2 beside one process with two
    threads."""
    choice(dtype, "dtype", DTYPES)
    expert_degrees = integers(ep, "ep")
    report = Report(out)
    for count in integers(ranks, "ranks"):
        report.add(measure_sums(count, pairs, repeats))
    report.add(measure_hosts(pairs, repeats))
    if model:
        folder = model_folder(model)
        for expert in expert_degrees:
            report.add(measure_steps(folder, DTYPES[dtype], Degrees(2, expert=expert), pairs))
    print(f"{machine()}\n")
    report.print()
    print("\nLimit of a sum: one copy of the same bytes; of a message between hosts: within one.")
