"""Sows a sample of mutants: `python -m tests.mutation --count 420 --out out/mutation`. Exit status 1 below the score.

`--again` takes an earlier run's results and tries its survivors once more, after tests were added.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.mutation.forks import FIRST, Outcome, Ran, run_tests, warm_up
from tests.mutation.mutants import Mutant, sample
from tests.mutation.results import JUDGED, Result, load, page, result, save, score
from tests.mutation.targets import TARGETS, Target


def try_mutants(target: Target, chosen: list[Mutant]) -> Iterator[Result]:
    """Every mutant against the target's tests, one by one. Raises RuntimeError where these fail without one."""
    files = target.files()
    alone = run_tests(target, files[0], (target.root / files[0]).read_text(), FIRST, {})
    if alone.outcome is not Outcome.SURVIVED:
        raise RuntimeError(f"the tests of {target.name} fail without a mutant:\n{alone.output[-4000:]}")
    print(f"{target.name}: {len(chosen)} mutants, {alone.cpu_s:.1f} s without one", flush=True)
    for mutant in chosen:
        yield _try(target, mutant, alone)


def _try(target: Target, mutant: Mutant, alone: Ran) -> Result:
    text = mutant.text(target.root)
    ran = run_tests(target, mutant.path, text, alone.limits(), alone.durations_s)
    found = result(mutant, target.root, text, ran)
    if found.outcome is Outcome.SURVIVED:
        print(f"  survives: {mutant.path}:{mutant.line} {found.change}", flush=True)
    return found


def _keep(results: list[Result], out: Path) -> None:
    save(results, out.with_suffix(".jsonl"))
    judged = json.loads(JUDGED.read_text()) if JUDGED.exists() else {}
    out.with_suffix(".md").write_text(page(results, judged))


def main() -> int:
    parser = argparse.ArgumentParser(description="Sow small faults and see whether a test notices each.")
    parser.add_argument(
        "--count", type=int, default=420, help="mutants in all, spread evenly over the targets that are tried"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--only", default="", help="names of targets, separated by commas")
    parser.add_argument("--out", type=Path, default=Path("out/mutation"), help="results: OUT.jsonl and OUT.md")
    parser.add_argument("--again", type=Path, help="an earlier OUT.jsonl: only its survivors are tried")
    parser.add_argument("--least", type=float, default=0.85, help="the score below which the run has failed")
    arguments = parser.parse_args()
    earlier = load(arguments.again) if arguments.again else []
    wanted = set(filter(None, arguments.only.split(",")))
    if unknown := wanted - {target.name for target in TARGETS}:
        parser.error(f"--only: no target {', '.join(sorted(unknown))}")
    warm_up()
    begun, results = time.monotonic(), []
    for each in earlier:  # what is not tried anew stays as it was
        if each.outcome is not Outcome.SURVIVED or (wanted and each.mutant.target not in wanted):
            results.append(each)
    chosen_targets = [target for target in TARGETS if not wanted or target.name in wanted]
    for target in chosen_targets:
        tried = [each for each in earlier if each.mutant.target == target.name]
        survivors = [each.mutant for each in tried if each.outcome is Outcome.SURVIVED]
        chosen = survivors if tried else sample(target, arguments.count // len(chosen_targets), arguments.seed)
        for found in try_mutants(target, chosen):
            results.append(found)
            _keep(results, arguments.out)  # a run takes long enough to be interrupted
    print(f"{score(results):.1%} of {len(results)} mutants noticed, in {time.monotonic() - begun:.0f} s")
    return 0 if score(results) >= arguments.least else 1


if __name__ == "__main__":
    sys.exit(main())
