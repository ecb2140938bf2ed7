"""Greedy tokens, fp32, of ranks with pools of their own, on one host and on several, which have TCP alone between
them: those of transformers, whatever carries sums; and whole blocks at the border, to and from groups that share a
pool."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from shared.collectives.rank_links import Backend
from shared.kv.checksum import BlockChecksum
from shared.model.checkpoints import write_random_checkpoint
from shared.model.ranks.shard import Degrees
from tests.integration.engine.engine_run import EngineRun, hand_off
from tests.integration.engine.families import write_family
from tests.integration.engine.group_run import GroupRun
from tests.integration.engine.test_greedy_against_transformers import transformers_greedy
from tests.unit.collectives.in_threads import needs_library

pytestmark = needs_library

PROMPT = [7 + (i * 37) % 190 for i in range(53)]
NUM_TOKENS = 30
"""The answer fills the block that the prompt ends in, a whole one, and begins a third."""
ONE = Degrees()


class Kind(NamedTuple):
    """A group, or one process."""

    degrees: Degrees
    own_pools: bool = True
    backend: Backend = "shm"
    hosts: int = 1

    def run(self, folder: Path, **policy: Any) -> EngineRun:
        if self.degrees == ONE:
            return EngineRun(folder, **policy)
        how = {"own_pools": self.own_pools, "backend": self.backend, "hosts": self.hosts}
        return GroupRun(folder, self.degrees, **how, **policy)


ALONE = Kind(ONE, own_pools=False)


def write(folder: Path, name: str) -> Path:
    """`NAME`, or `NAME/KV_HEADS` of a Llama."""
    family, _, kv_heads = name.partition("/")
    if family == "llama":
        write_random_checkpoint(
            folder, "LlamaForCausalLM", vocab_size=211, num_layers=3, num_heads=8, num_kv_heads=int(kv_heads),
            head_dim=32, hidden_size=64, intermediate_size=96,
        )  # fmt: skip
        return folder
    sizes = {"deepseek-v3": {"tie": True, "num_layers": 3}}.get(family, {})
    return write_family(folder, family, **sizes)


PLAIN = [
    ("llama/2", Kind(Degrees(2, 2), backend="gloo")),
    ("deepseek-v3", Kind(Degrees(2))),
    ("llama/2", Kind(Degrees(2, 2), hosts=2)),
]
"""Three layers in two stages, two heads on four ranks, latents: what slices are made of; sums and stages between
hosts."""
REST = [
    *(
        ("llama/4", kind)
        for degrees in (Degrees(2), Degrees(4), Degrees(1, 2), Degrees(2, 2))
        for kind in (Kind(degrees), Kind(degrees, backend="gloo"), Kind(degrees, own_pools=False, backend="gloo"))
    ),
    *(("mixtral", Kind(Degrees(2, expert=2), backend=backend)) for backend in ("shm", "gloo")),
    ("deepseek-v3", Kind(Degrees(2, 2), backend="gloo")),
    *(("llama/4", Kind(degrees, hosts=2)) for degrees in (Degrees(1, 2), Degrees(4))),
    ("mixtral", Kind(Degrees(2, expert=2), hosts=2)),
    ("deepseek-v3", Kind(Degrees(2, 2, expert=2), hosts=2)),
    ("llama/2", Kind(Degrees(2, 2), hosts=4)),
]
"""Each way once, and the other families in one."""


@pytest.mark.parametrize(
    ("name", "kind"), [*PLAIN, *(pytest.param(*cell, marks=pytest.mark.slow) for cell in REST)], ids=str
)
def test_ranks_with_their_own_pools_give_the_tokens_of_transformers(tmp_path: Path, name: str, kind: Kind) -> None:
    folder = write(tmp_path / "model", name)
    expected = transformers_greedy(folder, PROMPT, NUM_TOKENS)
    with closing(kind.run(folder)) as run:
        assert run.generate(PROMPT, max_tokens=NUM_TOKENS)[0] == expected
        assert run.generate(PROMPT, max_tokens=NUM_TOKENS)[0] == expected, "behind its own prefix"
        assert run.scheduler.counters.num_prefix_hit_tokens == 48
        run.pool.check_integrity()


OVER_HOSTS = Kind(Degrees(1, 2), hosts=2)
HANDED = {
    "llama/4": (
        ALONE,
        Kind(Degrees(2), own_pools=False),
        Kind(Degrees(4)),
        Kind(Degrees(2, 2), backend="gloo"),
        OVER_HOSTS,
    ),
    "llama/2": (ALONE, Kind(Degrees(4), own_pools=False), Kind(Degrees(4)), Kind(Degrees(1, 2))),
    "deepseek-v3": (ALONE, Kind(Degrees(2), own_pools=False), Kind(Degrees(2)), Kind(Degrees(2, 2)), OVER_HOSTS),
}


@pytest.fixture(scope="module", params=["llama/4", *(pytest.param(x, marks=pytest.mark.slow) for x in [*HANDED][1:])])
def handed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[list[int], dict[Kind, EngineRun]]]:
    """What transformers says, and an engine of each kind."""
    folder = write(tmp_path_factory.mktemp("own") / "model", request.param)
    with ExitStack() as stack:
        runs = {kind: stack.enter_context(closing(kind.run(folder))) for kind in HANDED[request.param]}
        yield transformers_greedy(folder, PROMPT, NUM_TOKENS), runs


@pytest.mark.slow
def test_blocks_pass_between_groups_that_hold_them_whole_and_in_slices(
    handed: tuple[list[int], dict[Kind, EngineRun]],
) -> None:
    """With their checksums, which the receiver takes of what lies in its ranks' pools."""
    expected, runs = handed
    for prefill, decode in permutations(runs.values(), 2):
        prefill.pool.clear_cache()
        decode.pool.clear_cache()
        assert hand_off(prefill, decode, PROMPT, NUM_TOKENS) == expected
        decode.pool.check_integrity()
        assert decode.generate(PROMPT, max_tokens=NUM_TOKENS)[0] == expected, "behind the prefix that arrived"


def test_a_block_damaged_on_its_way_is_computed_again(handed: tuple[list[int], dict[Kind, EngineRun]]) -> None:
    expected, runs = handed
    whole, *_, in_slices = runs.values()
    for prefill, decode in ((whole, in_slices), (in_slices, whole)):
        prefill.pool.clear_cache()
        decode.pool.clear_cache()
        assert hand_off(prefill, decode, PROMPT, NUM_TOKENS, corrupt=1) == expected
        decode.pool.check_integrity()


def test_what_a_leader_sends_is_what_one_process_computes(handed: tuple[list[int], dict[Kind, EngineRun]]) -> None:
    """Byte for byte what its checksum is of, in one piece, wherever the slices are."""
    _, runs = handed
    for run in runs.values():
        generator = torch.Generator().manual_seed(3)
        blocks = torch.randint(0, 256, (5, run.layout.block_bytes), dtype=torch.uint8, generator=generator)
        access, sums = run.engine.blocks, BlockChecksum(run.layout.block_bytes // 8)
        arrived = list(zip((3, 0, 7, 5, 1), access.incoming((3, 0, 7, 5, 1)), strict=True))
        for block, (_, memory) in zip(blocks, arrived, strict=True):
            memory[:] = block.numpy().tobytes()
        run.pool.clear_cache()
        access.store(arrived)
        for block, (block_id, _) in zip(blocks, arrived, strict=True):
            assert bytes(access.outgoing([block_id])[0]) == block.numpy().tobytes()
        assert run.runner.checksums([3, 0, 7, 5, 1]) == sums.checksum_blocks(blocks, range(5))


@pytest.mark.parametrize(
    "kind",
    [Kind(Degrees(2)), pytest.param(Kind(Degrees(2, 2), backend="gloo"), marks=pytest.mark.slow)],
    ids=str,
)
def test_preempted_sequences_come_back_from_every_ranks_host_memory(tmp_path: Path, kind: Kind) -> None:
    folder = write(tmp_path / "model", "llama/4")
    prompts = [[5 + (i * k) % 200 for i in range(20 + 9 * k)] for k in range(1, 5)]
    with closing(ALONE.run(folder, num_blocks=64, max_num_batched_tokens=512)) as roomy:
        alone = [roomy.generate(prompt, max_tokens=40)[0] for prompt in prompts]
    sizes = {"num_blocks": 16, "max_num_batched_tokens": 17, "num_host_blocks": 8}
    with closing(kind.run(folder, **sizes)) as tight:
        assert tight.generate(*prompts, max_tokens=40) == alone
        assert tight.scheduler.counters.num_swapped_in > 0
        sums = BlockChecksum(tight.layout.block_bytes // 8)
        for block_id in range(16):  # each block as all ranks have it, behind the copies of plans without tokens too
            block = torch.frombuffer(bytearray(tight.engine.blocks.outgoing([block_id])[0]), dtype=torch.uint8)
            assert tight.runner.checksums([block_id]) == sums.checksum_blocks(block[None], [0])
        tight.pool.check_integrity()
