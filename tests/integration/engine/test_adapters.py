"""Adapters through scheduler, runner and pool: a sequence's tokens are those of its adapter, whoever is beside it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from shared.engine.messages import AddSequence, PlaceAdapter
from shared.engine.runner.runner import RunnerConfig
from shared.engine.speculation.speculator import Speculator
from shared.kv.hashing import ChainRoots
from shared.model.adapters.random_adapter import write_random_adapter
from shared.model.checkpoints import write_random_checkpoint
from tests.integration.engine.engine_run import EngineRun, hand_off
from tests.unit.engine.speculation.drafters import HostileDrafter, KnowingDrafter

NUM_ADAPTERS = 8
ROOTS = ChainRoots("a model", "float32", 1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A model, and adapters of it."""
    base = tmp_path_factory.mktemp("base")
    config = write_random_checkpoint(base, "LlamaForCausalLM", num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32)
    adapters = [
        write_random_adapter(tmp_path_factory.mktemp("adapter"), config, rank=4 + 9 * seed, seed=seed, strength=2.0)
        for seed in range(NUM_ADAPTERS)
    ]
    return [base, *adapters]


def sequence(run: EngineRun, prompt: list[int], slot: int, max_tokens: int = 24):
    made = run.sequence(prompt, max_tokens)
    made.adapter, made.hash_root = slot, ROOTS.of("", len(prompt), str(slot) if slot else "")
    return made


def answers(run: EngineRun, prompts: list[list[int]], slots: list[int], max_tokens: int = 24) -> list[list[int]]:
    made = [sequence(run, prompt, slot, max_tokens) for prompt, slot in zip(prompts, slots, strict=True)]
    for item in made:
        run.engine.submit(AddSequence(item))
    return run.collect([item.sequence_id for item in made])


def started(folders: list[Path], **given) -> EngineRun:
    run = EngineRun(folders[0], **given)
    for slot, folder in enumerate(folders[1:], 1):
        run.place(slot, folder)
    return run


@pytest.mark.parametrize("options", [{}, {"ahead": True}, {"num_blocks": 14, "num_host_blocks": 6}], ids=str)
def test_eight_adapters_and_the_base_mixed_answer_as_each_alone(folders: list[Path], options: dict) -> None:
    """Chunks and decodes mixed, also with a step planned ahead, and with too few blocks, so that some are preempted."""
    draw = random.Random(3)
    prompts = [draw.choices(range(3, 97), k=draw.randint(2, 50)) for _ in range(NUM_ADAPTERS + 1)]
    slots = list(range(NUM_ADAPTERS + 1))
    with started(folders) as run:
        alone = [answers(run, [prompt], [slot])[0] for prompt, slot in zip(prompts, slots, strict=True)]
    with started(folders, **options) as run:
        assert answers(run, prompts, slots) == alone
        run.scheduler.check_integrity()
    assert len({tuple(tokens) for tokens in alone}) == NUM_ADAPTERS + 1


def test_the_same_prompt_hits_only_the_blocks_of_its_own_adapter(folders: list[Path]) -> None:
    prompt = list(range(5, 75))
    with started(folders) as run:
        first = [answers(run, [prompt], [slot])[0] for slot in (0, 1, 2)]
        hits = run.scheduler.counters.num_prefix_hit_tokens
        assert hits == 0, "another adapter's blocks"
        again = [answers(run, [prompt], [slot])[0] for slot in (0, 1, 2)]
        assert run.scheduler.counters.num_prefix_hit_tokens == hits + 3 * 64
    assert again == first


def test_a_slot_that_is_filled_anew_computes_with_what_it_holds_then(folders: list[Path]) -> None:
    prompt = list(range(5, 35))
    with started(folders) as run:
        base, first, second = answers(run, [prompt] * 3, [0, 1, 2])
        run.engine.submit(PlaceAdapter(1, None))
        run.place(1, folders[2])
        made = run.sequence(prompt, 24)
        made.adapter, made.hash_root = 1, ROOTS.of("", len(prompt), "2 in another slot")
        run.engine.submit(AddSequence(made))
        assert run.collect([made.sequence_id]) == [second]
        assert answers(run, [prompt], [0]) == [base]
    assert first != second != base


def test_a_hand_off_gives_the_tokens_of_one_engine_though_slots_differ(folders: list[Path]) -> None:
    prompt, another = list(range(9, 60)), list(range(30, 81))
    with started(folders) as one, started([folders[0], *reversed(folders[1:])]) as other:
        expected = answers(one, [prompt, another], [2, 2])
        assert hand_off(one, other, prompt, 24, slots=(2, NUM_ADAPTERS - 1)) == expected[0]
        assert hand_off(other, one, another, 24, slots=(NUM_ADAPTERS - 1, 2), corrupt=1) == expected[1]


def test_static_steps_serve_the_base_and_others_its_adapters(folders: list[Path]) -> None:
    config = RunnerConfig(max_num_seqs=8, static_decode=True, warm_up=False)
    prompts = [list(range(3, 20)), list(range(30, 41))]
    with started(folders) as run:
        expected = answers(run, prompts, [3, 0])
    with started(folders, config=config, kernels="torch") as run:
        assert answers(run, prompts, [3, 0]) == expected
        assert answers(run, prompts[1:], [0]) == expected[1:]


def test_guesses_right_and_wrong_change_no_answer_of_an_adapter(folders: list[Path]) -> None:
    """A step then has several rows of a sequence, all with its adapter."""
    prompts = [list(range(5 + 7 * slot, 25 + 8 * slot)) for slot in range(5)]
    slots = [0, 1, 2, 3, 8]
    with started(folders) as run:
        expected = answers(run, prompts, slots)
    known = {tuple(prompt): tokens for prompt, tokens in zip(prompts, expected, strict=True)}
    half_right = KnowingDrafter(known, lambda place, token: token if place % 3 < 2 else 3)
    for drafter in (KnowingDrafter(known), half_right, HostileDrafter(seed=4, tokens=90)):
        speculator = Speculator([drafter], num_guesses=4)
        with started(folders, speculator=speculator) as run:
            assert answers(run, prompts, slots) == expected
            run.scheduler.check_integrity()
        counters = speculator.counters
        assert sum(counters.num_guesses.values()) > 0
        assert sum(counters.num_accepted.values()) > 0 or isinstance(drafter, HostileDrafter)
