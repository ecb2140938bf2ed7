"""Groups of ranks on GPUs: blocks in each one's own memory, whole ones at the border, the tokens of one process."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

pytest.importorskip("msgspec", reason="plans pass between ranks as msgspec writes them")

from shared.collectives.rank_links import Backend
from shared.kv.checksum import BlockChecksum
from shared.model.ranks.shard import Degrees
from tests.integration.engine.engine_run import EngineRun, hand_off
from tests.integration.engine.families import write_family
from tests.integration.engine.group_run import GroupRun
from tests.unit.collectives.in_threads import needs_library

PROMPT = [7 + (i * 37) % 190 for i in range(53)]
SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "hidden_size": 256, "intermediate_size": 512}


pytestmark = needs_library
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch sees fewer than two GPUs")
ON_ONE = pytest.param("gloo", ("cuda:0", "cuda:0"), id="two ranks on one GPU, sums through host memory")
ON_TWO = [
    pytest.param(backend, ("cuda:0", "cuda:1"), id=f"two GPUs, {backend}", marks=needs_two)
    for backend in ("nccl", "gloo")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("model"), "LlamaForCausalLM", **SIZES)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    """Of one process on one GPU."""
    with closing(EngineRun(folder, device="cuda")) as run:
        return run.generate(PROMPT)[0]


@pytest.mark.parametrize("degrees", [Degrees(2), Degrees(1, 2)], ids=str)
@pytest.mark.parametrize(("backend", "devices"), [ON_ONE, *ON_TWO])
def test_ranks_on_gpus_give_the_tokens_of_one_process(
    folder: Path, expected: list[int], degrees: Degrees, backend: Backend, devices: tuple[str, ...]
) -> None:
    sizes = {"num_blocks": 16, "num_host_blocks": 8}
    with closing(GroupRun(folder, degrees, own_pools=True, backend=backend, devices=devices)) as run:
        assert run.runner.kv_blocks.is_cuda
        assert run.generate(PROMPT)[0] == expected
        assert run.generate(PROMPT)[0] == expected, "behind its own prefix"
        with closing(EngineRun(folder)) as on_cpu:
            assert hand_off(on_cpu, run, PROMPT[::-1]) == hand_off(run, on_cpu, PROMPT[::-1])
        blocks = torch.randint(0, 256, (3, run.layout.block_bytes), dtype=torch.uint8)
        arrived = list(zip((5, 0, 2), run.engine.blocks.incoming((5, 0, 2)), strict=True))
        for block, (_, memory) in zip(blocks, arrived, strict=True):
            memory[:] = block.numpy().tobytes()
        run.pool.clear_cache()
        run.engine.blocks.store(arrived)
        for block, (block_id, _) in zip(blocks, arrived, strict=True):
            assert bytes(run.engine.blocks.outgoing([block_id])[0]) == block.numpy().tobytes()
        sums = BlockChecksum(run.layout.block_bytes // 8)
        assert run.runner.checksums([5, 0, 2]) == sums.checksum_blocks(blocks, range(3))
    prompts = [PROMPT[k:] for k in range(4)]
    # Over gloo steps do not run ahead by themselves.
    ahead = GroupRun(folder, degrees, own_pools=True, backend=backend, devices=devices, ahead=True, **sizes)
    with closing(ahead) as tight:
        found = tight.generate(*prompts, max_tokens=40)
        assert tight.scheduler.counters.num_swapped_in > 0
        assert found[0] == expected[:40]
        assert found == [tight.generate(prompt, max_tokens=40)[0] for prompt in prompts]
