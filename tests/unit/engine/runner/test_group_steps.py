"""What a step of a group sends: candidates for a row's token, and micro-batches through the stages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared.collectives.rank_links import RankLinks
from shared.engine.plan import PlannedSequence, SampleSpec
from shared.engine.runner.eager_steps import micro_batches
from shared.engine.runner.profile_run import largest_step
from shared.engine.runner.runner import Runner, RunnerConfig
from shared.engine.runner.sampler import ALL_CANDIDATES, MOST_CANDIDATES, num_candidates
from shared.engine.sampling_params import SamplingParams
from shared.kv.groups import KVGroups
from shared.model.ranks.rank_decoder import RankDecoder
from shared.model.ranks.shard import Degrees
from tests.integration.engine.families import write_family
from tests.unit.collectives.in_threads import needs_library, run_group


def item(name: str = "s", count: int = 1, targets: tuple[int, ...] = (), **sampling: object) -> PlannedSequence:
    params = SamplingParams(**{"temperature": 1.0, "seed": 0, "max_tokens": 1, **sampling})  # type: ignore[arg-type]
    return PlannedSequence(name, (0,) * count, 0, (0,), count, (SampleSpec(params, count),), None, targets)


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ((), 1),
        ((item()._replace(samples=()),), 1),
        ((item(temperature=0.0), item(top_k=7)), 7),
        ((item(temperature=0.0), item(top_p=0.9)), ALL_CANDIDATES),
        ((item(temperature=0.0, logprobs=0),), ALL_CANDIDATES),
        ((item(temperature=0.0, repetition_penalty=1.1),), ALL_CANDIDATES),
        ((item(top_k=MOST_CANDIDATES + 1),), ALL_CANDIDATES),
        ((item(temperature=0.0, count=3, targets=(1, 2)),), ALL_CANDIDATES),
    ],
)
def test_as_many_candidates_as_a_token_may_be_chosen_from(items: tuple[PlannedSequence, ...], expected: int) -> None:
    assert num_candidates(items) == expected


@pytest.mark.parametrize(
    ("counts", "parts", "expected"),
    [
        ((1,), 2, [[1]]),
        ((1, 1, 1, 1), 2, [[1, 1], [1, 1]]),
        ((40, 1, 1), 2, [[40], [1, 1]]),
        ((1, 1, 40), 2, [[1, 1, 40]]),
        ((3, 3, 3), 4, [[3], [3], [3]]),
    ],
)
def test_micro_batches_keep_the_order_and_have_about_as_many_tokens(
    counts: tuple[int, ...], parts: int, expected: list[list[int]]
) -> None:
    items = [item(f"s{number}", count) for number, count in enumerate(counts)]
    found = micro_batches(items, parts)
    assert [[len(each.token_ids) for each in part] for part in found] == expected
    assert [each for part in found for each in part] == items


@needs_library
@pytest.mark.parametrize("degrees", [Degrees(2), Degrees(1, 2)], ids=str)
def test_ranks_run_the_largest_step_together_before_anything_is_announced(tmp_path: Path, degrees: Degrees) -> None:
    """As they measure what it leaves for their pools."""
    folder = write_family(tmp_path / "model", "LlamaForCausalLM")
    plan = largest_step(8, 64, 128, KVGroups(16))
    num_blocks = sum(len(item.block_ids) for item in plan.sequences)

    def work(links: RankLinks) -> int:
        decoder = RankDecoder.load_rank(folder, torch.float32, "auto", degrees, links)
        with torch.inference_mode():
            runner = Runner(decoder, decoder.own_layout(16, "float32"), num_blocks, RunnerConfig(static_decode=False))
            if links.everyone.rank:
                runner.follow(plan)
                return 0
            return len(runner.execute(plan).sampled)

    assert run_group(degrees.tensor, degrees.pipeline, work, "gloo") == [8, 0]
