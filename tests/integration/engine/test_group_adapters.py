"""Adapters on a model that is split over ranks: the tokens of the model that each is merged into, beside the base's,
behind a slot that is filled anew, and handed over between unequal groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

import pytest

from shared.engine.messages import AddSequence, PlaceAdapter
from shared.engine.speculation.speculator import Speculator
from shared.kv.hashing import ChainRoots
from shared.model.adapters.random_adapter import write_random_adapter
from shared.model.checkpoints import write_random_checkpoint
from shared.model.families.registry import load_config
from shared.model.ranks.shard import Degrees
from tests.integration.engine.engine_run import EngineRun, hand_off
from tests.integration.engine.families import STATES, write_family
from tests.integration.engine.group_run import GroupRun
from tests.integration.engine.test_greedy_against_transformers import load_transformers
from tests.quantized_checkpoints import STORAGES, write_quantized
from tests.unit.collectives.in_threads import needs_library
from tests.unit.engine.speculation.drafters import HostileDrafter, KnowingDrafter
from tests.unit.model.adapters.merged import merged
from tests.unit.model.paged_run import load_oracle, oracle_greedy

pytestmark = needs_library

ROOTS = ChainRoots("a model", "float32", 1)
PROMPT = [7 + (i * 37) % 190 for i in range(41)]
NUM_TOKENS = 32
SPLITS = {
    "tp2": (Degrees(2), {}),
    "tp2, own pools": (Degrees(2), {"own_pools": True}),
    "pp2": (Degrees(1, 2), {}),
    "tp2 pp2": (Degrees(2, 2), {}),
    "tp4, ranks without KV heads of their own": (Degrees(4), {}),
    "tp2 over two hosts": (Degrees(2), {"own_pools": True, "hosts": 2, "backend": "gloo"}),
}


class Model(NamedTuple):
    """A checkpoint, adapters of it, and what transformers answers to PROMPT: without one, then with each merged."""

    folder: Path
    adapters: list[Path]
    expected: list[list[int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("group") / "base"
    write_random_checkpoint(
        folder, "LlamaForCausalLM", vocab_size=211, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=32,
        hidden_size=64, intermediate_size=128,
    )  # fmt: skip
    config = load_config(folder)
    adapters = [
        write_random_adapter(folder.parent / f"adapter{seed}", config, rank=3 + 14 * seed, seed=seed, strength=2.0)
        for seed in range(3)
    ]
    oracle = load_oracle(folder)
    models = [oracle, *(merged(oracle, path) for path in adapters)]
    expected = [oracle_greedy(each, PROMPT, NUM_TOKENS)[0] for each in models]
    assert len({tuple(tokens) for tokens in expected}) == 4
    return Model(folder, adapters, expected)


def sequence(run: EngineRun, slot: int, root: str):
    made = run.sequence(PROMPT, NUM_TOKENS)
    made.adapter, made.hash_root = slot, ROOTS.of("", len(PROMPT), root)
    return made


def answers(run: EngineRun, slots: list[int], roots: list[str] | None = None) -> list[list[int]]:
    made = [sequence(run, slot, root) for slot, root in zip(slots, roots or map(str, slots), strict=True)]
    for item in made:
        run.engine.submit(AddSequence(item))
    return run.collect([item.sequence_id for item in made])


@pytest.mark.parametrize("ahead", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("name", SPLITS)
def test_adapters_and_the_base_beside_each_other_give_the_tokens_of_the_merged_models(
    model: Model, name: str, *, ahead: bool
) -> None:
    degrees, options = SPLITS[name]
    with closing(GroupRun(model.folder, degrees, has_adapters=True, ahead=ahead, **options)) as run:
        for slot, path in enumerate(model.adapters[:2], 1):
            run.place(slot, path)
        assert answers(run, [0, 1, 2, 1]) == [model.expected[place] for place in (0, 1, 2, 1)]
        run.engine.submit(PlaceAdapter(1, None))
        run.place(1, model.adapters[2])
        assert answers(run, [1, 2, 0], ["third", "2", "0"]) == [model.expected[place] for place in (3, 2, 0)]


@pytest.fixture(scope="module")
def engines(model: Model) -> Iterator[list[EngineRun]]:
    """One process, TP 2, stages, TP 4, each with the adapters in slots of its own."""
    with ExitStack() as stack:
        runs: list[EngineRun] = [stack.enter_context(closing(EngineRun(model.folder)))]
        for degrees, own_pools in ((Degrees(2), True), (Degrees(1, 2), False), (Degrees(4), False)):
            run = GroupRun(model.folder, degrees, own_pools=own_pools, has_adapters=True)
            runs.append(stack.enter_context(closing(run)))
        for number, run in enumerate(runs):
            for place, path in enumerate(model.adapters):
                run.place(1 + (place + number) % len(model.adapters), path)
        yield runs


def test_unequal_groups_hand_over_answers_with_adapters(model: Model, engines: list[EngineRun]) -> None:
    slots = [[1 + (place + number) % len(model.adapters) for place in range(3)] for number in range(len(engines))]
    for number, run in enumerate(engines):
        other = (number + 1) % len(engines)
        for place in range(3):
            run.pool.clear_cache()
            engines[other].pool.clear_cache()
            pair = (slots[number][place], slots[other][place])
            assert hand_off(run, engines[other], PROMPT, NUM_TOKENS, slots=pair) == model.expected[1 + place]


def test_layers_with_states_have_their_additions_whole_and_over_ranks(tmp_path: Path) -> None:
    """Projections by key head, rates and decays; beside the base, behind a prefix, and handed over with a repair."""
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_experts_per_tok": 2}
    extra = {**STATES["qwen3-next"][1], **sizes}
    write_family(tmp_path / "base", "qwen3-next", num_kv_heads=2, extra_config=extra)
    adapter = write_random_adapter(tmp_path / "adapter", load_config(tmp_path / "base"), rank=6, strength=2.0)
    oracle = load_transformers(tmp_path / "base")
    expected = [oracle_greedy(each, PROMPT, NUM_TOKENS)[0] for each in (oracle, merged(oracle, adapter))]
    assert expected[0] != expected[1]
    with (
        closing(EngineRun(tmp_path / "base")) as one,
        closing(GroupRun(tmp_path / "base", Degrees(2), has_adapters=True)) as two,
    ):
        for run in (one, two):
            run.place(1, adapter)
            assert answers(run, [0, 1]) == expected
            assert answers(run, [1, 0]) == expected[::-1]
            run.pool.clear_cache()
        assert hand_off(one, two, PROMPT, NUM_TOKENS, slots=(1, 1), corrupt=1) == expected[1]
        one.pool.clear_cache()
        assert hand_off(two, one, PROMPT, NUM_TOKENS, slots=(1, 1)) == expected[1]


def test_guesses_change_no_answer_of_an_adapter_over_ranks(model: Model) -> None:
    known = {tuple(PROMPT): model.expected[1]}
    speculator = Speculator([KnowingDrafter(known), HostileDrafter()], num_guesses=4)
    with closing(GroupRun(model.folder, Degrees(2), speculator=speculator, has_adapters=True)) as run:
        run.place(1, model.adapters[0])
        run.place(2, model.adapters[1])
        assert answers(run, [1, 2, 0]) == [model.expected[place] for place in (1, 2, 0)]
        assert sum(speculator.counters.num_accepted.values()) >= 20


@pytest.mark.parametrize(
    "storage", ["int4 groups with zeros", *(pytest.param(x, marks=pytest.mark.slow) for x in ("w8a8", "nf4"))]
)
def test_an_adapter_of_a_base_in_fewer_bits_gives_the_tokens_of_the_opened_weights_merged(
    model: Model, tmp_path: Path, storage: str
) -> None:
    """Alone, over two ranks, and with guesses of what comes next."""
    write_quantized(model.folder, STORAGES[storage], tmp_path / "quantized", tmp_path / "opened")
    oracle = merged(load_oracle(tmp_path / "opened"), model.adapters[1])
    expected = oracle_greedy(oracle, PROMPT, NUM_TOKENS)[0]
    drafter = KnowingDrafter({tuple(PROMPT): expected}, lambda place, token: token if place % 3 < 2 else 3)
    for run in (
        EngineRun(tmp_path / "quantized"),
        EngineRun(tmp_path / "quantized", speculator=Speculator([drafter], num_guesses=4)),
        GroupRun(tmp_path / "quantized", Degrees(2), has_adapters=True),
    ):
        with closing(run):
            run.place(1, model.adapters[1])
            found = answers(run, [1, 0])
            assert found[0] == expected
            assert found[1] != expected
