"""Guesses change no answer of a model with states: behind a wrong one its layers go on from the state before it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from shared.engine.sampling_params import MOST_GUESSES
from shared.engine.speculation.drafter import Drafter
from shared.engine.speculation.speculator import Speculator
from shared.model.families.registry import load_config
from shared.model.ranks.shard import Degrees
from tests.integration.engine.engine_run import BLOCK_SIZE, EngineRun, hand_off
from tests.integration.engine.group_run import GroupRun
from tests.integration.engine.test_speculation import accepted
from tests.integration.engine.test_states import FIRST, SHAPES, VECTORS, checkpoint
from tests.unit.collectives.in_threads import needs_library
from tests.unit.engine.speculation.drafters import HostileDrafter, KnowingDrafter

LENGTH = 48
PROMPTS = [[5 + (i * (2 * k + 3)) % 200 for i in range(11 + 9 * k)] for k in range(4)]
WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.1, "seed": 11, "top_p": 0.9},
    {"temperature": 0.8, "seed": 12, "logit_bias": ((16, 3.0), (30, -100.0)), "bad_sequences": ((18,),)},
]


@pytest.fixture(
    scope="module",
    params=[*FIRST, *(pytest.param(shape, marks=pytest.mark.slow) for shape in SHAPES if shape not in FIRST)],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("states") / "model"
    checkpoint(folder, request.param)
    return folder


@pytest.fixture(
    scope="module", params=[pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow)]
)
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    return WAYS[request.param]


@pytest.fixture(scope="module")
def expected(folder: Path, way: dict[str, Any]) -> list[list[int]]:
    with EngineRun(folder) as run:
        return run.generate(*PROMPTS, max_tokens=LENGTH, **way)


def drafters(prompts: list[list[int]], expected: list[list[int]]) -> list[Drafter]:
    known = {tuple(prompt): tokens for prompt, tokens in zip(prompts, expected, strict=True)}
    return [
        KnowingDrafter(known),
        KnowingDrafter(known, lambda place, token: token if place < 4 else 7),
        KnowingDrafter(known, lambda place, token: (token + 1) % 200),
        HostileDrafter(3, 200),
    ]


def run_with(folder: Path, drafter: Drafter, num_guesses: int = MOST_GUESSES, **options: Any) -> EngineRun:
    return EngineRun(folder, speculator=Speculator([drafter], num_guesses=num_guesses), **options)


def end(run: EngineRun) -> None:
    run.end()


@pytest.mark.parametrize("num_guesses", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 5)), MOST_GUESSES])
def test_right_and_wrong_guesses_change_nothing(folder, way, expected, num_guesses):
    for drafter in drafters(PROMPTS, expected):
        run = run_with(folder, drafter, num_guesses)
        assert run.generate(*PROMPTS, max_tokens=LENGTH, **way) == expected
        num_guessed, num_right = accepted(run)
        assert num_guessed > 0
        if drafter.method == "knowing" and drafter._twist(0, 9) == 9:
            assert num_right > num_guessed // 4
        end(run)


def test_a_state_that_was_kept_behind_right_guesses_is_what_others_go_on_from(folder, way, expected):
    """The next turn of a conversation finds blocks up to the answer's last full one."""
    for drafter in drafters(PROMPTS, expected)[:2]:
        run = run_with(folder, drafter)
        answer = run.generate(PROMPTS[1], max_tokens=LENGTH, **way)[0]
        whole = [*PROMPTS[1], *answer]
        with EngineRun(folder) as plain:
            later = plain.generate([*whole, 3, 4], max_tokens=12, **way)
        before = run.scheduler.counters.num_prefix_hit_tokens
        assert run.generate([*whole, 3, 4], max_tokens=12, **way) == later
        found = run.scheduler.counters.num_prefix_hit_tokens - before
        assert found >= (len(whole) - MOST_GUESSES - 1) // BLOCK_SIZE * BLOCK_SIZE - BLOCK_SIZE
        end(run)


def test_a_handed_over_answer_is_the_same(folder, way, expected):
    with EngineRun(folder) as prefill:
        for drafter in drafters(PROMPTS, expected)[1:4:2]:
            run = run_with(folder, drafter)
            for prompt, tokens in zip(PROMPTS[1::2], expected[1::2], strict=True):
                assert hand_off(prefill, run, prompt, LENGTH, **way) == tokens
            assert accepted(run)[0] > 0
            end(run)


@pytest.mark.parametrize("num_host_blocks", [pytest.param(0, marks=pytest.mark.slow), 400])
def test_preemption_changes_no_token(tmp_path, num_host_blocks):
    folder, length = tmp_path / "model", 120  # a state does not grow: only long answers fill the pool
    checkpoint(folder, "every fourth layer attends")
    prompts = [[5 + (i * k) % 200 for i in range(20 + 9 * k)] for k in range(1, 7)]
    with EngineRun(folder, max_num_batched_tokens=512) as roomy:
        expected = roomy.generate(*prompts, max_tokens=length, **WAYS[1])
    groups = load_config(folder).block_layout(BLOCK_SIZE, "float32").groups
    blocks = -(-groups.num_blocks(len(prompts[-1]) + length, 24) // groups.size) + 1
    for drafter in drafters(prompts, expected)[1 : 2 if num_host_blocks else None]:
        run = run_with(folder, drafter, num_blocks=blocks, num_host_blocks=num_host_blocks, output_quantile=0.0)
        assert run.generate(*prompts, max_tokens=length, **WAYS[1]) == expected
        assert run.scheduler.counters.num_preemptions > 0
        assert accepted(run)[0] > 0
        end(run)


@needs_library
@pytest.mark.parametrize(
    ("degrees", "own_pools"),
    [(Degrees(2), False), *(pytest.param(d, True, marks=pytest.mark.slow) for d in (Degrees(2), Degrees(4)))],
)
def test_guesses_change_no_answer_of_a_group(tmp_path, degrees, own_pools):
    folder = tmp_path / "model"
    checkpoint(folder, VECTORS, num_heads=8, num_kv_heads=4)
    with EngineRun(folder) as run:
        expected = run.generate(*PROMPTS, max_tokens=LENGTH)
    for drafter in drafters(PROMPTS, expected)[:2]:
        speculator = Speculator([drafter], num_guesses=MOST_GUESSES)
        with closing(GroupRun(folder, degrees, own_pools=own_pools, speculator=speculator)) as group:
            assert group.generate(*PROMPTS, max_tokens=LENGTH) == expected
            assert accepted(group)[1] > 0
