"""A group whose steps are launched ahead gives the tokens of one process whose steps are not, in fp32: its ranks take
the tokens of the step in flight from the leader, before its host knows them."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from shared.collectives.rank_links import Backend
from shared.engine.messages import AbortSequence, AddSequence
from shared.engine.plan import StepPlan
from shared.model.families.registry import load_config
from shared.model.ranks.shard import Degrees
from shared.model.text.tokenizer import Tokenizer
from shared.structure.compiler import StructureCompiler
from shared.structure.structured_output import StructuredOutput, StructureKind
from tests.integration.engine import test_static_decode
from tests.integration.engine.engine_run import EngineRun
from tests.integration.engine.families import write_family
from tests.integration.engine.group_run import GroupRun
from tests.unit.collectives.in_threads import needs_library

pytestmark = needs_library

DEMO = Path("models/demo")
PROMPTS = [[5 + (i * k) % 200 for i in range(14 + 9 * k)] for k in range(1, 7)]
GREEDY, SAMPLED, _, PENALIZED, CUT = test_static_decode.WAYS
WAYS: list[dict[str, Any]] = [
    GREEDY,
    SAMPLED,
    {"min_tokens": 4, "stop_token_ids": tuple(range(9, 250)), "temperature": 1.0, "seed": 3},
    PENALIZED,
    CUT,
    {"structured_output": StructuredOutput(StructureKind.REGEX, "[a-z ]{60}"), "temperature": 1.0, "seed": 9},
]
"""One a prompt, as in `test_static_decode`; one ends early, and one's mask follows from the token in flight."""
NUM_TOKENS = 60
TIGHT = {"num_blocks": 12, "num_host_blocks": 4, "max_num_batched_tokens": 24}
"""Sequences are preempted; some are copied to host memory and back, others computed again."""


def demo_structures() -> StructureCompiler:
    config = load_config(DEMO)
    return StructureCompiler(lambda: Tokenizer.load(DEMO), config.eos_token_ids, config.vocab_size)


def answers(run: EngineRun) -> list[list[int]]:
    """Of all ways in one batch."""
    sequences = [run.sequence(prompt, NUM_TOKENS, **way) for prompt, way in zip(PROMPTS, WAYS, strict=True)]
    for item in sequences:
        run.engine.submit(AddSequence(item))
    return run.collect([item.sequence_id for item in sequences])


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with closing(EngineRun(DEMO, num_blocks=200, structures=demo_structures(), ahead=False)) as run:
        found = answers(run)
    assert len(found[2]) < NUM_TOKENS, "one ends in the middle of the batch"
    return found


def launched_ahead(run: EngineRun) -> list[StepPlan]:
    """The plans that take tokens of a step in flight, as they are launched."""
    found: list[StepPlan] = []
    launch = run.runner.launch

    def noted(plan: StepPlan) -> Any:
        if any(item.pending is not None for item in plan.sequences):
            found.append(plan)
        return launch(plan)

    run.runner.launch = noted  # type: ignore[method-assign]
    return found


KINDS: list[tuple[Degrees, bool, Backend]] = [
    (Degrees(2), False, "shm"),
    (Degrees(1, 2), True, "gloo"),
]
MORE: list[tuple[Degrees, bool, Backend]] = [
    (degrees, own_pools, backend)
    for degrees in (Degrees(2), Degrees(1, 2), Degrees(2, 2))
    for own_pools in (False, True)
    for backend in ("shm", "gloo")
    if (degrees, own_pools, backend) not in KINDS
]


@pytest.mark.parametrize(
    ("degrees", "own_pools", "backend"),
    [*KINDS, *(pytest.param(*kind, marks=pytest.mark.slow) for kind in MORE)],
    ids=str,
)
def test_steps_ahead_give_the_tokens_of_one_process(
    expected: list[list[int]], degrees: Degrees, own_pools: bool, backend: Backend
) -> None:
    how: dict[str, Any] = {"own_pools": own_pools, "backend": backend, "structures": demo_structures(), "ahead": True}
    with closing(GroupRun(DEMO, degrees, **how, **TIGHT)) as run:
        ahead = launched_ahead(run)
        assert answers(run) == expected
    run.scheduler.check_integrity()
    counters = run.scheduler.counters
    assert run.pool.num_used == 0
    assert 0 < counters.num_swapped_in < counters.num_preemptions
    assert len(ahead) > NUM_TOKENS
    assert any(len(plan.sequences) > sum(item.pending is not None for item in plan.sequences) for plan in ahead)


def test_what_is_cancelled_while_its_step_is_in_flight_changes_no_other(expected: list[list[int]]) -> None:
    how: dict[str, Any] = {"own_pools": True, "backend": "gloo", "structures": demo_structures(), "ahead": True}
    with closing(GroupRun(DEMO, Degrees(2), **how, num_blocks=200)) as run:
        cancelled = run.sequence(PROMPTS[0][::-1], 1000)
        run.engine.submit(AddSequence(cancelled))
        launch = run.runner.launch

        def cancelling(plan: StepPlan) -> Any:
            if any(item.sequence_id == cancelled.sequence_id and item.start > 60 for item in plan.sequences):
                run.engine.submit(AbortSequence(cancelled.sequence_id))
            return launch(plan)

        run.runner.launch = cancelling  # type: ignore[method-assign]
        assert answers(run) == expected
        assert run.generate(PROMPTS[0], max_tokens=NUM_TOKENS) == expected[:1], "behind a prefix"
    run.scheduler.check_integrity()
    assert run.pool.num_used == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "degrees"),
    [
        ("mixtral", Degrees(2, expert=2)),
        ("deepseek-v3", Degrees(1, 2)),
        ("deepseek-v3", Degrees(2)),
        ("gemma3", Degrees(2)),
        ("qwen3-next", Degrees(2)),
        ("qwen3-next", Degrees(1, 2)),
    ],
    ids=str,
)
def test_steps_ahead_of_every_kind_of_layer(tmp_path: Path, family: str, degrees: Degrees) -> None:
    folder = write_family(tmp_path / "model", family)
    with closing(EngineRun(folder, ahead=False)) as run:
        alone = run.generate(*PROMPTS, max_tokens=NUM_TOKENS)
    with closing(GroupRun(folder, degrees, ahead=True, num_blocks=16, num_host_blocks=8)) as run:
        ahead = launched_ahead(run)
        assert run.generate(*PROMPTS, max_tokens=NUM_TOKENS) == alone
    assert len(ahead) > NUM_TOKENS
