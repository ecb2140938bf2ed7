"""What a spread over ranks takes: inequalities that hold for any model, and what one rank holds, counted by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError
from shared.sizing.degrees import degree_fits
from shared.sizing.devices import GPUS, H200, gpu_of
from shared.sizing.exchange import exchange
from shared.sizing.fit import fit
from shared.sizing.load import Hardware, Load
from shared.sizing.memory import room
from shared.sizing.roofline import STEP_OVERHEAD_S, roofline, step_times
from shared.sizing.shapes import (
    DEEPSEEK_V3,
    LLAMA_3_70B,
    MIXTRAL_8X7B,
    NAMED_MODELS,
    SPARSE_MODELS,
    ExpertShape,
    LatentShape,
    ModelShape,
    decoder,
)
from shared.sizing.spread import Spread
from shared.sizing.step_time import StepWork
from tests.examples import examples

LOAD = Load(context=8000, concurrency=256, prompt_len=4000, output_len=500, ttft_s=1.0, tpot_s=0.04, rate=12.0)
POWERS = st.integers(0, 3).map(lambda power: 1 << power)
NAMED = {**NAMED_MODELS, **SPARSE_MODELS}


@st.composite
def models(draw: st.DrawFn) -> ModelShape:
    """Decoders of any proportions, with and without experts and latents."""
    layers, heads = draw(st.integers(1, 40)), 16 * draw(st.integers(1, 4))
    kv_heads = heads // draw(st.sampled_from([1, 2, 4, 8, 16]))
    experts = latent = None
    if draw(st.booleans()):
        num_experts = draw(st.integers(2, 64))
        experts = ExpertShape(
            draw(st.integers(1, layers)), num_experts, draw(st.integers(1, num_experts)), draw(st.integers(64, 2048)),
            draw(st.integers(0, 512)),
        )  # fmt: skip
    if draw(st.booleans()):
        latent, kv_heads = LatentShape(512, 128, 64, 128, draw(st.sampled_from([0, 256]))), 1
    return decoder(
        layers=layers, hidden=draw(st.integers(64, 4096)), intermediate=draw(st.integers(64, 8192)), heads=heads,
        kv_heads=kv_heads, vocabulary=draw(st.integers(1000, 100_000)), positions=0, head_dim=64,
        tied=draw(st.booleans()), experts=experts, latent=latent,
    )  # fmt: skip


@given(models(), POWERS, POWERS)
@examples(200)
def test_more_ranks_never_need_more_memory_a_rank_nor_less_than_their_share(model, tensor, pipeline):
    one, found = Spread(tensor, pipeline), model.params_per_gpu(Spread(tensor, pipeline))
    for more in (Spread(2 * tensor, pipeline), Spread(tensor, 2 * pipeline)) if one.num_ranks < 64 else ():
        assert model.params_per_gpu(more) <= found * (1 + 1e-9)
        kv = model.kv_bytes_per_gpu(more.tensor, "bf16", more.pipeline)
        assert kv <= model.kv_bytes_per_gpu(tensor, "bf16", pipeline) * (1 + 1e-9)
    if pipeline == 1:
        assert found >= model.num_params / tensor * (1 - 1e-9)
    assert model.kv_bytes_per_gpu(tensor, "bf16", pipeline) * one.num_ranks >= model.kv_bytes_per_token - 1


@given(models(), POWERS)
@examples(100)
def test_all_ranks_of_a_stage_hold_the_model_and_what_they_copy(model, tensor):
    held = tensor * model.params_per_gpu(Spread(tensor))
    copies = (tensor - 1) * (model.copied_params + model.kv_params)
    assert model.num_params * (1 - 1e-9) <= held <= (model.num_params + copies) * (1 + 1e-9)
    assert model.params_per_gpu(Spread()) == pytest.approx(model.num_params)


@given(models().filter(lambda model: model.experts is not None), POWERS, POWERS, st.integers(1, 512))
@examples(200)
def test_a_step_reads_of_the_experts_between_what_one_token_chooses_and_all(model, tensor, pipeline, batch):
    assert model.experts is not None
    read = []
    for groups in (1 << i for i in range(tensor.bit_length())):
        times = step_times(model, H200, Spread(tensor, pipeline, groups))
        share = times.read_share(batch)
        assert model.experts.top_k / model.experts.num_experts - 1e-9 <= share <= 1
        assert share >= times.read_share(max(1, batch - 1)) - 1e-9, "more tokens choose no fewer experts"
        read.append(times.decode_step_s(batch, 0))
    assert read == sorted(read), "whole experts on a rank: the busiest one reads no less than an even share"


@given(models(), POWERS, POWERS, st.integers(1, 200), st.integers(0, 2_000))
@examples(200)
def test_a_step_through_stages_takes_no_less_than_its_share_and_more_with_more_sequences(
    model, tensor, pipeline, batch, context
):
    kv_tokens = batch * context
    staged, whole = step_times(model, H200, Spread(tensor, pipeline)), step_times(model, H200, Spread(tensor))
    seconds = staged.decode_step_s(batch, kv_tokens)
    assert staged.decode_step_s(batch + 1, kv_tokens + context) >= seconds * (1 - 1e-9)
    assert seconds >= (whole.decode_step_s(batch, kv_tokens) - STEP_OVERHEAD_S) / pipeline
    assert staged.decode_step_s(1, kv_tokens) >= whole.decode_step_s(1, kv_tokens) * (1 - 1e-9), "one passes them all"
    assert 0 <= staged.bubble(batch) <= 1 - 1 / pipeline
    grown = staged.decode_step_s(batch, kv_tokens + batch)
    assert grown == pytest.approx(seconds + staged.growth_s(batch))


def test_one_rank_is_the_roofline_and_sends_nothing():
    for model in NAMED.values():
        assert step_times(model, H200, Spread()) == roofline(model, H200, 1)
        sent = exchange(model, H200, Spread())
        assert (sent.token_s, sent.pass_s) == (0, 0)


def test_sums_and_stages_by_hand():
    """Llama 3.1 70B: 80 layers of two sums, 8,192 hidden values of two bytes."""
    near, hidden = 450e9 * 0.8, 8192 * 2
    two = exchange(LLAMA_3_70B, H200, Spread(2))
    assert two.token_s == pytest.approx(160 * 2 * (1 / 2) * hidden / near)
    assert two.pass_s == pytest.approx(160 * H200.latency_s)
    staged = exchange(LLAMA_3_70B, H200, Spread(1, 4))
    assert staged.token_s == pytest.approx(3 * hidden / near)
    far = exchange(LLAMA_3_70B, H200, Spread(8, 2), node_devices=8)
    assert far.token_s == pytest.approx(160 * 2 * (7 / 8) * hidden / near + hidden / (50e9 * 0.8))
    assert exchange(DEEPSEEK_V3, H200, Spread(8, 1, 8)) == exchange(DEEPSEEK_V3, H200, Spread(8)), "no all-to-all"


def test_bubbles_by_hand():
    times = step_times(LLAMA_3_70B, H200, Spread(1, 4))
    assert [times.bubble(batch) for batch in (1, 2, 4, 100)] == pytest.approx([3 / 4, 3 / 5, 3 / 7, 3 / 7])
    tokens = 10**6
    works = [StepWork(num_chunk_tokens=tokens, num_chunks=count) for count in (1, 4)]
    prompts = [(times.step_s(work) - times.fixed_s - times.pass_s) / (tokens * times.token_s) for work in works]
    assert prompts == pytest.approx([1.0, 7 / 16]), "prompts of one step follow each other through the stages"


def test_whole_experts_take_the_memory_of_split_ones_where_they_divide():
    even = [MIXTRAL_8X7B.params_per_gpu(Spread(4, 1, groups)) for groups in (1, 2, 4)]
    assert even[0] == even[1] == even[2]
    assert MIXTRAL_8X7B.params_per_gpu(Spread(16, 1, 16)) > MIXTRAL_8X7B.params_per_gpu(Spread(16)), "8 on 16 ranks"


def test_every_degree_is_listed_with_whether_it_fits():
    hardware = Hardware(max_tensor=16, max_pipeline=2)
    found = {str(one.spread): one for one in degree_fits(DEEPSEEK_V3, LOAD, H200, hardware)}
    assert not found["tp=8"].fits
    assert found["tp=16"].fits
    assert found["tp=8 pp=2"].fits
    assert found["tp=16 ep=16"].experts_read > found["tp=16"].experts_read > DEEPSEEK_V3.experts.top_k / 256
    assert len(found) == sum(tensor.bit_length() for tensor in (1, 2, 4, 8, 16)) * 2
    for one in found.values():
        assert one.fits == (one.kv_tokens >= LOAD.context)
        assert one.exchange_s <= one.step_s
    dense = degree_fits(LLAMA_3_70B, LOAD, H200, hardware)
    assert {one.spread.expert for one in dense} == {1}
    assert math.isclose(sum(one.experts_read for one in dense), 0)


def test_stages_hold_what_ranks_of_a_layer_alone_do_not():
    short = Hardware(GPUS["H100"], GPUS["H100"], "H100", "H100")
    load = replace(LOAD, ttft_s=20.0, tpot_s=1.0, rate=0.1, concurrency=4)
    with pytest.raises(ConfigError, match="812 GB of bf16 weights do not fit 8 × H100"):
        fit(NAMED_MODELS["405b"], load, short)
    found = fit(NAMED_MODELS["405b"], load, replace(short, max_pipeline=2))
    assert (found.decode.spread, found.decode.gpus_each) == (Spread(8, 2), 16)
    held = room(NAMED_MODELS["405b"], GPUS["H100"], Spread(8, 2), short)
    assert held.weight_bytes + load.context * held.kv_bytes_per_token <= GPUS["H100"].memory_bytes * short.memory_share


@pytest.mark.parametrize(
    ("text", "field", "says"),
    [
        ("tp=0", "tp", "from 1 to 64, got 0"),
        ("tp=4,ep=3", "ep", "ep is 3, which does not divide tp, 4"),
        ("tp=16,pp=8", "pp", "tp 16 times pp 8 is 128 ranks"),
        ("dp=2", "degrees", "tp=4,pp=2,ep=4"),
        ("tp=2,tp=4", "degrees", "tp=4,pp=2,ep=4"),
        ("tp", "degrees", "tp=4,pp=2,ep=4"),
    ],
)
def test_degrees_that_cannot_be_are_refused_with_both_numbers(text, field, says):
    with pytest.raises(ConfigError, match=says) as refused:
        Spread.parse(text, "degrees")
    assert refused.value.field == field


def test_degrees_are_read_as_they_are_written():
    assert Spread.parse("tp=4, ep=2,pp=3", "degrees") == Spread(4, 3, 2)
    assert str(Spread(4, 3, 2)) == "tp=4 pp=3 ep=2"


def test_a_device_in_numbers():
    found = gpu_of("memory=24G,bandwidth=60G,flops=0.9T", "gpu")
    assert (found.memory_bytes, found.bandwidth, found.flops) == (24e9, 60e9, 0.9e12)
    for text, says in (
        ("memory=24G", "bandwidth, flops missing"),
        ("memory=24G,memory=1G", "once each"),
        ("memory=x", "above 0"),
        ("memory=-1", "above 0"),
        ("memory=nan", "above 0"),
        ("speed=1", "'speed' is not one of"),
    ):
        with pytest.raises(ConfigError, match=says) as refused:
            gpu_of(text, "gpu")
        assert refused.value.field == "gpu"
