"""Sows a sample of mutants: `python -m tests.mutation --count 420 --out out/mutation`. Exit status 1 below the score.

`--again` takes an earlier run's results and tries its survivors once more, after tests were added, but for those that
are judged. `--continue` resumes an interrupted run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from loadtest.rig.command_line import Option, choice, run
from loadtest.rig.results import write_text
from tests.mutation.forks import FIRST, Outcome, Ran, run_tests, warm_up
from tests.mutation.mutants import Mutant, sample
from tests.mutation.results import JUDGED, Result, load, page, result, save, score
from tests.mutation.targets import TARGETS, Target


def try_mutants(target: Target, chosen: list[Mutant]) -> Iterator[Result]:
    """Every mutant against the target's tests, one by one, then against the wider ones where it survives. Raises
    RuntimeError where tests fail without one."""
    if not chosen:
        return
    alone = _alone(target)
    print(f"{target.name}: {len(chosen)} mutants, {alone.cpu_s:.1f} s without one", flush=True)
    widely: Ran | None = None
    for mutant in chosen:
        found = _try(target, mutant, alone)
        if found.outcome is Outcome.SURVIVED and target.wider:
            widely = widely or _alone(target.widely())
            found = _try(target.widely(), mutant, widely)
        if found.outcome is Outcome.SURVIVED:
            print(f"  survives: {mutant.path}:{mutant.line} {found.change}", flush=True)
        yield found


def _alone(target: Target) -> Ran:
    """The tests without a mutant."""
    path = target.files()[0]
    ran = run_tests(target, path, (target.root / path).read_text(), FIRST, {})
    if ran.outcome is not Outcome.SURVIVED:
        raise RuntimeError(f"the tests of {target.name} fail without a mutant:\n{ran.output[-4000:]}")
    return ran


def _try(target: Target, mutant: Mutant, alone: Ran) -> Result:
    text = mutant.text(target.root)
    ran = run_tests(target, mutant.path, text, alone.limits(), alone.durations_s)
    return result(mutant, target.root, text, ran)


def _keep(results: list[Result], out: Path) -> None:
    save(results, out.with_suffix(".jsonl"))
    write_text(out.with_suffix(".md"), page(results, _judged()))


def _judged() -> dict[str, str]:
    return json.loads(JUDGED.read_text()) if JUDGED.exists() else {}


def _open(earlier: list[Result], wanted: set[str]) -> list[Mutant]:
    """Survivors of these targets, or of all, without an entry in judged.json."""
    judged = _judged()
    survivors = [each for each in earlier if each.outcome is Outcome.SURVIVED and each.name not in judged]
    return [each.mutant for each in survivors if not wanted or each.mutant.target in wanted]


def main(
    count: Annotated[int, Option("mutants in all, spread evenly over the targets that are tried")] = 420,
    seed: Annotated[int, Option("of the sample")] = 1,
    only: Annotated[str, Option("names of targets, separated by commas")] = "",
    out: Annotated[Path, Option("results: OUT.jsonl and OUT.md")] = Path("out/mutation"),
    again: Annotated[
        Path | None, Option("an earlier OUT.jsonl: only its survivors without a judgement are tried")
    ] = None,
    go_on: Annotated[
        bool, Option(name="continue", help="keep what OUT.jsonl has, and try the mutants without a result")
    ] = False,
    least: Annotated[float, Option("the score below which the run has failed")] = 0.85,
) -> int:
    """Sow small faults and see whether a test notices each."""
    earlier = load(again) if again else []
    wanted = {choice(name, "only", [target.name for target in TARGETS]) for name in only.split(",") if name}
    warm_up()
    begun, kept = time.monotonic(), out.with_suffix(".jsonl")
    results = load(kept) if go_on and kept.exists() else []
    done = {each.mutant for each in results}
    open_ones = _open(earlier, wanted)
    results += [each for each in earlier if each.mutant not in open_ones and each.mutant not in done]
    chosen_targets = [target for target in TARGETS if not wanted or target.name in wanted]
    for target in chosen_targets:
        if again:
            chosen = [mutant for mutant in open_ones if mutant.target == target.name]
        else:
            chosen = sample(target, count // len(chosen_targets), seed)
        for found in try_mutants(target, [mutant for mutant in chosen if mutant not in done]):
            results.append(found)
            _keep(results, out)  # a run takes long enough to be interrupted
    print(f"{score(results):.1%} of {len(results)} mutants noticed, in {time.monotonic() - begun:.0f} s")
    return 0 if score(results) >= least else 1


if __name__ == "__main__":
    run(main, name="python -m tests.mutation")
