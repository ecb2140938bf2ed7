"""A runner that warms up has taken every kind of step before its first request, and leaves no trace in the pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.engine.runner.runner import Runner, RunnerConfig
from shared.engine.runner.warm_up import warm_up_plans
from shared.kernels.batch import AttentionBatch
from shared.kernels.pool_view import PoolView
from shared.kernels.torch_backend import TorchKernels
from shared.kv.groups import KVGroups
from shared.model.decoder import Decoder
from tests.integration.engine.families import write_family

NUM_BLOCKS = 5


class Recording(TorchKernels):
    """Remembers the query lengths of each step and whether rows were sampled."""

    def __init__(self) -> None:
        self.query_lens: set[tuple[int, ...]] = set()
        self.num_sampled = 0

    def paged_attention(self, query: Tensor, pool: PoolView, layer: int, batch: AttentionBatch, **sizes: Any) -> Tensor:
        self.query_lens.add(batch.query_lens)
        return TorchKernels.paged_attention(query, pool, layer, batch, **sizes)

    def sample_tokens(self, logits: Tensor, rows: Any) -> Tensor:
        self.num_sampled += rows.num_rows
        return TorchKernels.sample_tokens(logits, rows)


@pytest.fixture
def decoder(tmp_path: Path) -> Decoder:
    return Decoder.load(write_family(tmp_path, "LlamaForCausalLM"), torch.float32, "cpu", kernels="torch")


def started(decoder: Decoder, config: RunnerConfig) -> tuple[Runner, Recording]:
    kernels = Recording()
    runner = Runner(decoder.op_by_op(kernels), decoder.config.block_layout(16, "float32"), NUM_BLOCKS, config)
    for block in decoder.pieces._attention:
        block._kernels = kernels
    with torch.inference_mode():
        runner.start()
    return runner, kernels


@pytest.mark.parametrize("static", [False, True])
def test_prompts_and_mixed_steps_of_both_ends_are_run(decoder: Decoder, static: bool) -> None:
    config = RunnerConfig(4, max_num_batched_tokens=50, warm_up=True, static_decode=static)
    runner, kernels = started(decoder, config)
    assert kernels.query_lens == {(2,), (1, 2), (49,), (1, 49)}
    assert kernels.num_sampled == 6
    assert not runner.kv_blocks.any()


def test_on_the_cpu_nothing_is_run_unless_asked_for(decoder: Decoder) -> None:
    _, kernels = started(decoder, RunnerConfig(4))
    assert kernels.query_lens == set()


def test_on_the_cpu_no_step_is_in_pieces_unless_asked_for(decoder: Decoder) -> None:
    assert started(decoder, RunnerConfig(4, piecewise_tokens=None))[0]._pieces is None
    assert started(decoder, RunnerConfig(4, piecewise_tokens=16))[0]._pieces is not None


def test_sums_of_16_bit_products_are_taken_in_fp32_from_the_start_on(decoder: Decoder) -> None:
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True
    started(decoder, RunnerConfig(4))
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    assert not torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction


@pytest.mark.parametrize(("most_guesses", "counts"), [(0, []), (1, [2]), (4, [2, 4, 8]), (15, [2, 4, 8, 16])])
def test_steps_are_taken_with_as_many_guesses_as_there_may_be(most_guesses: int, counts: list[int]) -> None:
    plans = warm_up_plans(100, 4, KVGroups(16), 20, most_guesses)
    assert [plan.num_tokens for plan in plans if plan.num_guesses] == counts


def test_no_step_has_more_sequences_than_a_batch(decoder: Decoder) -> None:
    runner, _ = started(decoder, RunnerConfig(1, warm_up=True))
    assert not runner.kv_blocks.any()


@pytest.mark.parametrize(("max_tokens", "num_blocks"), [(16, 2), (8192, 3), (100, 700)])
def test_steps_stay_within_the_pool_and_the_budget_of_tokens(max_tokens: int, num_blocks: int) -> None:
    for plan in warm_up_plans(max_tokens, 4, KVGroups(16), num_blocks, most_guesses=15):
        assert plan.num_tokens <= max_tokens
        used = [block_id for item in plan.sequences for block_id in item.block_ids]
        assert len(set(used)) == len(used)
        assert max(used) < num_blocks
