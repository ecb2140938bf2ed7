"""Models of shapes that nobody chose: 64 greedy tokens, fp32, are those of transformers whole, split over ranks, behind
a prefix, and handed over."""

from __future__ import annotations

from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

from shared.model.shard import Degrees
from tests.integration.engine.engine_run import EngineRun, hand_off
from tests.integration.engine.group_run import GroupRun
from tests.integration.engine.shapes import Shape, prompts, shapes, splits
from tests.integration.engine.test_greedy_against_transformers import transformers_greedy
from tests.unit.collectives.in_threads import needs_library

pytestmark = needs_library

# Without shrinking: an example takes a second, and its seed and degrees name it.
slow_examples = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)


@pytest.mark.slow
@settings(slow_examples, max_examples=8)
@given(shape=shapes(), data=st.data())
def test_a_few_shapes_give_the_tokens_of_transformers(shape: Shape, data: st.DataObject) -> None:
    gives_the_tokens_of_transformers(shape, data)


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@settings(slow_examples, max_examples=250)
@given(shape=shapes(), data=st.data())
def test_many_shapes_give_the_tokens_of_transformers(shape: Shape, data: st.DataObject) -> None:
    gives_the_tokens_of_transformers(shape, data)


def gives_the_tokens_of_transformers(shape: Shape, data: st.DataObject) -> None:
    with TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name) / "model"
        config = shape.write(folder)
        prompt = data.draw(prompts(config), "prompt")
        degrees, own_pools = data.draw(splits(config, 2), "degrees"), data.draw(st.booleans(), "own_pools")
        event(shape.architecture)
        expected = transformers_greedy(folder, prompt)
        runs: dict[Degrees, EngineRun] = {Degrees(): stack.enter_context(closing(EngineRun(folder)))}
        for each in degrees:
            runs[each] = stack.enter_context(closing(GroupRun(folder, each, own_pools=own_pools)))
        for each, run in runs.items():
            assert run.generate(prompt)[0] == expected, each
            assert run.generate(prompt)[0] == expected, f"{each}, behind its own prefix"
        for there, here in pairwise([*runs, Degrees()]):
            for each in (there, here):
                runs[each].pool.clear_cache()
            if there != here:
                assert hand_off(runs[there], runs[here], prompt) == expected, (there, here)
