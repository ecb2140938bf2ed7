"""The gated delta rule of a backend against torch's, over states in a pool: run here, and on a GPU in `tests/gpu`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from shared.kernels.backend import DecoderOps
from shared.kernels.batch import AttentionBatch
from shared.kernels.delta_layer import DeltaLayer, state_words
from shared.kernels.delta_sizes import PartPlaces
from shared.kernels.pool_view import PoolView
from shared.kernels.torch_backend import TorchKernels
from shared.kv.groups import STATE_WINDOW, KVGroups

from .comparing import TOLERANCES, random_tensor, triton_kernels

ONES = [(1, 1), (1, 8), (1, 9), (1, 40)]
"""(tokens that the step computes, tokens with them): a first token, and others about a block's end."""
CHUNKS = [(5, 5), (1, 20), (3, 34), (70, 75), (16, 16), (64, 64), (2, 17), (150, 190)]
"""Behind a state and without, to a block's end and past one or several; short and long."""


class DeltaCase:
    """A layer, a step of some sequences, and a pool in which their states lie in any order; all else in it is NaN."""

    def __init__(
        self,
        plan: Sequence[tuple[int, int]],
        *,
        heads: tuple[int, int] = (2, 4),
        dims: tuple[int, int] = (8, 12),
        kernel_size: int = 4,
        words: int = 100,
        block_size: int = 8,
        number: int = 1,
        parts: int = 1,
        runs: int = 1,
        by_token: bool = False,
        by_channel: bool = False,
        places: PartPlaces | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        """`heads`: of keys, of values; `dims`: of a key, of a value; `words`: numbers of a block, which lie in
        `runs` runs of each of `parts` parts; `by_token`: each token has a state, as in a step with guesses; `places`:
        of parts in one KV head."""
        shape = {"dtype": dtype, "device": device}
        (key_heads, value_heads), (key_dim, value_dim) = heads, dims
        mixed = 2 * key_heads * key_dim + value_heads * value_dim
        num_decays = value_heads * (key_dim if by_channel else 1)
        all_parts = parts if places is None else places.total

        def drawn(*sizes: int, seed: int) -> Tensor:
            return random_tensor(*sizes, dtype=torch.float32, device=device, seed=seed)

        self.layer = DeltaLayer(
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            kernel_size,
            by_channel,
            conv=drawn(kernel_size, mixed, seed=1),
            decay=-drawn(value_heads, seed=2).exp(),
            decay_bias=drawn(num_decays, seed=3) - 2,
            norm=random_tensor(value_dim, seed=4, **shape),
            eps=1e-6,
            number=number,
            num_parts=parts,
            places=places,
        )
        num_states = -(-(number + 2) * self.layer.part_elements * all_parts // words)
        groups = KVGroups(block_size, (None, *[STATE_WINDOW] * num_states), num_states)
        query_lens, kv_lens = zip(*plan, strict=True)
        widths = [-(-kv_len // block_size) * groups.size for kv_len in kv_lens]
        num_blocks = sum(widths)
        if by_token:
            num_blocks += num_states * sum(count - 1 for count in query_lens)
        order = random.Random(0).sample(range(num_blocks + 1), num_blocks)
        tables = [order[sum(widths[:seq]) : sum(widths[: seq + 1])] for seq in range(len(plan))]
        batch = AttentionBatch.from_lists(
            query_lens, kv_lens, [table[:: groups.size] for table in tables], block_size, device
        )
        ends = zip(tables, kv_lens, query_lens, strict=True)
        blocks = [groups.state_blocks(table, end - count, end) for table, end, count in ends]
        self.batch = replace(batch, state_blocks=torch.tensor(blocks, dtype=torch.int32, device=device))
        if by_token:
            left, of_tokens = iter(order[sum(widths) :]), []
            for table, end, count in zip(tables, kv_lens, query_lens, strict=True):
                own = list(islice(left, num_states * (count - 1)))
                of_tokens += groups.guess_state_blocks(table, end - count, own)
            states = torch.tensor(of_tokens, dtype=torch.int32, device=device)
            self.batch = replace(batch, token_states=states)
        assert words % (runs * all_parts) == 0
        run_words = words // (runs * all_parts)
        rows = torch.full((num_blocks + 1, runs, 1, all_parts, 1, run_words), torch.nan, device=device)
        for read, _, _ in blocks:
            for block in read:
                if block >= 0:
                    rows[block] = drawn(words, seed=block).to(dtype).float().view(rows[block].shape) / 4
        if places is not None:
            run_words, rows = run_words * all_parts, rows.reshape(num_blocks + 1, runs, 1, 1, 1, -1)
        self.pool = PoolView(rows.view(torch.uint8).flatten(-2), torch.float32, 1, run_words)
        self.projected = random_tensor(sum(query_lens), self.layer.projected_size + 3, seed=5, **shape)[:, :-3]

    def run(self, kernels: DecoderOps) -> tuple[Tensor, Tensor]:
        """(what it gives, the pool's numbers behind it)."""
        pool = replace(self.pool, memory=self.pool.memory.clone())
        batch = replace(self.batch)  # without another backend's plan
        found = kernels.delta_attention(self.projected, self.layer, pool, batch)
        return found, state_words(pool, self.layer.num_parts, self.layer.places)

    def run_apart(self, kernels: DecoderOps) -> tuple[Tensor, Tensor]:
        """As `run`, with a call for each token that has a state."""
        pool, batch, found = replace(self.pool, memory=self.pool.memory.clone()), self.batch, []
        states, row = batch.token_states, 0
        assert states is not None
        for seq, (count, end) in enumerate(zip(batch.query_lens, batch.kv_lens, strict=True)):
            table = batch.block_tables[seq].tolist()
            for position in range(end - count, end):
                one = AttentionBatch.from_lists([1], [position + 1], [table], batch.block_size, states.device)
                one = replace(one, state_blocks=states[row : row + 1])
                found.append(kernels.delta_attention(self.projected[row : row + 1], self.layer, pool, one))
                row += 1
        return torch.cat(found), state_words(pool, self.layer.num_parts, self.layer.places)


def check_delta(kernels: DecoderOps, case: DeltaCase) -> None:
    """Within some times the tolerance of one op: a result has passed a norm behind a chain of hundreds of sums."""
    (found, pool), (expected, kept) = case.run(kernels), case.run(TorchKernels())
    assert found.dtype == expected.dtype
    assert kept.isnan().equal(pool.isnan()), "something else is written"
    tolerance = _TIMES[found.dtype] * TOLERANCES[found.dtype]
    for one, other in ((found, expected), (pool, kept)):
        torch.testing.assert_close(one.float(), other.float(), rtol=tolerance, atol=tolerance, equal_nan=True)


_TIMES = {torch.float32: 5, torch.float16: 5, torch.bfloat16: 2}


def check_triton(plan: Sequence[tuple[int, int]], **settings: object) -> None:
    check_delta(triton_kernels(), DeltaCase(plan, **settings))  # type: ignore[arg-type]
