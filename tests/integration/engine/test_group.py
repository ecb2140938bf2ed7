"""Greedy tokens, fp32, of a model split over ranks: collocated, from a prefix, handed over between unequal groups,
always those of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from shared.model.checkpoints import write_random_checkpoint
from shared.model.families.registry import load_config
from shared.model.layers.expert_placement import adjacent, balance, set_loads
from shared.model.ranks.shard import Degrees
from tests.integration.engine.engine_run import BLOCK_SIZE, EngineRun, hand_off
from tests.integration.engine.families import EXPERTS, write_family
from tests.integration.engine.group_run import GroupRun
from tests.integration.engine.test_greedy_against_transformers import transformers_greedy
from tests.unit.collectives.in_threads import needs_library

pytestmark = needs_library

ONE = Degrees()
SPLITS = (Degrees(2), Degrees(4), Degrees(1, 2), Degrees(2, 2))
OF_EXPERTS = (Degrees(2), Degrees(2, expert=2), Degrees(4), Degrees(4, expert=4), Degrees(1, 2), Degrees(4, expert=2))
OF_LATENTS = (Degrees(2), Degrees(4, expert=4), Degrees(1, 2), Degrees(2, 2, expert=2))
OF_SINKS = (Degrees(2), Degrees(2, expert=2), Degrees(4, expert=2), Degrees(1, 2))
PROMPT = [7 + (i * 37) % 190 for i in range(53)]
NUM_TOKENS = 30
"""The answer fills the block that the prompt ends in, a whole one, and begins a third."""
DENSE: dict[str, dict[str, Any]] = {
    "llama": {"num_heads": 8, "num_kv_heads": 4, "head_dim": 32, "hidden_size": 64, "intermediate_size": 96},
    "12 heads, 2 KV heads": {
        "num_heads": 12,
        "num_kv_heads": 2,
        "head_dim": 10,
        "hidden_size": 60,
        "intermediate_size": 101,
    },
}
FAMILIES: dict[str, tuple[tuple[Degrees, ...], dict[str, Any]]] = {
    "mixtral": (OF_EXPERTS, {}),
    "qwen3-moe": (
        OF_EXPERTS,
        {"num_heads": 12, "extra_config": {**EXPERTS["qwen3-moe"][1], "num_experts": 7, "num_experts_per_tok": 3}},
    ),
    "deepseek-v2": (OF_LATENTS, {"num_heads": 12, "num_kv_heads": 12, "hidden_size": 96, "num_layers": 3}),
    "deepseek-v3": (OF_LATENTS, {"tie": True, "num_layers": 3}),
    "gpt-oss": (OF_SINKS, {"num_layers": 2, "num_heads": 12, "num_kv_heads": 4}),
    "gemma2": (SPLITS, {"num_heads": 8, "num_kv_heads": 4}),
    "gemma3": (SPLITS, {"num_heads": 8, "num_kv_heads": 4, "head_dim": 32, "tie": True}),
    "glm4": (SPLITS, {"num_heads": 12, "num_kv_heads": 4}),
    "olmo2": (SPLITS, {"num_heads": 12, "num_kv_heads": 2}),
    "olmo3": (SPLITS, {"num_heads": 8, "num_kv_heads": 4, "head_dim": 32}),
    "llama4": (OF_SINKS, {"num_heads": 12, "num_kv_heads": 4, "num_layers": 4}),
    "ministral3": (SPLITS, {"num_heads": 8, "num_kv_heads": 4, "head_dim": 32}),
    "smollm3": (SPLITS, {"num_heads": 8, "num_kv_heads": 4, "head_dim": 32}),
    "cohere2": (SPLITS, {"num_heads": 8, "num_kv_heads": 4, "head_dim": 32, "hidden_size": 256, "tie": True}),
    "phi3": (SPLITS, {"num_heads": 4, "num_kv_heads": 4}),
    "qwen3-next": ((Degrees(2), Degrees(2, expert=2), Degrees(1, 2), Degrees(2, 2)), {}),
    "qwen3.5": ((Degrees(2), Degrees(1, 2)), {}),
    "qwen3.5-moe": ((Degrees(2, expert=2), Degrees(1, 2)), {}),
    "kimi-linear": ((Degrees(2), Degrees(4, expert=2), Degrees(1, 2), Degrees(2, 2)), {}),
}
"""How each is split, and what differs from the family's small checkpoint; of experts there are 5, 7, 9, 12 and 5."""


FIRST = ("llama", "deepseek-v3")


class Model(NamedTuple):
    """A checkpoint, how it is split, and what transformers answers to PROMPT."""

    folder: Path
    splits: tuple[Degrees, ...]
    expected: list[int]


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in FIRST else pytest.mark.slow) for name in (*DENSE, *FAMILIES)],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder, name = tmp_path_factory.mktemp("group") / "model", request.param
    splits, sizes = FAMILIES.get(name, (SPLITS, {}))
    if name in DENSE:
        write_random_checkpoint(folder, "LlamaForCausalLM", vocab_size=211, num_layers=2, **DENSE[name])
    else:
        write_family(folder, name, **sizes)
    return Model(folder, splits, transformers_greedy(folder, PROMPT, NUM_TOKENS))


def run_of(folder: Path, degrees: Degrees, **policy: Any) -> EngineRun:
    if degrees == ONE:
        return EngineRun(folder, **policy)
    return GroupRun(folder, degrees, **policy)


@pytest.fixture(scope="module")
def runs(model: Model) -> Iterator[dict[Degrees, EngineRun]]:
    """An engine of each kind."""
    with ExitStack() as stack:
        yield {degrees: stack.enter_context(closing(run_of(model.folder, degrees))) for degrees in (ONE, *model.splits)}


def test_every_split_gives_the_tokens_of_transformers(model: Model, runs: dict[Degrees, EngineRun]) -> None:
    for degrees, run in runs.items():
        run.pool.clear_cache()
        assert run.generate(PROMPT, max_tokens=NUM_TOKENS)[0] == model.expected, degrees
        before = run.scheduler.counters.num_prefix_hit_tokens
        assert run.generate(PROMPT, max_tokens=NUM_TOKENS)[0] == model.expected, degrees  # behind its own prefix
        assert run.scheduler.counters.num_prefix_hit_tokens - before == 48


def test_hot_experts_with_copies_give_the_tokens_of_transformers(tmp_path: Path) -> None:
    """Placed by what a group has measured, with prompts and answers in its batches, as a restarted worker is."""
    folder = write_family(tmp_path / "model", "mixtral")
    degrees, num_layers = Degrees(2, expert=2), load_config(folder).num_layers
    expected = transformers_greedy(folder, PROMPT, NUM_TOKENS)
    with closing(GroupRun(folder, degrees)) as run:
        assert run.generate(PROMPT, max_tokens=NUM_TOKENS)[0] == expected
        measured = run.decoder.expert_counts()
    skewed = [[8 * counts[0], *counts[1:]] for _, counts in sorted(measured.items())]
    placement = balance(skewed, 2, spare=1)
    for counts, sets in zip(skewed, placement, strict=True):
        assert sets is not None
        assert max(set_loads(counts, sets)) < max(set_loads(counts, adjacent(5, 2)))
        assert all(0 in experts for experts in sets), "the hot one is everywhere"
    assert len(placement) == num_layers
    with closing(GroupRun(folder, degrees, placement=placement)) as run:
        assert run.generate(PROMPT, max_tokens=NUM_TOKENS)[0] == expected
        assert run.generate(PROMPT, PROMPT[:20], PROMPT[5:], max_tokens=NUM_TOKENS)[0] == expected, (
            "behind its prefix, beside others"
        )
        assert sum(run.decoder.expert_tokens()) == sum(sum(counts) for counts in run.decoder.expert_counts().values())


def test_unequal_pairs_hand_over_whole_blocks(model: Model, runs: dict[Degrees, EngineRun]) -> None:
    """Dense models in all pairs; else each split to the one behind it, and latents to the one before it too."""
    ring = [*runs, ONE]
    there, back = pairwise(ring), pairwise(ring[::-1])
    pairs = {SPLITS: permutations(runs, 2), OF_LATENTS: (*there, *back)}
    for pair in pairs.get(model.splits, there):
        hands_over_whole_blocks(model, runs, *pair)


@pytest.mark.slow
def test_every_unequal_pair_hands_over_whole_blocks(model: Model, runs: dict[Degrees, EngineRun]) -> None:
    for pair in permutations(runs, 2):
        hands_over_whole_blocks(model, runs, *pair)


def hands_over_whole_blocks(model: Model, runs: dict[Degrees, EngineRun], prefill: Degrees, decode: Degrees) -> None:
    layout = runs[decode].layout
    if runs[prefill].layout != layout:
        return  # workers of two layouts never serve one request: with stages there are no KV groups
    num_blocks = len(layout.groups.seen_by_next(len(PROMPT)))
    for degrees in (prefill, decode):
        runs[degrees].pool.clear_cache()
    taken: list[int] = []
    access = runs[decode].engine.blocks
    stored = access.store
    access.store = lambda arrived: (  # type: ignore[method-assign]
        taken.extend(len(memory) for _, memory in arrived),
        stored(arrived),
    )
    try:
        assert hand_off(runs[prefill], runs[decode], PROMPT, NUM_TOKENS) == model.expected, (prefill, decode)
    finally:
        access.store = stored  # type: ignore[method-assign]
    assert taken == [layout.block_bytes] * num_blocks, "one message a block, whatever the degrees"


@pytest.mark.slow
def test_mixed_batches_preemption_and_sampling_do_not_change_with_the_split(model: Model) -> None:
    prompts = [[5 + (i * k) % 200 for i in range(20 + 9 * k)] for k in range(1, 5)]
    config = load_config(model.folder)
    is_small = config.delta is not None and config.latent is not None
    length = 120 if is_small else 40  # a state does not grow, and latents do by little
    with closing(run_of(model.folder, ONE, num_blocks=64, max_num_batched_tokens=512)) as roomy:
        alone = [roomy.generate(prompt, max_tokens=length)[0] for prompt in prompts]
        drawn = [roomy.generate(prompt, max_tokens=length, temperature=0.8, top_k=5, seed=3)[0] for prompt in prompts]
    for degrees in SPLITS if model.splits == SPLITS else model.splits[-1:]:
        groups = config.block_layout(BLOCK_SIZE, "float32", grouped=degrees.has_kv_groups).groups
        # Windows and states keep few blocks each.
        sizes: dict[str, Any] = {"num_blocks": 16 if groups.size == 1 else 9, "max_num_batched_tokens": 17}
        sizes["num_host_blocks"] = 8
        if is_small:
            longest = groups.num_blocks(len(prompts[-1]) + length, 17)
            sizes |= {"num_blocks": -(-longest // groups.size) + 1, "output_quantile": 0.0}
        with closing(run_of(model.folder, degrees, **sizes)) as tight:
            assert tight.generate(*prompts, max_tokens=length) == alone, degrees
            assert tight.scheduler.counters.num_preemptions > 0
            assert tight.generate(*prompts, max_tokens=length, temperature=0.8, top_k=5, seed=3) == drawn, degrees
            assert len(tight.generate(prompts[0], max_tokens=5, temperature=0.7, top_p=0.9, logprobs=2)[0]) == 5
            tight.pool.check_integrity()
