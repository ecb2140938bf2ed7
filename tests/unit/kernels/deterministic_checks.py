"""What the deterministic Triton kernels promise, checked in a process whose Triton interprets or compiles."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shared.kernels.batch import AttentionBatch
from shared.model.decoder import Decoder

from .attention_case import LAYER, AttentionCase, pool_of_nan
from .attention_checks import exact_attention, scale_of
from .comparing import TOLERANCES, assert_near, random_tensor
from .compiling import TARGETS, Compiled, collect

if TYPE_CHECKING:
    from shared.kernels.backends.triton import DeterministicTritonKernels

BLOCK_SIZE = 16
VOCAB_SIZE = 128


def kernels() -> DeterministicTritonKernels:
    from shared.kernels.backends.triton import DeterministicTritonKernels

    return DeterministicTritonKernels()


def check_product(in_size: int, out_size: int, dtype: torch.dtype, *, device: str = "cpu") -> None:
    """Near the reference, and each row the same among any number of others."""
    weight = random_tensor(out_size, in_size, dtype=dtype, device=device, seed=1)
    x, bias = (random_tensor(*shape, dtype=dtype, device=device) for shape in ((80, in_size), (out_size,)))
    linear = kernels().make_linear(weight, bias, own=False)
    whole = linear.forward(x)
    scale = in_size**0.5  # of the sums
    _assert_near(whole, x.double() @ weight.double().t() + bias.double(), scale)
    for count in (1, 2, 7, 32, 33, 64, 79):
        for first in (0, 80 - count):
            rows = slice(first, first + count)
            assert linear.forward(x[rows].contiguous()).equal(whole[rows]), f"{count} rows from {first} on"


def check_large_tiles(num_rows: int, in_size: int, out_size: int, dtype: torch.dtype, *, device: str = "cpu") -> None:
    """Tiles for many rows and those for few give the same bits, with and without a bias."""
    from shared.kernels.matmul.launch import HALF, MANY, multiply

    weight = random_tensor(out_size, in_size, dtype=dtype, device=device, seed=1)
    x, bias = (random_tensor(*shape, dtype=dtype, device=device) for shape in ((num_rows, in_size), (out_size,)))
    for added in (None, bias):
        found = multiply(x, weight, added, MANY)
        assert found.equal(multiply(x, weight, added, HALF))
        assert found[-1:].equal(multiply(x[-1:].contiguous(), weight, added, HALF))
    scale = in_size**0.5
    _assert_near(found, x.double() @ weight.double().t() + bias.double(), scale)


def _assert_near(found: torch.Tensor, exact: torch.Tensor, scale: float) -> None:
    """The sums' own rounding alone counts: neither side is rounded again."""
    tolerance = TOLERANCES[found.dtype]
    torch.testing.assert_close(found.cpu().double() / scale, exact.cpu() / scale, rtol=tolerance, atol=tolerance)


def check_attention(
    cuts: list[int], window: int | None, dtype: torch.dtype, *, device: str = "cpu", **shape: Any
) -> None:
    """A prompt cut into chunks, each beside other sequences, against the prompt as a whole."""
    length = cuts[-1]
    case = AttentionCase([(length, length), (30, 30)], block_size=BLOCK_SIZE, dtype=dtype, device=device, **shape)
    ops, scale = kernels(), scale_of(case)
    together = ops.paged_attention(case.query, case.pool, LAYER, case.batch, scale=scale, window=window)
    assert_near(together, exact_attention(case, window))
    whole = together[:length]
    for a, b in pairwise(cuts):
        query = torch.cat((case.query[length + 4 : length + 5], case.query[a:b]))
        batch = AttentionBatch.from_lists([1, b - a], [5, b], [case.tables[1], case.tables[0]], BLOCK_SIZE, device)
        found = ops.paged_attention(query, case.pool, LAYER, batch, scale=scale, window=window)
        assert found[1:].equal(whole[a:b]), f"tokens {a} to {b}"
        assert found[:1].equal(together[length + 4 : length + 5])


def logits(decoder: Decoder, cuts: list[int], mates: int, kv_dtype: torch.dtype | None = None) -> Tensor:
    """[num_tokens, vocab_size]: of a prompt cut at `cuts`, each chunk in a step with `mates` other prompts' chunks."""
    config, blocks = decoder.config, -(-cuts[-1] // BLOCK_SIZE)
    shape = ((mates + 1) * blocks, config.num_layers, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    pool = pool_of_nan(shape, kv_dtype or decoder.dtype, str(decoder.device))
    tables = [list(range(i * blocks, (i + 1) * blocks)) for i in range(mates + 1)]
    found = []
    for a, b in pairwise(cuts):
        sizes = [b - a] * (mates + 1), [b] * (mates + 1)
        batch = AttentionBatch.from_lists(*sizes, tables, BLOCK_SIZE, decoder.device)
        tokens = [(7 * at + 13 * at * at * (1 + i)) % VOCAB_SIZE for i in range(mates + 1) for at in range(a, b)]
        inputs = (torch.tensor(tokens), torch.arange(a, b).repeat(mates + 1), torch.arange(b - a))
        token_ids, positions, rows = (tensor.to(decoder.device) for tensor in inputs)
        with torch.inference_mode():
            found.append(decoder.forward(token_ids, positions, pool, batch, rows))
    return torch.cat(found)


def check_logits(
    folder: Path,
    dtype: torch.dtype,
    cuts: list[list[int]],
    mates: int,
    *,
    device: str = "cpu",
    kv_dtype: torch.dtype | None = None,
) -> None:
    """Bit for bit the same for every way to cut a prompt, alone and beside others."""
    decoder = Decoder.load(folder, dtype, device, kernels="triton", deterministic=True)
    assert decoder.kernels.name == "triton-deterministic"
    whole = logits(decoder, [0, cuts[0][-1]], 0, kv_dtype)
    assert whole.isfinite().all()
    for cut in cuts:
        assert logits(decoder, cut, mates, kv_dtype).equal(whole), f"cut at {cut}"


def compile_all(dtype: torch.dtype, arch: str) -> list[Compiled]:
    """The kernels of their own: attention of a prompt and of answers, a product, at the sizes of an 8B model."""

    def calls() -> None:
        for plan in ([(1, 4096)] * 4, [(600, 4096)]):
            query_lens, kv_lens = zip(*plan, strict=True)
            tables = [list(range(-(-kv_len // BLOCK_SIZE))) for kv_len in kv_lens]
            batch = AttentionBatch.from_lists(query_lens, kv_lens, tables, BLOCK_SIZE)
            query = torch.zeros(sum(query_lens), 8, 128, dtype=dtype)
            pool = pool_of_nan((1, 2, 2, 2, BLOCK_SIZE, 128), dtype)
            kernels().paged_attention(query, pool, 1, batch, scale=0.1, window=None)
        linear = kernels().make_linear(torch.zeros(4096, 4096, dtype=dtype), None, own=True)
        for rows in (1, 64, 600, 4096):
            linear.forward(torch.zeros(rows, 4096, dtype=dtype))

    return collect(calls, TARGETS[arch])
