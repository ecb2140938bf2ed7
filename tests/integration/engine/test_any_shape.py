"""Models of shapes that nobody chose: 64 greedy tokens, fp32, are those of transformers whole, split over ranks, behind
a prefix, and handed over."""

from __future__ import annotations

from contextlib import ExitStack, closing
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import HealthCheck, Phase, event, given, seed, settings
from hypothesis import strategies as st

from shared.model.ranks.shard import Degrees
from tests.integration.engine.engine_run import EngineRun, hand_off
from tests.integration.engine.group_run import GroupRun
from tests.integration.engine.shapes import Shape, can_split, prompts, shapes, splits
from tests.integration.engine.test_greedy_against_transformers import load_transformers, transformers_greedy
from tests.unit.collectives.in_threads import needs_library

pytestmark = needs_library

NEAR = 1e-4
"""Of the spread of a row of logits."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(10))  # each with its own time: together they take half an hour on a busy machine
def test_many_shapes_give_the_tokens_of_transformers(part: int) -> None:
    search = settings(
        max_examples=25,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        phases=[Phase.explicit, Phase.reuse, Phase.generate],  # no shrinking: an example's seed and degrees name it
    )
    seed(part)(search(given(shape=shapes(), data=st.data())(check_tokens)))()


def check_tokens(shape: Shape, data: st.DataObject) -> None:
    with TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name) / "model"
        config = shape.write(folder)
        prompt = data.draw(prompts(config), "prompt")
        degrees, own_pools = data.draw(splits(config, 2), "degrees"), data.draw(st.booleans(), "own_pools")
        event(shape.architecture)
        agree = partial(agrees, folder, prompt, transformers_greedy(folder, prompt))
        runs: dict[Degrees, EngineRun] = {Degrees(): stack.enter_context(closing(EngineRun(folder)))}
        for each in degrees:
            has_own = own_pools and can_split(each, config, own_pools=True)
            runs[each] = stack.enter_context(closing(GroupRun(folder, each, own_pools=has_own)))
        for each, run in runs.items():
            assert agree(run.generate(prompt)[0]), each
            assert agree(run.generate(prompt)[0]), f"{each}, behind its own prefix"
        for there, here in pairwise([*runs, Degrees()]):
            for each in (there, here):
                runs[each].pool.clear_cache()
            if there != here and runs[there].layout == runs[here].layout:
                assert agree(hand_off(runs[there], runs[here], prompt)), (there, here)


def agrees(folder: Path, prompt: list[int], expected: list[int], found: list[int]) -> bool:
    """Equal; but where two logits of transformers' own are nearly so, a processor's order of sums may decide."""
    if found == expected:
        return True
    place = next(i for i, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1])
    with torch.inference_mode():
        logits = load_transformers(folder)(torch.tensor([[*prompt, *expected[:place]]])).logits[0, -1]
    event("a near tie")
    return bool(logits[expected[place]] - logits[found[place]] < NEAR * logits.std())
