"""Each Triton op against its torch reference, on any device: run interpreted here, on a GPU in `tests/gpu`.

Only functions that are called in the right process import triton.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shared.kernels.attention import reference as attention_reference
from shared.kernels.sampling.rows import SamplingRows
from shared.kernels.torch_backend import TorchKernels
from shared.kv.checksum import BlockChecksum

from .attention_case import LAYER, AttentionCase
from .sampling_case import SamplingCase, broken_rows

if TYPE_CHECKING:
    from shared.kernels.triton_backend import TritonKernels

TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 2e-2}


def triton_kernels() -> TritonKernels:
    from shared.kernels.triton_backend import TritonKernels

    return TritonKernels()


def random_tensor(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """Within the tolerance of actual's dtype, absolute and relative; NaN never passes."""
    tolerance = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual.cpu().double(), expected.cpu().double(), rtol=tolerance, atol=tolerance)


def scale_of(case: AttentionCase) -> float:
    """The models' own: a steeper one magnifies the rounding of the scores, the reference's as well."""
    return float(case.query.shape[-1] ** -0.5)


def exact_attention(case: AttentionCase, window: int | None) -> Tensor:
    """The formula in fp64 at the models' scale: a bound on the kernel's own error, free of the reference's.

    In fp32 torch's attention is the less exact of the two: it rounds about three times as far as the kernels do, and
    how far depends on the processor.
    """
    return case.expected(window, scale_of(case))


def expected_attention(case: AttentionCase, window: int | None) -> Tensor:
    """The torch reference on the CPU in fp32, whatever the case's device and dtype."""
    batch = replace(case.batch, **{name: value.cpu() for name, value in _tensors(case.batch).items()})
    query, kv_blocks = case.query.cpu().float(), case.kv_blocks.cpu().float()
    return attention_reference.paged_attention(query, kv_blocks, LAYER, batch, scale=scale_of(case), window=window)


def _tensors(batch: object) -> dict[str, Tensor]:
    return {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}


def check_attention(
    plan: list[tuple[int, int]],
    *,
    window: int | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    **shape: Any,
) -> None:
    """A mix of chunks and single tokens; `shape` are `AttentionCase`'s sizes."""
    case = AttentionCase(plan, dtype=dtype, device=device, **shape)
    output = triton_kernels().paged_attention(
        case.query, case.kv_blocks, LAYER, case.batch, scale=scale_of(case), window=window
    )
    assert output.dtype == dtype
    assert_near(output, exact_attention(case, window))


def check_split_decode(
    kv_lens: list[int],
    *,
    tile: int,
    min_tiles: int = 1,
    parts_per_multiprocessor: int = 8,
    window: int | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    **shape: Any,
) -> None:
    """Single tokens with a chosen way to cut sequences, short parts too."""
    from shared.kernels.attention.decode.launch import decode_attention
    from shared.kernels.attention.decode.splits import DecodeConfig

    case = AttentionCase([(1, kv_len) for kv_len in kv_lens], dtype=dtype, device=device, **shape)
    output = torch.full_like(case.query, float("nan"))
    config = DecodeConfig(tile, min_tiles, parts_per_multiprocessor, num_warps=4, num_stages=2)
    decode_attention(
        case.query, case.kv_blocks, LAYER, case.batch, output, scale=scale_of(case), window=window, config=config
    )
    assert_near(output.flatten(1), exact_attention(case, window))


def check_lengths_come_from_the_device(device: str = "cpu") -> None:
    """A launch planned for long sequences serves the shorter ones that the device tensors now hold."""
    from shared.kernels.attention.decode.launch import decode_attention

    case = AttentionCase([(1, 90), (1, 64), (1, 300), (1, 7)], block_size=16, head_dim=16, device=device)
    output = torch.full_like(case.query, float("nan"))
    short = [33, 64, 1, 0]
    case.batch.seq_lens.copy_(torch.tensor(short, dtype=torch.int32))
    decode_attention(case.query, case.kv_blocks, LAYER, case.batch, output, scale=scale_of(case), window=None)
    case.batch = replace(case.batch, kv_lens=(33, 64, 1, 7))
    expected = expected_attention(case, None)
    assert_near(output[:3].flatten(1), expected[:3])
    assert torch.equal(output[3], torch.zeros_like(output[3]))


def check_layers_share_a_plan(device: str = "cpu") -> None:
    """A step is planned once; each layer finds the tickets of the parts as the one before left them: all zero."""
    from shared.kernels.attention.decode import launch, plan

    planned: list[plan.DecodePlan] = []

    def plan_and_note(*args: Any) -> plan.DecodePlan:
        planned.append(plan.plan_decode(*args))
        return planned[-1]

    case = AttentionCase([(1, 900), (1, 30), (5, 40)], block_size=16, head_dim=16, device=device)
    kept, launch.plan_decode = launch.plan_decode, plan_and_note
    try:
        outputs = [
            triton_kernels().paged_attention(
                case.query, case.kv_blocks, LAYER, case.batch, scale=scale_of(case), window=None
            )
            for _ in range(3)
        ]
    finally:
        launch.plan_decode = kept
    (only,) = planned
    assert only.part_means.shape[0] == only.num_slots  # there were parts to merge
    assert not bool(only.tickets.any())
    for output in outputs:
        assert_near(output, exact_attention(case, None))


def check_prefill_tiles(
    plan: list[tuple[int, int]], *, rows: int, tile: int, window: int | None, device: str = "cpu", **shape: Any
) -> None:
    """Chunks with chosen tiles, single tokens left alone."""
    from shared.kernels.attention.prefill.configs import PrefillConfig
    from shared.kernels.attention.prefill.launch import prefill_attention

    case = AttentionCase(plan, device=device, **shape)
    output = torch.full_like(case.query, float("nan"))
    prefill_attention(
        case.query, case.kv_blocks, LAYER, case.batch, output, scale=scale_of(case), window=window,
        config=PrefillConfig(rows, tile, num_warps=4, num_stages=2),
    )  # fmt: skip
    long = torch.tensor([query_len > 1 for query_len, _ in plan for _ in range(query_len)], device=device)
    assert_near(output[long].flatten(1), exact_attention(case, window)[long.cpu()])
    assert bool(output[~long].isnan().all())


def check_rms_norm(shape: tuple[int, ...], *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
    kernels, reference = triton_kernels(), TorchKernels()
    x = random_tensor(*shape, dtype=dtype, device=device) * 3
    weight = random_tensor(shape[-1], dtype=dtype, device=device)
    assert_near(kernels.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    if len(shape) == 2:
        residual = random_tensor(*shape, dtype=dtype, device=device, seed=1)
        kept = x.clone(), residual.clone()
        for actual, expected in zip(
            kernels.add_rms_norm(x, residual, weight, 1e-5),
            reference.add_rms_norm(x, residual, weight, 1e-5),
            strict=True,
        ):
            assert_near(actual, expected)
        assert torch.equal(x, kept[0])
        assert torch.equal(residual, kept[1])


def check_silu_mul(num_tokens: int, size: int, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
    gate_up = random_tensor(num_tokens, 2 * size, dtype=dtype, device=device) * 4
    assert_near(triton_kernels().silu_mul(gate_up), TorchKernels().silu_mul(gate_up))


def check_latents(
    plan: list[tuple[int, int]],
    *,
    num_heads: int,
    dim: int,
    tile: int | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
) -> None:
    """Rows that are key and value; with `tile`, cut into parts of one tile each."""
    from shared.kernels.attention.decode.splits import DecodeConfig
    from shared.kernels.attention.latent.launch import latent_attention

    case = AttentionCase(
        plan, (num_heads, 1), dim, block_size=16, dtype=dtype, device=device, kv_dtype=kv_dtype, num_planes=1
    )
    config = None if tile is None else DecodeConfig(tile, 1, 8, num_warps=4, num_stages=2)
    scale = scale_of(case)
    found = latent_attention(case.query, case.kv_blocks, LAYER, case.batch, scale=scale, config=config)
    assert_near(found, exact_attention(case, None))
    whole = triton_kernels().paged_attention(case.query, case.kv_blocks, LAYER, case.batch, scale=scale, window=None)
    assert_near(whole, exact_attention(case, None))


def check_experts(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    *,
    sizes: tuple[int, int] = (48, 40),
    part: tuple[int, int] | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> None:
    """`sizes`: hidden and of an expert; `part`: the range of experts there is, all by default."""
    hidden, inner = sizes
    first, last = part or (0, num_experts)
    gate_up = random_tensor(last - first, 2 * inner, hidden, dtype=dtype, device=device) / hidden**0.5
    down = random_tensor(last - first, hidden, inner, dtype=dtype, device=device, seed=1) / inner**0.5
    x = random_tensor(num_tokens, hidden, dtype=dtype, device=device, seed=2)
    # Some experts that most tokens choose, others that none does.
    merits = random_tensor(num_tokens, num_experts, dtype=torch.float32, device=device) + torch.linspace(
        0, 6, num_experts, device=device
    )
    weights, ids = merits.softmax(-1).topk(top_k)
    found = triton_kernels().make_experts(gate_up, down, first, own=False).forward(x, ids, weights)
    assert found.dtype == dtype
    assert_near(found, TorchKernels.make_experts(gate_up, down, first, own=False).forward(x, ids, weights))


def check_rotate_and_write(
    *,
    num_tokens: int,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    norms: bool,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
) -> None:
    """Strided inputs, a pool that must keep every other slot, and the placed query."""
    num_heads, num_kv_heads = heads
    sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    qkv = random_tensor(num_tokens, sum(sizes), dtype=dtype, device=device)
    query, key, value = (part.unflatten(1, (-1, head_dim)) for part in qkv.split(sizes, dim=-1))
    angles = 6 * torch.rand(num_tokens, head_dim // 2, generator=torch.Generator().manual_seed(0)).repeat(1, 2)
    cos, sin = angles.cos().to(device, dtype), angles.sin().to(device, dtype)
    q_norm, k_norm = (random_tensor(head_dim, dtype=dtype, device=device, seed=s) if norms else None for s in (1, 2))
    num_blocks = num_tokens + 2
    order = torch.randperm(num_blocks * block_size, generator=torch.Generator().manual_seed(1))
    slots = order[:num_tokens].to(device)
    shape = (num_blocks, 3, 2, num_kv_heads, block_size, head_dim)
    pools = [random_tensor(*shape, dtype=kv_dtype or dtype, device=device) for _ in range(2)]
    placed = [
        kernels.rotate_and_write(query, key, value, cos, sin, pool, 1, slots, q_norm=q_norm, k_norm=k_norm, eps=1e-6)
        for kernels, pool in zip((triton_kernels(), TorchKernels()), pools, strict=True)
    ]
    assert placed[0].is_contiguous()
    assert_near(placed[0], placed[1])
    assert_near(pools[0], pools[1])
    untouched = torch.ones(num_blocks * block_size, dtype=torch.bool)
    untouched[slots.cpu()] = False
    rows = [pool.cpu()[:, 1].permute(0, 3, 1, 2, 4).flatten(0, 1) for pool in pools]
    assert torch.equal(rows[0][untouched], rows[1][untouched])


def check_negative_slots_are_not_written(device: str = "cpu") -> None:
    heads = random_tensor(3, 2, 8, dtype=torch.float32, device=device)
    angles = torch.ones(3, 8, device=device)
    pool = torch.zeros(2, 1, 2, 2, 4, 8, device=device)
    slots = torch.tensor([5, -1, -1], device=device)
    triton_kernels().rotate_and_write(
        heads, heads, heads, angles, angles, pool, 0, slots, q_norm=None, k_norm=None, eps=1e-6
    )
    assert torch.equal(pool[1, 0, 1, :, 1], heads[0])
    assert int((pool != 0).any(dim=-1).sum()) == 4


def check_blocks(
    num_blocks: int,
    block_shape: tuple[int, ...],
    block_ids: list[int],
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> None:
    """Gathered, scattered and checked, bit for bit."""
    kernels = triton_kernels()
    pool = random_tensor(num_blocks, *block_shape, dtype=dtype, device=device)
    ids = torch.tensor(block_ids, dtype=torch.int64, device=device)
    gathered = kernels.gather_blocks(pool, ids)
    assert torch.equal(gathered, pool[ids])
    checksums = kernels.block_checksums(pool, ids)
    host = BlockChecksum(pool[:1].nbytes // 8).checksum_blocks(pool.cpu(), block_ids)
    assert [value % 2**64 for value in checksums.tolist()] == host
    assert torch.equal(TorchKernels().block_checksums(pool, ids), checksums)
    if len(set(block_ids)) == len(block_ids):
        target, expected = torch.zeros_like(pool), torch.zeros_like(pool)
        kernels.scatter_blocks(gathered, target, ids)
        expected[ids] = gathered
        assert torch.equal(target, expected)


def check_slot_offsets_pass_32_bits(device: str = "cpu") -> None:
    """A pool of 2^21 blocks of 2^12 elements: the last rows lie past 2^32."""
    from .probes import store_offsets

    table = torch.tensor([2**21 - 1, 3, -7], dtype=torch.int32, device=device)
    offsets = torch.empty(64, dtype=torch.int64, device=device)
    store_offsets[(1,)](table, offsets, 20, 4096, TILE=64, BLOCK_SIZE=16, HEAD_DIM=8)
    first = [(2**21 - 1) * 4096 + position * 8 for position in range(16)]
    second = [3 * 4096 + position * 8 for position in range(4)]
    assert offsets[:20].tolist() == first + second
    assert int(offsets[20:].max()) < 4096  # past the length, block 0 stands in for what the table holds


def check_uniform(pairs: list[tuple[int, int]], device: str = "cpu") -> list[float]:
    """The kernel's random numbers of (seed, position) pairs."""
    from .probes import store_uniform

    signed = [(seed - (1 << 64) if seed >> 63 else seed, position) for seed, position in pairs]
    inputs = torch.tensor(signed, dtype=torch.int64, device=device)
    numbers = torch.empty(len(pairs), dtype=torch.float64, device=device)
    store_uniform[(len(pairs),)](inputs, numbers)
    return [float(number) for number in numbers]


def check_sampling(num_rows: int, vocab_size: int, seed: int, *, ties: bool, device: str = "cpu") -> None:
    """Token for token what the reference chooses from the same probabilities."""
    case = SamplingCase(num_rows, vocab_size, seed, ties, device)
    tokens = triton_kernels().sample_tokens(case.logits, case.rows)
    assert tokens.tolist() == TorchKernels().sample_tokens(case.logits, case.rows).tolist()
    if device == "cpu":
        assert tokens.tolist() == case.tokens_of_the_engine()


def check_split_sampling(
    num_rows: int, vocab_size: int, seed: int, *, ties: bool, capacity: int, device: str = "cpu"
) -> None:
    """Rows of many splits; a small `capacity` makes ranges that do not fit the list."""
    from shared.kernels.sampling.launch import SamplingSizes, sample_tokens

    case = SamplingCase(num_rows, vocab_size, seed, ties, device)
    sizes = SamplingSizes(split=64, split_tile=32, capacity=capacity, tile=128)
    tokens = sample_tokens(case.logits, case.rows, sizes)
    assert tokens.tolist() == TorchKernels().sample_tokens(case.logits, case.rows).tolist()


def check_broken_logits(kernels: Any = None, device: str = "cpu") -> None:
    logits, rows, tokens = broken_rows(device)
    assert (kernels or triton_kernels()).sample_tokens(logits, rows).tolist() == tokens


def check_banned_tokens_are_never_drawn(kernels: Any = None, device: str = "cpu") -> None:
    """A row of -inf but for a few tokens, many draws."""
    allowed = [3, 17, 40]
    logits = torch.full((12, 50), float("-inf"), device=device)
    logits[:, allowed] = 0.0
    rows = SamplingRows.from_lists(
        [1.0] * 12, [0] * 12, [1.0] * 12, [0.0] * 12, list(range(12)), list(range(12)), device
    )
    assert set((kernels or triton_kernels()).sample_tokens(logits, rows).tolist()) == set(allowed)


def check_masks(num_rows: int, vocab_size: int, num_masks: int, seed: int, kernels: Any, device: str = "cpu") -> None:
    """Bit for bit what the bits of the masks say, over rows in any order; words of all, of none and of some tokens."""
    generator = torch.Generator().manual_seed(seed)
    num_words = -(-vocab_size // 32) + seed % 2
    masks = torch.randint(-(2**31), 2**31, (num_masks, num_words), generator=generator, dtype=torch.int32)
    kinds = torch.randint(0, 3, (num_masks, num_words), generator=generator)
    masks = torch.where(kinds == 0, 0, torch.where(kinds == 1, -1, masks)).to(device)
    logits = torch.randn(num_rows, vocab_size, generator=generator).to(device)
    logits[:, 0] = float("nan")
    rows = torch.randperm(num_rows, generator=generator)[:num_masks].to(device)
    expected = logits.clone()
    for mask, row in zip(masks.tolist(), rows.tolist(), strict=True):
        for token in range(vocab_size):
            if not mask[token // 32] >> token % 32 & 1:
                expected[row, token] = float("-inf")
    kernels.mask_tokens(logits, masks, rows)
    assert torch.equal(logits.nan_to_num(7.0), expected.nan_to_num(7.0))


def check_triton_masks(num_rows: int, vocab_size: int, num_masks: int, seed: int, device: str = "cpu") -> None:
    check_masks(num_rows, vocab_size, num_masks, seed, triton_kernels(), device)


def check_likeliest(vocab_size: int, seed: int, kernels: Any, device: str = "cpu") -> None:
    """The first of the highest among the allowed tokens, in rows with and without masks, ties and broken numbers."""
    generator = torch.Generator().manual_seed(seed)
    num_words = -(-vocab_size // 32) + seed % 2
    logits = torch.randint(-3, 4, (12, vocab_size), generator=generator).float()  # many are equal
    logits = torch.where(logits == 0, torch.tensor([0.0, -0.0]).repeat(vocab_size)[:vocab_size], logits)
    logits[1:3] = torch.randn(2, vocab_size, generator=generator)
    logits[3, -1], logits[4, 0], logits[5, vocab_size // 2] = float("nan"), -float("nan"), float("inf")
    logits[6], logits[7, :-1] = float("-inf"), float("-inf")
    masks = torch.randint(-(2**31), 2**31, (9, num_words), generator=generator, dtype=torch.int32)
    kinds = torch.randint(0, 3, masks.shape, generator=generator)
    masks = torch.where(kinds == 0, 0, torch.where(kinds == 1, -1, masks))
    masks[0], masks[1] = 0, -1
    rows = torch.randperm(12, generator=generator)[:9]
    allowed_of: dict[int, list[int]] = dict(zip(rows.tolist(), masks.tolist(), strict=True))
    expected = [_likeliest(values, allowed_of.get(row)) for row, values in enumerate(logits.tolist())]
    before, logits = logits, logits.to(device)
    assert kernels.likeliest_tokens(logits, masks.to(device), rows.to(device)).tolist() == expected
    assert logits.cpu().nan_to_num(9.5).equal(before.nan_to_num(9.5))
    unmasked = [_likeliest(values, None) for values in before.tolist()]
    assert kernels.likeliest_tokens(logits).tolist() == unmasked
    assert kernels.likeliest_tokens(logits, masks[:0].to(device), rows[:0].to(device)).tolist() == unmasked


def _likeliest(logits: list[float], words: list[int] | None) -> int:
    """Of one row, as `SamplingOps.likeliest_tokens` says it."""
    allowed = [token for token in range(len(logits)) if words is None or words[token // 32] >> token % 32 & 1]
    found = max(allowed, key=lambda token: logits[token], default=-1)
    is_broken = any(math.isnan(value) or value == math.inf for value in logits)
    return -1 if is_broken or found < 0 or logits[found] == -math.inf else found


def check_triton_likeliest(vocab_size: int, seed: int, device: str = "cpu") -> None:
    check_likeliest(vocab_size, seed, triton_kernels(), device)


def check_wrong_arguments_are_refused(device: str = "cpu") -> None:
    """The launchers assert what a kernel would read past or misread."""
    kernels = triton_kernels()
    case = AttentionCase([(1, 5), (3, 6)], head_dim=16, block_size=16, device=device)
    x = torch.ones(4, 16, device=device)
    heads, pool, slots = x.view(4, 2, 8), torch.zeros(2, 1, 2, 2, 4, 8, device=device), torch.arange(4, device=device)

    def attend(query: Tensor, kv_blocks: Tensor, layer: int = LAYER) -> None:
        kernels.paged_attention(query, kv_blocks, layer, case.batch, scale=1.0, window=None)

    def place(query: Tensor, cos: Tensor, slots: Tensor) -> None:
        kernels.rotate_and_write(query, heads, heads, cos, cos, pool, 0, slots, q_norm=None, k_norm=None, eps=1e-6)

    wrong: list[Callable[[], object]] = [
        lambda: attend(case.query[1:], case.kv_blocks),
        lambda: attend(case.query.half(), case.kv_blocks),
        lambda: attend(case.query, case.kv_blocks, layer=3),
        lambda: attend(case.query[:, :3], case.kv_blocks),
        lambda: attend(case.query.transpose(0, 1).contiguous().transpose(0, 1), case.kv_blocks),
        lambda: attend(case.query, case.kv_blocks.transpose(1, 3).contiguous().transpose(1, 3)),
        lambda: place(heads.repeat(1, 1, 2)[..., ::2], x[:, :8].contiguous(), slots),
        lambda: place(heads, x[:, :8], slots),
        lambda: place(heads, x[:, :8].contiguous(), slots.int()),
        lambda: kernels.rms_norm(x.t(), torch.ones(4, device=device), 1e-6),
        lambda: kernels.rms_norm(x, torch.ones(8, device=device), 1e-6),
        lambda: kernels.add_rms_norm(x, x[:2], torch.ones(16, device=device), 1e-6),
        lambda: kernels.silu_mul(x.t()),
        lambda: kernels.silu_mul(x[:, :3].contiguous()),
        lambda: kernels.gather_blocks(pool, slots[:1].int()),
        lambda: kernels.scatter_blocks(pool[:1], pool, slots[:2]),
        lambda: kernels.block_checksums(pool.transpose(0, 3), slots[:1]),
        lambda: kernels.sample_tokens(x.half(), SamplingCase(4, 16, 0, device=device).rows),
        lambda: kernels.sample_tokens(x, SamplingCase(3, 16, 0, device=device).rows),
        lambda: kernels.mask_tokens(x, torch.zeros(4, 0, dtype=torch.int32, device=device), slots),
        lambda: kernels.mask_tokens(x, torch.zeros(4, 1, dtype=torch.int64, device=device), slots),
        lambda: kernels.mask_tokens(x, torch.zeros(3, 1, dtype=torch.int32, device=device), slots),
        lambda: kernels.mask_tokens(x.t(), torch.zeros(4, 1, dtype=torch.int32, device=device), slots),
    ]
    for index, call in enumerate(wrong):
        try:
            call()
        except AssertionError:
            continue
        raise RuntimeError(f"call {index} was not refused")
