"""64 greedy tokens, fp32, of a model split over ranks: collocated, from a prefix, handed over between unequal groups,
always those of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from shared.model.checkpoints import write_random_checkpoint
from shared.model.shard import Degrees
from tests.integration.engine.engine_run import BLOCK_SIZE, EngineRun, hand_off
from tests.integration.engine.group_run import GroupRun
from tests.integration.engine.test_greedy_against_transformers import transformers_greedy
from tests.unit.collectives.in_threads import needs_library

pytestmark = needs_library

ONE = Degrees()
SPLITS = (Degrees(2), Degrees(4), Degrees(1, 2), Degrees(2, 2))
PROMPT = [7 + (i * 37) % 190 for i in range(53)]
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"num_heads": 8, "num_kv_heads": 4, "head_dim": 32, "hidden_size": 64, "intermediate_size": 96},
    "12 heads, 2 KV heads": {
        "num_heads": 12,
        "num_kv_heads": 2,
        "head_dim": 10,
        "hidden_size": 60,
        "intermediate_size": 101,
    },
}


@pytest.fixture(params=SHAPES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "model"
    write_random_checkpoint(path, "LlamaForCausalLM", vocab_size=211, num_layers=2, **SHAPES[request.param])
    return path


def run_of(folder: Path, degrees: Degrees, **policy: Any) -> EngineRun:
    if degrees == ONE:
        return EngineRun(folder, **policy)
    return GroupRun(folder, degrees, **policy)


@pytest.fixture
def runs(folder: Path) -> Iterator[dict[Degrees, EngineRun]]:
    """An engine of each kind."""
    with ExitStack() as stack:
        yield {degrees: stack.enter_context(closing(run_of(folder, degrees))) for degrees in (ONE, *SPLITS)}


def test_every_split_gives_the_tokens_of_transformers(folder: Path, runs: dict[Degrees, EngineRun]) -> None:
    expected = transformers_greedy(folder, PROMPT)
    for degrees, run in runs.items():
        assert run.generate(PROMPT)[0] == expected, degrees
        assert run.generate(PROMPT)[0] == expected, degrees  # behind its own prefix
        assert run.scheduler.counters.num_prefix_hit_tokens == 48


def test_every_unequal_pair_hands_over_whole_blocks(folder: Path, runs: dict[Degrees, EngineRun]) -> None:
    expected = transformers_greedy(folder, PROMPT)
    num_blocks = -(-len(PROMPT) // BLOCK_SIZE)
    for prefill, decode in permutations(runs, 2):
        for run in runs.values():
            run.pool.clear_cache()
        taken: list[int] = []
        access = runs[decode].engine.blocks
        stored = access.store
        access.store = lambda arrived, stored=stored, taken=taken: (  # type: ignore[method-assign]
            taken.extend(len(memory) for _, memory in arrived),
            stored(arrived),
        )
        try:
            assert hand_off(runs[prefill], runs[decode], PROMPT) == expected, (prefill, decode)
        finally:
            access.store = stored  # type: ignore[method-assign]
        assert taken == [runs[decode].layout.block_bytes] * num_blocks, "one message a block, whatever the degrees"


def test_mixed_batches_preemption_and_sampling_do_not_change_with_the_split(folder: Path) -> None:
    prompts = [[5 + (i * k) % 200 for i in range(20 + 9 * k)] for k in range(1, 5)]
    with closing(run_of(folder, ONE, num_blocks=64, max_num_batched_tokens=512)) as roomy:
        alone = [roomy.generate(prompt, max_tokens=40)[0] for prompt in prompts]
        drawn = [roomy.generate(prompt, max_tokens=40, temperature=0.8, top_k=5, seed=3)[0] for prompt in prompts]
    for degrees in SPLITS:
        with closing(run_of(folder, degrees, num_blocks=16, max_num_batched_tokens=17, num_host_blocks=8)) as tight:
            assert tight.generate(*prompts, max_tokens=40) == alone, degrees
            assert tight.scheduler.counters.num_preemptions > 0
            assert tight.generate(*prompts, max_tokens=40, temperature=0.8, top_k=5, seed=3) == drawn, degrees
            assert len(tight.generate(prompts[0], max_tokens=5, temperature=0.7, top_p=0.9, logprobs=2)[0]) == 5
            tight.pool.check_integrity()
