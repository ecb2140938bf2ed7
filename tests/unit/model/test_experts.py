"""Where experts lie, and how busy they were."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError
from shared.model.config.model_config import ModelConfig
from shared.model.families.registry import load_config
from shared.model.layers.expert_copies import ExpertCopies, slot_owners
from shared.model.layers.expert_placement import adjacent, balance, holders, set_loads
from shared.model.ranks.expert_load import ExpertLoad
from tests.integration.engine.families import write_family

LAYERS = st.lists(st.integers(0, 10_000), min_size=1, max_size=40)
NUM_SETS = st.integers(1, 8)
SPARE = st.integers(0, 4)


def placed(counts: Sequence[int], num_sets: int, spare: int) -> Sequence[Sequence[int]]:
    [sets] = balance([counts], num_sets, spare)
    return sets if sets is not None else adjacent(len(counts), num_sets)


def busiest(counts: Sequence[int], sets: Sequence[Sequence[int]]) -> float:
    return max(set_loads(counts, sets))


@given(LAYERS, NUM_SETS, SPARE)
def test_every_expert_lies_somewhere_and_no_set_has_more_than_its_limit(
    counts: list[int], num_sets: int, spare: int
) -> None:
    num_sets = min(num_sets, len(counts))
    sets = placed(counts, num_sets, spare)
    assert len(sets) == num_sets
    assert set().union(*sets) == set(range(len(counts)))
    for experts in sets:
        assert list(experts) == sorted(set(experts)), "each once, in order"
        assert 0 < len(experts) <= -(-len(counts) // num_sets) + spare
    if spare == 0:
        assert sum(map(len, sets)) == len(counts), "no copies"


@given(LAYERS, NUM_SETS, SPARE)
def test_the_busiest_set_is_never_busier_for_it(counts: list[int], num_sets: int, spare: int) -> None:
    num_sets = min(num_sets, len(counts))
    found = [busiest(counts, placed(counts, num_sets, more)) for more in range(spare + 1)]
    assert found[0] <= busiest(counts, adjacent(len(counts), num_sets))
    assert found == sorted(found, reverse=True), "more room, less to do"
    assert sum(set_loads(counts, placed(counts, num_sets, spare))) == pytest.approx(sum(counts))


@given(LAYERS, NUM_SETS, SPARE)
def test_the_same_counts_give_the_same_placement(counts: list[int], num_sets: int, spare: int) -> None:
    num_sets = min(num_sets, len(counts))
    assert balance([counts, None, tuple(counts)], num_sets, spare) == (
        *balance([counts], num_sets, spare),
        None,
        *balance([counts], num_sets, spare),
    )


@given(st.integers(1, 40), st.integers(0, 1000), NUM_SETS, SPARE)
def test_equal_counts_leave_adjacent_ranges(num_experts: int, tokens: int, num_sets: int, spare: int) -> None:
    assert balance([[tokens] * num_experts], min(num_sets, num_experts), spare) == (None,)


def test_a_hot_expert_is_copied_and_cold_ones_make_room_for_it() -> None:
    counts = [900, 10, 10, 10, 10, 20, 20, 20]
    assert busiest(counts, adjacent(8, 4)) == 910
    assert placed(counts, 4, 0)[0][0] == 0
    assert busiest(counts, placed(counts, 4, 0)) == 910, "two each: the hot one has a neighbour"
    sets = placed(counts, 4, 1)
    assert holders(sets)[0] == (0, 1, 2, 3)
    assert busiest(counts, sets) == 255, "a quarter of 900, and 30 of the others' 100, which come by tens"


def test_experts_move_where_none_may_be_copied() -> None:
    counts = [100, 100, 1, 1]
    assert placed(counts, 2, 0) == ((0, 2), (1, 3))


@given(LAYERS, NUM_SETS, SPARE, st.data())
def test_exactly_one_set_computes_each_choice(
    counts: list[int], num_sets: int, spare: int, data: st.DataObject
) -> None:
    sets = placed(counts, min(num_sets, len(counts)), spare)
    experts = st.integers(0, len(counts) - 1)
    expert_ids = torch.tensor(data.draw(st.lists(st.tuples(experts, experts), min_size=1, max_size=9)))
    owners = slot_owners(sets).flatten()
    answers = torch.zeros_like(expert_ids)
    for own, held in enumerate(sets):
        copies = ExpertCopies.of(sets, own)
        slots = copies.slots(expert_ids)
        local = copies.local_ids(slots)
        mine = local >= 0
        assert torch.equal(mine, owners[slots] == own)
        assert torch.equal(torch.tensor(held)[local[mine]], expert_ids[mine])
        answers += mine
    assert torch.equal(answers, torch.ones_like(expert_ids))


def test_copies_take_turns_by_row() -> None:
    sets = ((0, 1), (0, 2))
    rows = torch.zeros((6, 1), dtype=torch.int64)
    found = [ExpertCopies.of(sets, own).local_ids(ExpertCopies.of(sets, own).slots(rows)) for own in (0, 1)]
    assert found[0].flatten().tolist() == [0, -1, 0, -1, 0, -1]
    assert found[1].flatten().tolist() == [-1, 0, -1, 0, -1, 0]


COUNTS = {1: [5, 0, 7, 1, 2, 3]}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """Two layers of six experts, the first dense."""
    return load_config(write_family(tmp_path_factory.mktemp("load"), "qwen3-moe"))


def test_what_is_written_is_read(tmp_path: Path, config: ModelConfig) -> None:
    path = tmp_path / "load.json"
    assert ExpertLoad.read(path, config) == ExpertLoad(2, 6, {}), "no file: nothing measured"
    load = ExpertLoad.read(path, config).and_then(COUNTS)
    load.write(path)
    assert ExpertLoad.read(path, config) == load == ExpertLoad(2, 6, COUNTS)
    assert load.by_layer == [None, COUNTS[1]]
    assert [file.name for file in tmp_path.iterdir()] == ["load.json"], "no unfinished file is left"


def test_older_counts_fade(config: ModelConfig) -> None:
    first = ExpertLoad.none(config).and_then(COUNTS)
    assert first.and_then({1: [1, 1, 1, 1, 1, 1]}).tokens == {1: [3, 1, 4, 1, 2, 2]}
    assert first.and_then({}).tokens == {1: [2, 0, 3, 0, 1, 1]}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"num_layers": 9, "num_experts": 6, "tokens": {}}, "a model with 9 layers, this one has 2"),
        (
            {"num_layers": 2, "num_experts": 8, "tokens": {"1": [0] * 8}},
            "a model with 8 experts in a layer, this one has 6",
        ),
        ({"num_layers": 2, "num_experts": 6, "tokens": {"0": [0] * 6}}, "layer 0, which has no experts"),
        ({"num_layers": 2, "num_experts": 6, "tokens": {"2": [0] * 6}}, "layer 2, which has no experts"),
        ({"num_layers": 2, "num_experts": 6, "tokens": {"1": [0] * 5}}, "no such file"),
        ({"num_layers": 2, "num_experts": 6, "tokens": {"1": [0, 0, 0, 0, 0, -1]}}, "no such file"),
        ({"num_layers": 2, "num_experts": 6, "tokens": {"one": [0] * 6}}, "no such file"),
        ({"num_layers": "2", "num_experts": 6, "tokens": {}}, "no such file"),
        ([], "no such file"),
        (None, "cannot be read"),
    ],
)
def test_a_file_of_another_model_or_of_none_is_refused(
    tmp_path: Path, config: ModelConfig, content: object, said: str
) -> None:
    path = tmp_path / "load.json"
    path.write_text("{" if content is None else json.dumps(content))
    with pytest.raises(ConfigError, match=said) as refused:
        ExpertLoad.read(path, config)
    assert refused.value.field == "expert_load"
