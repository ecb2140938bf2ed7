"""Every Triton op compiled and run on the GPU, against the torch reference: bf16 too, and in CUDA graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("numpy", reason="the engine's inputs are NumPy arrays")
pytest.importorskip("safetensors", reason="checkpoints are safetensors files")

from shared.kernels.attention.prefill import cuts
from shared.kernels.backends.registry import choose_kernels
from shared.kernels.batch import AttentionBatch
from shared.kernels.delta_layer import state_words
from shared.kernels.delta_sizes import PartPlaces
from shared.kernels.pool_view import PoolView
from shared.kernels.torch_backend import TorchKernels
from shared.model.checkpoints import write_random_checkpoint
from shared.model.decoder import Decoder
from tests.unit.kernels import (
    attention_checks,
    block_checks,
    coded_checks,
    comparing,
    decoder_checks,
    delta_checks,
    deterministic_checks,
    lora_checks,
    sampling_checks,
)
from tests.unit.kernels.attention_case import LAYER, AttentionCase
from tests.unit.kernels.routing_case import FAMILIES, ROUTINGS

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BESIDE = PartPlaces(0, 8, 8)  # a state's parts, all in one KV head
MIXED = [(1, 1), (9, 9), (1, 37), (40, 170), (2, 2), (1, 16), (1, 1500), (300, 700)]


def test_the_gpu_is_served_by_triton() -> None:
    assert choose_kernels("cuda", torch.bfloat16).name == "triton"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 19, 600])
@pytest.mark.parametrize(
    ("head_dim", "group", "block_size"),
    [(64, 1, 16), (80, 3, 32), (96, 4, 64), (128, 4, 16), (128, 7, 64), (128, 16, 16), (256, 2, 32)],
)
def test_mixed_batches_equal_the_reference(
    head_dim: int, group: int, block_size: int, window: int | None, dtype: torch.dtype
) -> None:
    attention_checks.check_attention(
        MIXED,
        heads=(2 * group, 2),
        head_dim=head_dim,
        block_size=block_size,
        window=window,
        dtype=dtype,
        device="cuda",
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 600])
@pytest.mark.parametrize(("heads", "head_dim"), [((8, 2), 128), ((8, 1), 64), ((7, 1), 128), ((8, 4), 256)])
def test_few_tokens_that_share_a_read_of_keys_equal_the_formula(
    heads: tuple[int, int], head_dim: int, window: int | None, dtype: torch.dtype
) -> None:
    for plan in ([(4, 2050), (1, 37), (2, 2), (3, 8191)], [(8, 4099)], [(2, 1 + 700 * i) for i in range(1, 40)]):
        attention_checks.check_attention(
            plan, heads=heads, head_dim=head_dim, block_size=16, window=window, dtype=dtype, device="cuda",
            has_guesses=True,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "head_dim"), [((8, 2), 128), ((4, 4), 64), ((7, 1), 128)])
@pytest.mark.parametrize("plan", [[(2048, 2048)], [(1000, 1100)], [(1024, 5120)], [(1500, 3517), (1024, 1024)]])
def test_long_chunks_by_cudnn_equal_those_of_the_kernel_for_any(
    plan: list[tuple[int, int]], heads: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> None:
    sizes = {"heads": heads, "head_dim": head_dim, "block_size": 16, "dtype": dtype, "device": "cuda"}
    attention_checks.check_long_chunks(plan, unit=1024, **sizes)


def test_long_chunks_among_others_equal_those_of_the_kernel_for_any(monkeypatch: pytest.MonkeyPatch) -> None:
    from shared.kernels.attention.prefill import cudnn

    plan = [(1, 70), (2048, 8192), (30, 90), (4096, 4096)]
    case = AttentionCase(plan, (32, 4), head_dim=128, block_size=16, dtype=torch.bfloat16, device="cuda")
    assert cuts.long_chunks(case.batch, 32) == (1, 3)

    def attended() -> torch.Tensor:
        batch = replace(case.batch)  # remembers nothing
        return comparing.triton_kernels().paged_attention(case.query, case.pool, LAYER, batch, scale=0.09, window=None)

    found = attended()
    monkeypatch.setattr(cudnn, "serves", lambda *_: False)
    comparing.assert_near(found, attended())


def test_a_thread_prepares_itself_without_writing_to_the_pool() -> None:
    from shared.kernels.attention.prefill import cudnn

    memory = torch.zeros(4, 1, 2, 2, 16 * 128 * 2, dtype=torch.uint8, device="cuda")
    cudnn.prepare_thread(8, torch.bfloat16, PoolView(memory, torch.bfloat16, 16, 128), 3000)
    torch.cuda.synchronize()
    assert not bool(memory.any())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts_per_multiprocessor", [1, 4, 16])
def test_long_sequences_cut_into_parts_equal_the_reference(parts_per_multiprocessor: int, dtype: torch.dtype) -> None:
    attention_checks.check_split_decode(
        [5000, 1, 333, 2048, 64],
        tile=32,
        parts_per_multiprocessor=parts_per_multiprocessor,
        heads=(8, 2),
        head_dim=128,
        block_size=16,
        dtype=dtype,
        device="cuda",
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "scoring",
    [{"softcap": 5.0}, {"has_sinks": True}, {"has_sinks": True, "window": 40}, {"is_chunked": True, "window": 40}],
    ids=str,
)
def test_scores_are_capped_and_meet_sinks(scoring: dict[str, Any], dtype: torch.dtype) -> None:
    attention_checks.check_attention(
        MIXED, heads=(8, 2), head_dim=64, block_size=16, dtype=dtype, device="cuda", **scoring
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
def test_attention_reads_codes(kv_dtype: torch.dtype, dtype: torch.dtype) -> None:
    attention_checks.check_attention(
        MIXED, heads=(8, 2), head_dim=128, block_size=16, dtype=dtype, kv_dtype=kv_dtype, device="cuda"
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "dim"), [(16, 96), (21, 32), (128, 576)])
def test_attention_to_latents_follows_the_formula(num_heads: int, dim: int, dtype: torch.dtype) -> None:
    plan = [(1, 40), (3, 3), (1, 700), (70, 170)]
    attention_checks.check_latents(plan, num_heads=num_heads, dim=dim, dtype=dtype, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "sizes"),
    [(1, 4, 1, (48, 40)), (33, 16, 3, (130, 70)), (90, 8, 2, (512, 256)), (700, 64, 6, (1024, 128))],
)
def test_experts_equal_the_reference(
    num_tokens: int, num_experts: int, top_k: int, sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    decoder_checks.check_experts(num_tokens, num_experts, top_k, sizes=sizes, dtype=dtype, device="cuda")


@pytest.mark.parametrize("part", [(0, 64), (5, 6), (20, 64)])
@pytest.mark.parametrize("sizes", [(512, 256), (136, 72)])
def test_many_rows_go_through_torchs_grouped_product(sizes: tuple[int, int], part: tuple[int, int]) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("it may wait for the device elsewhere")
    decoder_checks.check_torchs_product(900, 64, 6, sizes=sizes, part=part, device="cuda")
    decoder_checks.check_experts(2000, 20, 4, sizes=sizes, dtype=torch.bfloat16, device="cuda")


def test_every_tiling_of_experts_equals_the_reference() -> None:
    from shared.kernels.experts.bench import FEW_CONFIGS, MANY_CONFIGS

    large = torch.cuda.get_device_capability() == (9, 0)
    for config in (*FEW_CONFIGS, *MANY_CONFIGS) if large else FEW_CONFIGS[:1]:
        decoder_checks.check_every_tiling(config, device="cuda")


@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(1, 128, 8), (500, 128, 8), (300, 20, 4)])
def test_both_ways_to_sort_pairs_agree(num_tokens: int, num_experts: int, top_k: int) -> None:
    for first_expert in (0, 3):
        decoder_checks.check_sorted_pairs(num_tokens, num_experts, top_k, first_expert, device="cuda")


@pytest.mark.parametrize("name", [*ROUTINGS, *FAMILIES])
def test_experts_are_chosen_as_the_reference_chooses(name: str) -> None:
    decoder_checks.check_choices((name,), device="cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_interleaved", [True, False])
@pytest.mark.parametrize(("num_heads", "dims"), [(3, (48, 20, 32)), (128, (512, 128, 64))])
def test_latents_are_placed_as_by_torch(
    num_heads: int, dims: tuple[int, int, int], is_interleaved: bool, dtype: torch.dtype
) -> None:
    decoder_checks.check_placed_latents(
        num_tokens=70, num_heads=num_heads, dims=dims, is_interleaved=is_interleaved, dtype=dtype, device="cuda"
    )


def test_captured_experts_follow_the_choice() -> None:
    from shared.kernels.experts.launch import GroupedExperts

    weight = {"dtype": torch.bfloat16, "device": "cuda"}
    gate_up = comparing.random_tensor(16, 512, 256, **weight) / 16
    experts = GroupedExperts(gate_up, comparing.random_tensor(16, 256, 256, **weight) / 16, 0)
    for num_tokens in (3, 2000):  # tiles; the grouped product of torch where it serves
        x = comparing.random_tensor(num_tokens, 256, **weight)
        merits = torch.rand(num_tokens, 16, device="cuda")
        weights, ids = merits.topk(4)
        experts.forward(x, ids, weights)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = experts.forward(x, ids, weights)
        for last in (16, 5):  # of the experts that are chosen from
            for kept, new in zip((weights, ids), merits[:, :last].topk(4), strict=True):
                kept.copy_(new)
            graph.replay()
            torch.cuda.synchronize()
            expected = TorchKernels.make_experts(gate_up, experts.down, 0, own=False).forward(x, ids, weights)
            comparing.assert_near(output, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", coded_checks.FORMS)
def test_products_with_codes_equal_those_of_the_opened_weight(form: str, dtype: torch.dtype) -> None:
    for num_rows, out_size, in_size in ((3, 70, 200), (16, 4096, 4096), (64, 1000, 1152), (100, 1032, 2048)):
        coded_checks.check_product(form, num_rows, out_size, in_size, dtype=dtype, device="cuda")
    coded_checks.check_product(form, 300, 1032, 2048, dtype=dtype, device="cuda", bias=False)
    if "rounded" not in form:
        coded_checks.check_the_opened_weight(form, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_in_any_order_many_rows_and_rows_that_are_no_numbers(dtype: torch.dtype) -> None:
    coded_checks.check_orders(dtype, "cuda")
    coded_checks.check_many_rows("int4 groups with zeros", "cuda", dtype)
    if dtype != torch.float32:
        coded_checks.check_rows_that_are_no_numbers(dtype, "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_few_rows_equal_the_exact_ones(dtype: torch.dtype) -> None:
    for num_rows in (1, 16, 31, 64):
        for in_size, out_size in ((256, 128), (4096, 6144), (14_336, 4096), (4096, 28_672)):
            decoder_checks.check_few_rows(num_rows, in_size, out_size, dtype=dtype, device="cuda")


def test_captured_products_of_few_rows_follow_their_input() -> None:
    decoder_checks.check_captured_few_rows()


@pytest.mark.parametrize("form", ["int4 groups with zeros", "int8 rows, rounded rows", "fp8 blocks"])
def test_captured_products_with_codes_follow_their_input(form: str) -> None:
    coded_checks.check_capture(form)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "in_size"), [(1, 64), (23, 200), (70, 4096)])
def test_low_rank_additions_equal_the_reference(num_rows: int, in_size: int, dtype: torch.dtype) -> None:
    lora_checks.check_triton_loras(num_rows, in_size, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"heads": (1, 3), "dims": (5, 7), "kernel_size": 3, "words": 37},
        {"dims": (20, 130), "kernel_size": 1},
        {"heads": (4, 8), "dims": (128, 128), "words": 12_288, "block_size": 16},
        {"heads": (4, 8), "dims": (128, 128), "words": 12_288, "block_size": 16, "parts": 2, "runs": 12},
        {"heads": (3, 3), "dims": (20, 70), "by_channel": True},
        {"heads": (4, 4), "dims": (128, 128), "words": 12_288, "block_size": 16, "by_channel": True},
        {"heads": (8, 8), "dims": (64, 64), "words": 6144, "parts": 8, "runs": 3, "places": BESIDE, "by_channel": True},
    ],
    ids=str,
)
def test_the_gated_delta_rule_equals_the_reference(sizes: dict[str, Any], dtype: torch.dtype) -> None:
    for plan in (delta_checks.ONES, delta_checks.CHUNKS, delta_checks.ONES + delta_checks.CHUNKS, [(1500, 1533)]):
        delta_checks.check_triton(plan, dtype=dtype, device="cuda", **sizes)


def test_a_captured_step_of_states_follows_its_blocks_and_tokens() -> None:
    sizes = {"dims": (128, 128), "words": 12_288, "block_size": 16, "device": "cuda"}
    first, then = (delta_checks.DeltaCase(plan, **sizes) for plan in ([(1, 1), (1, 20)], [(1, 33), (1, 20)]))
    kernels = comparing.triton_kernels()
    projected, pool, batch = first.projected.clone(), first.pool, first.batch
    kernels.delta_attention(projected, first.layer, pool, batch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = kernels.delta_attention(projected, first.layer, pool, batch)
    assert batch.state_blocks is not None
    assert then.batch.state_blocks is not None
    expected, states = then.run(TorchKernels())
    here = state_words(pool, first.layer.num_parts)
    # The other case's states, in blocks of this pool by their order.
    order = sorted({int(block) for block in then.batch.state_blocks.flatten() if block >= 0})
    assert len(order) <= here.shape[0]
    here[: len(order)] = state_words(then.pool, then.layer.num_parts)[order]
    places = {block: at for at, block in enumerate(order)}
    moved = [[[places.get(int(b), -1) for b in row] for row in rows] for rows in then.batch.state_blocks.cpu()]
    batch.state_blocks.copy_(torch.tensor(moved, dtype=torch.int32))
    projected.copy_(then.projected)
    graph.replay()
    torch.cuda.synchronize()
    comparing.assert_near(output, expected)
    torch.testing.assert_close(here[: len(order)], states[order], rtol=1e-5, atol=1e-5, equal_nan=True)


def test_masks_leave_the_allowed_tokens() -> None:
    sampling_checks.check_triton_masks(4, 5000, 3, 5000, device="cuda")
    for vocab_size in (1, 33, 128_256):
        sampling_checks.check_triton_likeliest(vocab_size, 1, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES)
def test_deterministic_ops_give_a_row_the_same_bits_among_others(dtype: torch.dtype) -> None:
    deterministic_checks.check_product(4096, 512, dtype, device="cuda")
    if dtype != torch.float32 and torch.cuda.get_device_capability() == (9, 0):
        deterministic_checks.check_large_tiles(600, 4096, 1100, dtype, device="cuda")
        deterministic_checks.check_large_tiles(4096, 14_336, 2048, dtype, device="cuda")
    for window in (None, 50):
        deterministic_checks.check_attention(
            [0, 1, 17, 130, 131, 400], window, dtype, device="cuda", heads=(8, 2), head_dim=128
        )


def test_lengths_come_from_the_device() -> None:
    attention_checks.check_lengths_come_from_the_device("cuda")


def test_times_of_tokens_are_those_of_the_reference_to_the_bit() -> None:
    sampling_checks.check_times("cuda")


@pytest.mark.parametrize("dtype", DTYPES)
def test_elementwise_ops_equal_the_reference(dtype: torch.dtype) -> None:
    for shape in ((5, 32), (3, 1000), (64, 4096), (7, 16_384), (0, 64), (4, 3, 80)):
        decoder_checks.check_rms_norm(shape, dtype=dtype, device="cuda")
    for num_tokens, size in ((3, 64), (2, 5000), (64, 14_336), (0, 64)):
        decoder_checks.check_act_and_mul(num_tokens, size, dtype=dtype, device="cuda")
    for head_dim, heads in ((64, (4, 2)), (80, (3, 1)), (128, (32, 8)), (256, (5, 1))):
        for norms in (False, True):
            decoder_checks.check_rotate_and_write(
                num_tokens=70,
                heads=heads,
                head_dim=head_dim,
                block_size=16,
                norms=norms,
                dtype=dtype,
                device="cuda",
            )
    decoder_checks.check_negative_slots_are_not_written("cuda")


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_are_copied_and_checked_bit_for_bit(dtype: torch.dtype) -> None:
    block_checks.check_blocks(9, (2, 2, 2, 16, 40), [3, 0, 8], dtype=dtype, device="cuda")
    block_checks.check_blocks(40, (4, 2, 8, 16, 128), [39, *range(0, 30, 2), 5, 5], dtype=dtype, device="cuda")


@pytest.mark.parametrize("ties", [False, True])
def test_tokens_equal_those_of_the_reference(ties: bool) -> None:
    for seed, vocab_size in enumerate((1, 100, 2048, 32_000, 128_256)):
        sampling_checks.check_sampling(32, vocab_size, seed, ties=ties, device="cuda")
        for spread in (0.1, 1.0, 3.0):
            sampling_checks.check_flat_sampling(vocab_size + 99, spread, {}, device="cuda")
            sizes = {"refine_over": 0, "capacity": 64}
            sampling_checks.check_flat_sampling(vocab_size + 99, spread, sizes, device="cuda")
    sampling_checks.check_broken_logits(device="cuda")
    sampling_checks.check_banned_tokens_are_never_drawn(device="cuda")
    sampling_checks.check_triton_penalties(64, 128_256, 1, device="cuda")


def test_a_captured_decode_attention_follows_growing_sequences() -> None:
    case = AttentionCase([(1, 900), (1, 64), (1, 300), (1, 7)], heads=(8, 2), head_dim=64, block_size=16, device="cuda")
    kernels = comparing.triton_kernels()

    def attend() -> torch.Tensor:
        batch = replace(case.batch)  # without a plan yet: a step's planning is captured with it
        return kernels.paged_attention(
            case.query, case.pool, LAYER, batch, scale=attention_checks.scale_of(case), window=None
        )

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = attend()
    for kv_lens in ((1, 64, 17, 7), (256, 33, 300, 6), (900, 1, 299, 7)):
        case.batch.seq_lens.copy_(torch.tensor(kv_lens, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        case.batch = replace(case.batch, kv_lens=kv_lens)
        comparing.assert_near(output, attention_checks.expected_attention(case, None))


def test_a_pool_past_32_bit_offsets_is_read_and_written_right() -> None:
    """4.3 G elements: the last block begins past 2^32 elements."""
    num_blocks, block_size, head_dim = (1 << 20) + 4, 16, 128
    kv_blocks = torch.zeros(num_blocks, 1, 2, 1, block_size, head_dim, dtype=torch.float16, device="cuda")
    table = [num_blocks - 1, 2, num_blocks - 3]
    kernels = comparing.triton_kernels()
    batch = AttentionBatch.from_lists([40, 1], [40, 1], [table, [num_blocks - 2]], block_size, "cuda")
    shape = {"dtype": torch.float16, "device": "cuda"}
    query, key, value = (comparing.random_tensor(41, 1, head_dim, seed=seed, **shape) for seed in range(3))
    cos, sin = torch.ones(41, head_dim, **shape), torch.zeros(41, head_dim, **shape)
    placed = kernels.rotate_and_write(
        query, key, value, cos, sin, PoolView.over(kv_blocks), 0, batch.slots, q_norm=None, k_norm=None, eps=1e-6
    )
    assert torch.equal(kv_blocks[num_blocks - 1, 0, 0, 0], key[:16, 0])
    assert torch.equal(kv_blocks[num_blocks - 2, 0, 1, 0, 0], value[40, 0])
    output = kernels.paged_attention(placed, PoolView.over(kv_blocks), 0, batch, scale=0.1, window=None)
    ids = torch.tensor([*table, num_blocks - 2], device="cuda")
    few = AttentionBatch.from_lists([40, 1], [40, 1], [[0, 1, 2], [3]], block_size, "cuda")
    expected = TorchKernels().paged_attention(
        placed.float(), PoolView.over(kv_blocks[ids].float()), 0, few, scale=0.1, window=None
    )
    comparing.assert_near(output, expected)
    assert torch.equal(kernels.gather_blocks(kv_blocks, ids), kv_blocks[ids])


def test_a_decoder_gives_the_greedy_tokens_of_torch(tmp_path: Path) -> None:
    write_random_checkpoint(
        tmp_path, "Qwen3ForCausalLM", num_layers=3, num_heads=8, num_kv_heads=2, head_dim=64, hidden_size=256
    )
    assert _greedy(tmp_path, "triton") == _greedy(tmp_path, "torch")


def _greedy(folder: Path, kernels: str, num_tokens: int = 32) -> list[int]:
    decoder = Decoder.load(folder, torch.float32, "cuda", kernels=kernels)
    config, block_size = decoder.config, 16
    shape = (8, config.num_layers, 2, config.num_kv_heads, block_size, config.head_dim)
    kv_blocks = torch.full(shape, float("nan"), device="cuda")
    tokens = [(7 * i * i + 3) % config.vocab_size for i in range(50)]
    table, start = [5, 2, 7, 0, 3, 1], 0
    while len(tokens) < 50 + num_tokens:
        batch = AttentionBatch.from_lists([len(tokens) - start], [len(tokens)], [table], block_size, decoder.device)
        logits = decoder.forward(
            torch.tensor(tokens[start:], device="cuda"),
            torch.arange(start, len(tokens), device="cuda"),
            PoolView.over(kv_blocks),
            batch,
            torch.tensor([len(tokens) - start - 1], device="cuda"),
        )
        start = len(tokens)
        tokens.append(int(logits.argmax()))
    return tokens
