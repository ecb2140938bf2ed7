"""fp32 computation over KV in fewer bits: how far from transformers, and the same tokens by every way."""

from __future__ import annotations

from contextlib import ExitStack, closing
from itertools import product

import pytest
import torch

from shared.engine.runner.runner import RunnerConfig
from shared.errors import Overloaded, TransferFailed
from shared.kernels.backends import cpu as cpu_backend
from shared.kernels.kv_conversion import BlockConversion
from shared.kernels.pool_view import PoolView
from shared.kv.handoff.arrival_check import ArrivalCheck
from shared.kv.layout import BlockLayout, KVFormat
from shared.model.decoder import Decoder
from shared.model.ranks.shard import Degrees
from shared.model.text.tokenizer import Tokenizer
from tests.demo import DEMO
from tests.integration.engine.engine_run import EngineRun, hand_off
from tests.integration.engine.families import FAMILIES, write_family
from tests.integration.engine.group_run import GroupRun
from tests.integration.engine.psalm import TEXT
from tests.unit.model.paged_run import load_oracle, oracle_logits, prompt_logits

REFUSAL = cpu_backend.refusal(torch.device("cpu"), torch.float32)
KERNELS = [
    "torch",
    pytest.param("cpu", marks=pytest.mark.skipif(REFUSAL is not None, reason=f"no C++ kernels here: {REFUSAL}")),
]
BOUNDS = {torch.bfloat16: (0.05, 0.002, 0.99), torch.int8: (0.1, 0.006, 0.99), torch.float8_e4m3fn: (0.5, 0.03, 0.97)}
"""Of the logits' standard deviation, how far KV of that dtype may move a logit, and how far it may on the average; the
share of tokens that must stay the most likely ones."""
CODES = ["int8", "float8_e4m3fn"]
MOST_PERPLEXITY = 1.003
"""Of codes, as a share of that of fp32 KV."""


@pytest.mark.parametrize("kv_dtype", BOUNDS)
@pytest.mark.parametrize("kernels", KERNELS)
def test_logits_and_greedy_tokens_stay_close_to_those_of_transformers(kernels, kv_dtype):
    tokens = Tokenizer.load(DEMO).encode("Once upon a time there was a king who had three sons. " * 12)[:200]
    expected = oracle_logits(load_oracle(DEMO), tokens)
    decoder = Decoder.load(DEMO, torch.float32, "cpu", kernels=kernels)
    with torch.inference_mode():
        wide = prompt_logits(decoder, tokens, 64)
        narrow = prompt_logits(decoder, tokens, 64, kv_dtype)
    torch.testing.assert_close(wide, expected, rtol=0, atol=1e-4)
    difference = (narrow - expected).abs() / expected.std()
    most, mean, same = BOUNDS[kv_dtype]
    assert 1e-4 < float(difference.max()) < most  # rounded, and no more than that
    assert float(difference.mean()) < mean
    assert float((narrow.argmax(dim=-1) == expected.argmax(dim=-1)).float().mean()) > same


@pytest.mark.parametrize("kernels", KERNELS)
def test_codes_cost_the_demo_model_little_perplexity(kernels):
    tokens = Tokenizer.load(DEMO).encode(TEXT)
    decoder = Decoder.load(DEMO, torch.float32, "cpu", kernels=kernels)

    def perplexity(kv_dtype: torch.dtype) -> float:
        with torch.inference_mode():
            logits = prompt_logits(decoder, tokens, 64, kv_dtype)
        return float(torch.nn.functional.cross_entropy(logits[:-1].double(), torch.tensor(tokens[1:])).exp())

    wide = perplexity(torch.float32)
    assert 20 < wide < 30  # a text that it does not know, but understands
    for kv_dtype in (torch.int8, torch.float8_e4m3fn):
        assert perplexity(kv_dtype) <= MOST_PERPLEXITY * wide


@pytest.mark.parametrize("kv_dtype", ["bfloat16", *CODES])
@pytest.mark.parametrize("family", ["demo", *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES)])
def test_every_way_through_the_engine_gives_the_same_tokens(family, kv_dtype, tmp_path):
    folder = DEMO if family == "demo" else write_family(tmp_path / "model", family)
    prompt = [7 + (i * 37) % 190 for i in range(53)]
    config = RunnerConfig(max_num_seqs=8, staged_transfer=family == "demo")
    prefill, decode = (EngineRun(folder, config=config, kv_dtype=kv_dtype) for _ in range(2))
    try:
        assert decode.runner.pool.dtype == getattr(torch, kv_dtype)
        collocated = decode.generate(prompt)[0]
        cached = decode.generate(prompt)[0]
        assert decode.scheduler.counters.num_prefix_hit_tokens == 48
        decode.pool.clear_cache()
        disaggregated = hand_off(prefill, decode, prompt)
        decode.pool.clear_cache()
        repaired = hand_off(prefill, decode, prompt, corrupt=1)
    finally:
        prefill.close()
        decode.close()
    assert collocated == cached == disaggregated == repaired


@pytest.mark.parametrize("kv_dtype", CODES)
def test_ranks_of_a_group_keep_codes_of_their_own_heads(kv_dtype):
    """In a pool that they share, and in slices of their own, between which blocks pass as between single workers."""
    prompt = [7 + (i * 37) % 190 for i in range(53)]
    with ExitStack() as stack:
        alone = stack.enter_context(closing(EngineRun(DEMO, kv_dtype=kv_dtype)))
        expected = alone.generate(prompt, max_tokens=24)[0]
        for own_pools in (False, True):
            group = stack.enter_context(
                closing(GroupRun(DEMO, Degrees(tensor=2), own_pools=own_pools, kv_dtype=kv_dtype))
            )
            assert group.generate(prompt, max_tokens=24)[0] == expected
            group.pool.clear_cache()
            assert hand_off(alone, group, prompt, max_tokens=24) == expected


@pytest.mark.parametrize("kv_dtype", ["bfloat16", *CODES])
def test_preempted_sequences_come_back_from_host_memory_the_same(kv_dtype, tmp_path):
    folder = write_family(tmp_path / "model", "LlamaForCausalLM")
    prompts = [[5 + (i * k) % 200 for i in range(20 + 9 * k)] for k in range(1, 5)]
    with (
        EngineRun(folder, kv_dtype=kv_dtype) as roomy,
        EngineRun(folder, num_blocks=16, max_num_batched_tokens=17, num_host_blocks=16, kv_dtype=kv_dtype) as tight,
    ):
        alone = [roomy.generate(prompt, max_tokens=40)[0] for prompt in prompts]
        together = tight.generate(*prompts, max_tokens=40)
        preemptions = tight.scheduler.counters.num_preemptions
    assert together == alone
    assert preemptions > 0


@pytest.mark.parametrize("sent", CODES)
@pytest.mark.parametrize("wide", ["float32", "bfloat16"])
def test_a_converted_block_has_the_codes_that_a_pool_would_have_been_given(wide, sent):
    """To the bit, zeros and numbers that are no longer numbers too, whatever is converted beside it."""
    layout = BlockLayout(2, 16, KVFormat(wide, 3, 32, sent=sent))
    rows = torch.randn(3, 2, 2, 3, 16, 32, generator=torch.Generator().manual_seed(1)).to(getattr(torch, wide))
    rows[0, 0, 0, 0, :3] = torch.tensor([0.0, 1e-35, float("inf")])[:, None]
    wanted = PoolView.of(torch.zeros(layout.handed_off.shape(3), dtype=torch.uint8), layout.handed_off)
    for layer, plane in product(range(2), range(2)):
        wanted.write(plane, layer, torch.arange(48), rows[:, layer, plane].transpose(1, 2).reshape(48, 3, 32))
    blocks = [memoryview(block.contiguous().view(torch.uint8).numpy().reshape(-1)) for block in rows]
    conversion, check = BlockConversion(layout), ArrivalCheck(layout.handed_off.block_bytes)
    made = conversion.convert(blocks)
    assert [bytes(block.memory) for block in made] == [bytes(block.numpy()) for block in wanted.memory]
    assert conversion.convert(blocks[1:2])[0].memory == made[1].memory
    assert [check.checksum(block.memory) for block in made] == [block.checksum for block in made]


def test_an_engine_that_gets_prompts_converted_computes_none_of_them():
    """What it lost is for other workers: those errors have the router place the request anew."""
    prompt = [7 + (i * 37) % 190 for i in range(53)]
    with (
        EngineRun(DEMO) as prefill,
        EngineRun(DEMO, recomputes=False) as decode,
        EngineRun(DEMO, num_blocks=9, recomputes=False) as tight,
        EngineRun(DEMO, 9, 96, recomputes=False, num_host_blocks=16) as swapping,
    ):
        expected = hand_off(prefill, decode, prompt)
        decode.pool.clear_cache()
        with pytest.raises(TransferFailed, match="damaged, and prompts are not computed here"):
            hand_off(prefill, decode, prompt, corrupt=1)
        assert hand_off(prefill, decode, prompt) == expected
        assert decode.pool.num_free == decode.pool.num_blocks
        others = [[9 + (i * 41) % 190 for i in range(40)], prompt[::-1][:45]]
        with pytest.raises(Overloaded, match="gave its blocks back, and prompts are not computed here"):
            tight.generate(*others)
        assert swapping.generate(*others) == [prefill.generate(other)[0] for other in others]
        assert swapping.scheduler.counters.num_swapped_in > 0
