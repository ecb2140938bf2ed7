"""What steps ask of a GPU, and that no decode step makes host and device wait for each other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.engine.plan import StepPlan
from shared.engine.speculation.head_model import HeadGuess
from shared.kernels.lora.parts import LoraPart
from shared.kernels.lora.step import ExpertLoras, Projection
from shared.model.adapters.adapter import Adapter
from shared.model.ranks.shard import Degrees
from shared.model.weights.plan import Quantization
from tests.integration.engine.families import EXPERTS, FAMILIES, OTHERS, STATES, write_family

from . import on_meta
from .conftest import Run
from .on_meta import MODELS, HostMeeting, MetaLink, Noted, Steps, plan

WAYS = (["greedy"], ["seeded"], ["penalties"], ["bias"], ["structure"], list(on_meta.WAYS))
LAUNCHES_OF_A_LAYER = {"llama": 9, "qwen3-moe": 12, "deepseek-v3": 26, "qwen3-next": 22}
"""Most that a decoding layer may have in a graph."""


EACH_FAMILY = [
    name if name in ("Qwen3ForCausalLM", "gpt-oss", "qwen3.5-moe") else pytest.param(name, marks=pytest.mark.slow)
    for name in (*FAMILIES, *EXPERTS, *OTHERS, *STATES)
]
"""As values of a parameter: one of each kind of cache beside those of MODELS, in slow tests all."""


def decode(name: str) -> dict[str, tuple[Noted, Noted]]:
    """By way, two steps that follow each other: the second is launched while the first runs."""
    steps = Steps(on_meta.model(name, 2))
    found, groups = {}, {"num_groups": steps.runner.layout.groups.size}
    for ways in WAYS:
        first = steps.run(plan(ways, 20, first=True, **groups))
        found["+".join(ways)] = first, steps.run(plan(ways, 21, pending=True, **groups))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_a_decode_step_meets_the_host_nowhere_and_sends_little(compiled: Run, name: str) -> None:
    for ways, (first, ahead) in compiled(decode, name).items():
        assert first.fetches == ahead.fetches == 1, ways
        # A mask follows from the token of the step before, which the host waits for while the device computes.
        assert (first.waits, ahead.waits) == (0, 1 if "structure" in ways else 0), ways


SPLIT = [
    (name, degrees)
    for name, of_model in (
        ("llama", (Degrees(2), Degrees(2, 2), Degrees(1, 2))),
        ("qwen3-moe", (Degrees(2, expert=2),)),
        ("deepseek-v3", (Degrees(2),)),
        ("qwen3-next", (Degrees(2),)),
    )
    for degrees in of_model
]


def of_ranks(name: str, degrees: Degrees) -> list[tuple[bool, dict[str, list[Noted]]]]:
    """By rank, whether its steps are launched ahead, and by way a decode, one behind it in flight, and a long prompt
    beside it."""
    found = []
    for rank in range(degrees.num_ranks):
        steps = Steps(on_meta.model(name, 2), degrees=degrees, rank=rank)
        groups = {"num_groups": steps.runner.layout.groups.size}
        by_way = {}
        for ways in (*WAYS, ["greedy", "greedy"], [*on_meta.WAYS, "greedy"]):
            plans = [plan(ways, 20, first=True, **groups), plan(ways, 21, pending=True, **groups)]
            plans.append(plan(ways, 22, pending=True, chunk=40, **groups))
            by_way["+".join(ways)] = [steps.run(each) for each in plans]
        found.append((steps.runner.is_async, by_way))
    return found


@pytest.mark.parametrize(("name", "degrees"), SPLIT, ids=str)
def test_no_rank_of_a_group_of_gpus_meets_its_host(compiled: Run, name: str, degrees: Degrees) -> None:
    leader, *followers = compiled(of_ranks, name, degrees)
    assert leader[0], "its steps are launched ahead"
    for ways, noted in leader[1].items():
        assert [each.fetches for each in noted] == [1, 1, 1], ways
        # Only a mask waits for a token in flight; the last sequence's chunk follows none.
        assert [each.waits for each in noted] == [0, "structure" in ways, "structure+" in ways], ways
    for _, by_way in followers:
        for ways, noted in by_way.items():
            assert all((each.fetches, each.waits) == (0, 0) for each in noted), ways


def settled(num_of_each: int) -> dict[str, tuple[int, int]]:
    """By way, what a step of so many sequences launches and sends beside its graph, when the one before was alike."""
    steps = Steps(on_meta.model("llama", 2))
    found = {}
    for ways in WAYS:
        steps.run(plan(ways * num_of_each, 20, first=True))
        noted = steps.run(plan(ways * num_of_each, 21, pending=True))
        found["+".join(ways)] = noted.num_launches, noted.sends
    return found


def test_what_changes_logits_costs_the_same_for_one_sequence_and_for_many(compiled: Run) -> None:
    one, many = compiled(settled, 1), compiled(settled, 4)
    assert one == many
    assert one == {
        "greedy": (0, 1),
        "seeded": (0, 1),
        "penalties": (10, 2),
        "bias": (20, 1),
        "structure": (13, 4),
        "greedy+seeded+penalties+bias+structure": (27, 4),
    }


def layer_launches(name: str) -> int:
    """Launches that one more layer adds to the graph of the largest batch."""
    two, three = (Steps(on_meta.model(name, layers)).captured[0].total() for layers in (2, 3))
    return three - two


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_in_a_graph_is_few_launches(compiled: Run, name: str) -> None:
    assert compiled(layer_launches, name) <= LAUNCHES_OF_A_LAYER[name]


def steps_in_codes(quantization: Quantization) -> tuple[int, list[Noted]]:
    """Launches that one more layer of weights in codes adds to a graph; a decode step by a graph, and long prompts."""
    two, three = (Steps(on_meta.model("llama", layers), quantization) for layers in (2, 3))
    two.run(plan(["greedy"], 20, first=True))
    found = [two.run(plan(["greedy"], 21, pending=True)), two.run(plan(["greedy"], 0, chunk=400))]
    return three.captured[0].total() - two.captured[0].total(), found


@pytest.mark.parametrize(("quantization", "more"), [("int4", 0), ("int8", 0), ("fp8", 0), ("w8a8", 4)])
def test_weights_in_codes_meet_the_host_nowhere_and_take_no_more_launches(
    compiled: Run, quantization: Quantization, more: int
) -> None:
    of_layer, noted = compiled(steps_in_codes, quantization)
    assert of_layer <= LAUNCHES_OF_A_LAYER["llama"] + more
    assert all(each.fetches == 1 and each.waits == 0 for each in noted)


def prompts(name: str) -> list[Noted]:
    """A short chunk, a long one, one beside answers, and two long ones: all in steps of their own."""
    steps = Steps(on_meta.model(name, 3), max_num_batched_tokens=2048)
    groups = {"num_groups": steps.runner.layout.groups.size}
    plans = [plan(["greedy"], 0, chunk=30, **groups), plan(["seeded"], 0, chunk=400, **groups)]
    plans += [
        plan(["greedy", "seeded"], 30, chunk=20, **groups),
        plan(["penalties", "greedy"], 30, chunk=400, **groups),
    ]
    return [steps.run(each) for each in plans]


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_meets_the_host_nowhere(compiled: Run, name: str) -> None:
    assert all(noted.fetches == 1 and noted.waits == 0 for noted in compiled(prompts, name))


def longest_prompt(name: str) -> Noted:
    """As many tokens as `max_num_batched_tokens` may be."""
    most = 65_536
    steps = Steps(on_meta.model(name, 2, max_position_embeddings=most), max_num_batched_tokens=most, max_seq_len=most)
    return steps.run(plan(["greedy"], 0, chunk=most, num_groups=steps.runner.layout.groups.size))


@pytest.mark.parametrize(
    "name", [name if name == "qwen3-moe" else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_a_device_takes_the_grids_of_the_longest_step(compiled: Run, name: str) -> None:
    assert compiled(longest_prompt, name).num_launches


def with_guesses(step: StepPlan, count: int) -> StepPlan:
    """The step with `count` guesses of each sequence, by tokens that STRUCTURE may not allow."""
    items = []
    for item in step.sequences:
        (spec,) = item.samples
        samples = tuple(spec._replace(position=spec.position + place) for place in range(1 + count))
        items.append(item._replace(token_ids=(*item.token_ids, *range(5, 5 + count)), samples=samples))
    return StepPlan(tuple(items))


def guessed(name: str, **settings: Any) -> dict[str, tuple[Noted, Noted]]:
    """By way, a step with 3 guesses of each sequence, and a decode step behind it."""
    steps = Steps(on_meta.model(name, 2), **settings)
    found, groups = {}, {"num_groups": steps.runner.layout.groups.size}
    for ways in (["greedy"], ["seeded"], ["bias"], ["structure"], ["greedy", "seeded", "structure"]):
        more = {"repetition_penalty": 1.0, "bad_sequences": ((4,),), **groups}
        steps.run(plan(ways, 20, first=True, **more))
        checked = steps.run(with_guesses(plan(ways, 21, **more), 3))
        found["+".join(ways)] = checked, steps.run(plan(ways, 25, **more))
    return found


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "deepseek-v3"])
@pytest.mark.parametrize("settings", [{}, {"piecewise_tokens": None, "max_num_batched_tokens": 64}], ids=str)
def test_a_step_that_checks_guesses_meets_the_host_nowhere(compiled: Run, name: str, settings: dict[str, Any]) -> None:
    for ways, noted in compiled(guessed, name, **settings).items():
        assert [(each.fetches, each.waits) for each in noted] == [(1, 0)] * 2, ways
        checked = noted[0].launches
        if name != "deepseek-v3":  # its latents are read by each token
            assert (checked["decode_parts"], checked["prefill_tiles"]) == (2, 0), ways
        assert noted[1].launches["decode_parts"] == 0, "a decode step is a graph"


def with_head(name: str) -> dict[str, list[Noted]]:
    """By way, a decode step by a graph, three guesses behind it, and a step in pieces that checks some. Each begins
    guesses."""
    described = on_meta.model(name, 2, num_nextn_predict_layers=1)
    steps = Steps(described, has_head=True, piecewise_tokens=None, max_num_batched_tokens=64)
    assert steps.runner.heads is not None
    found = {}
    for ways in (["greedy"], ["seeded"], ["penalties", "greedy"]):
        more = {"bad_sequences": ((4,),)}
        steps.run(replace(plan(ways, 20, first=True, **more), begins_guesses=True))
        ahead = replace(plan(ways, 21, pending=True, **more), begins_guesses=True)
        noted = [steps.run(ahead)]
        guesses = []
        for item in ahead.sequences:
            (spec,) = item.samples
            first, *later = (spec._replace(position=spec.position + place) for place in range(1, 4))
            first = first._replace(prompt_token_ids=(3, 4), output_token_ids=(5,))
            guesses.append(HeadGuess(item.sequence_id, item.end - 1, None, (first, *later), item.block_ids))
        with steps.watched() as watched:
            steps.runner.heads.guess(guesses)
        noted.append(Noted(watched.launches.copy(), watched.sends, watched.fetches, watched.waits))
        noted.append(steps.run(replace(with_guesses(plan(ways, 22, **more), 3), begins_guesses=True)))
        found["+".join(ways)] = noted
    return found


@pytest.mark.parametrize("name", ["llama", "deepseek-v3"])
def test_a_head_beside_steps_meets_the_host_nowhere_and_its_guesses_meet_it_once(compiled: Run, name: str) -> None:
    for ways, (decoded, guessed, checked) in compiled(with_head, name).items():
        assert [(each.fetches, each.waits) for each in (decoded, checked)] == [(1, 0)] * 2, ways
        assert guessed.waits == 1, ways
        assert 0 < decoded.num_launches < guessed.num_launches, "a head's layer is launched behind a graph"


def family_steps(folder: Path) -> int:
    """Decodes by a graph, and a prompt beside an answer; the number of graphs."""
    steps = Steps(on_meta.load_config(folder))
    num_groups = steps.runner.layout.groups.size
    for ways in (["greedy", "seeded"], ["penalties", "bias"]):
        steps.run(plan(ways, 20, first=True, num_groups=num_groups))
        steps.run(plan(ways, 21, pending=True, num_groups=num_groups))
        steps.run(plan(ways, 22, chunk=40, num_groups=num_groups))
    return len(steps.captured)


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_every_family_decodes_in_graphs_without_meeting_the_host(compiled: Run, tmp_path: Path, family: str) -> None:
    assert compiled(family_steps, write_family(tmp_path, family)) == 6  # of 1, 2, 4, 8, 16 and 20 sequences


def mixed_steps(folder: Path) -> dict[str, tuple[int, int]]:
    """By way, the number of graphs, and what a prompt beside an answer launches outside of them."""
    found = {}
    for way, settings in (("eager", {}), ("as a worker", {"piecewise_tokens": None, "max_num_batched_tokens": 64})):
        steps = Steps(on_meta.load_config(folder), **settings)
        groups = {"num_groups": steps.runner.layout.groups.size}
        steps.run(plan(["greedy", "seeded"], 20, first=True, **groups))
        found[way] = len(steps.captured), steps.run(plan(["greedy", "seeded"], 22, chunk=40, **groups)).num_launches
    return found


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_every_family_runs_mixed_steps_in_pieces_without_meeting_the_host(
    compiled: Run, tmp_path: Path, family: str
) -> None:
    folder = write_family(tmp_path, family)
    found = compiled(mixed_steps, folder)
    num_layers = on_meta.load_config(folder).num_layers
    assert found["eager"][0] == 6
    assert found["as a worker"][0] == 6 + 8 * num_layers  # 8, 16, … 64 tokens
    assert found["as a worker"][1] < found["eager"][1]


def largest_graph() -> int:
    """Launches of the largest batch's graph without slots of adapters."""
    return Steps(on_meta.model("llama", 2)).captured[0].total()


def adapter_steps() -> tuple[list[int], list[Noted]]:
    """Launches of the graphs of the largest batch, without adapters and with; then steps of the base beside an adapter,
    of the base alone, of a slot that holds nothing for graphs, and of that slot filled anew."""
    steps = Steps(on_meta.model("llama", 2), adapter_slots=3, adapter_max_rank=16)
    decoder = steps.runner._decoder
    half = torch.zeros(16, 4096), torch.zeros(4096, 16)
    layer: dict[Projection, tuple[LoraPart, ...]] = {"o": (LoraPart(*half, 2.0, 0),)}
    packed = decoder.pack_adapter(Adapter("d", 16, (layer, layer)))
    for slot in (1, 2):
        steps.place(slot, packed)
    found = []
    for slots in ((1, 0), (0, 0), (2, 1)):
        steps.run(plan(["greedy", "seeded"], 20, first=True, adapters=slots))
        found.append(steps.run(plan(["greedy", "seeded"], 21, pending=True, adapters=slots)))
    steps.place(2, replace(packed, experts={0: ExpertLoras((), ())}))
    found.append(steps.run(plan(["greedy", "seeded"], 22, pending=True, adapters=(2, 1))))
    steps.place(2, None)
    steps.place(2, packed)
    steps.run(plan(["greedy", "seeded"], 23, pending=True, adapters=(2, 1)))
    found.append(steps.run(plan(["greedy", "seeded"], 24, pending=True, adapters=(2, 1))))
    half_of_them = len(steps.captured) // 2
    return [steps.captured[0].total(), steps.captured[half_of_them].total(), len(steps.captured)], found


def test_steps_with_adapters_are_graphs_of_their_own_and_those_of_the_base_are_as_they_were(compiled: Run) -> None:
    (without, with_adapters, count), (beside, alone, both, eager, again) = compiled(adapter_steps)
    assert count == 12, "of 1, 2, 4, 8, 16 and 20 sequences, each without and with"
    assert with_adapters == without + 2 * 4 * 2, "two kernels for each of four projections of two layers"
    assert without == compiled(largest_graph)
    for noted in (beside, both, again):
        assert (noted.num_launches, noted.sends, noted.fetches, noted.waits) == (0, 2, 1, 0)
    assert (alone.num_launches, alone.sends) == (0, 1)
    assert eager.num_launches > 0, "additions to experts are no part of a graph"


def meetings() -> list[str]:
    """Those of these that the watch lets pass."""
    steps = Steps(on_meta.model("llama", 1), static_decode=False)
    there = torch.zeros(4, dtype=torch.int64, device="meta")
    here = torch.zeros(4, dtype=torch.int64)
    ways = {
        "item": lambda: there[0].item(),
        "tolist": lambda: there.tolist(),
        "bool": lambda: bool(there.sum() > 0),
        "nonzero": lambda: there.nonzero(),
        "mask": lambda: there[there > 0],
        "repeat": lambda: there.repeat_interleave(there),
        "to the host": lambda: there.cpu(),
        "to the host, not waiting": lambda: there.to("cpu", non_blocking=True),
        "to the device": lambda: here.to("meta"),
        "into the device": lambda: there.copy_(here),
        "numbers": lambda: torch.tensor([1, 2], device="meta"),
        "index": lambda: there[here],
        "list": lambda: there[[0, 1]],
        "both": lambda: there + here,
        "captured copy": lambda: steps.capture(lambda: there.copy_(here, non_blocking=True)),
        "captured work of the host": lambda: steps.capture(lambda: here + 1),
    }
    passed = []
    for name, meet in ways.items():
        with steps.watched():
            try:
                meet()
            except (HostMeeting, RuntimeError, NotImplementedError):
                continue
        passed.append(name)
    with steps.watched():
        link = MetaLink(steps.noted)
        link.fetch(link.send(here))  # what is meant to pass
    return passed


def test_the_watch_sees_every_way_to_meet(compiled: Run) -> None:
    assert compiled(meetings) == []
