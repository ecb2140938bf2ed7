"""The fit calculator's arithmetic: published figures, inequalities that must hold, refusals with their reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError
from shared.sizing.devices import GPUS, H200
from shared.sizing.fit import fit
from shared.sizing.load import Hardware, Load
from shared.sizing.memory import gpus_by_memory, room
from shared.sizing.queueing import erlang_c, servers_needed, waits_longer
from shared.sizing.roofline import roofline
from shared.sizing.shapes import DEEPSEEK_V3, LLAMA_3_8B, LLAMA_3_70B, MIXTRAL_8X7B, NAMED_MODELS, decoder
from shared.sizing.spread import Spread
from shared.sizing.step_time import StepTimes
from tests.examples import examples

LOAD = Load(context=8000, concurrency=256, prompt_len=4000, output_len=500, ttft_s=1.0, tpot_s=0.04, rate=12.0)


@pytest.mark.parametrize(
    ("context", "sequences", "expected"), [(8000, 32, [2, 11, 37]), (128_000, 256, [215, 1076, 3393])]
)
def test_the_published_table_of_80_gb_gpus_with_kv_for_every_head(context, sequences, expected):
    found = [gpus_by_memory(model, context, sequences, 80e9, mha=True) for model in NAMED_MODELS.values()]
    assert found == expected


def test_kv_of_128k_tokens_with_shared_heads():
    gib = [model.kv_bytes(model.num_kv_heads, "bf16") * 128_000 / (1 << 30) for model in NAMED_MODELS.values()]
    assert [round(one, 1) for one in gib] == [15.6, 39.1, 61.5]


def test_parameters_are_counted_as_published():
    assert [model.num_params for model in NAMED_MODELS.values()] == [8_030_261_248, 70_553_706_496, 405_853_388_800]


def test_parameters_of_experts_are_counted_as_published():
    """Without the biases of DeepSeek's routers, and without its layer that predicts the token after the next."""
    assert MIXTRAL_8X7B.num_params == 46_702_792_704
    assert DEEPSEEK_V3.num_params == 671_026_404_352
    assert round(MIXTRAL_8X7B.active_params / 1e9, 1) == 12.9
    assert round(DEEPSEEK_V3.active_params / 1e9, 1) == 37.6


def test_latents_take_a_fraction_of_the_heads_keys_and_values():
    assert DEEPSEEK_V3.kv_bytes(1, "bf16") == 61 * 576 * 2
    assert DEEPSEEK_V3.kv_bytes(128, "bf16") == 61 * 128 * (192 + 128) * 2
    assert DEEPSEEK_V3.kv_bytes_per_gpu(8, "bf16") == DEEPSEEK_V3.kv_bytes(1, "bf16"), "every GPU has all of them"


def test_a_decode_step_reads_the_experts_that_its_tokens_chose():
    times = roofline(MIXTRAL_8X7B, H200, 4)
    read_s = 2 / (H200.bandwidth * H200.bandwidth_efficiency * 4)  # of a parameter
    alone, many = times.decode_step_s(1, 0), times.decode_step_s(64, 0)
    overhead = times.fixed_s
    assert alone == pytest.approx(overhead + MIXTRAL_8X7B.active_params * read_s)
    assert many == pytest.approx(overhead + MIXTRAL_8X7B.num_params * read_s, rel=1e-6)
    assert times.token_s == pytest.approx(2 * MIXTRAL_8X7B.active_params / (H200.flops * H200.flops_efficiency * 4))


def test_experts_allow_more_sequences_than_a_dense_model_of_the_same_size():
    load = replace(LOAD, ttft_s=2.0)
    sparse, hardware = fit(MIXTRAL_8X7B, load, Hardware()), Hardware()
    dense = fit(replace(MIXTRAL_8X7B, experts=None, expert_params=0.0), load, hardware)
    assert sparse.prefill.gpus <= dense.prefill.gpus
    assert sparse.prefill.ttft_s < dense.prefill.ttft_s or sparse.prefill.gpus < dense.prefill.gpus
    assert sparse.decode.tpot_s <= load.tpot_s


def test_more_gpus_than_kv_heads_hold_the_same_head_several_times():
    eight, sixteen = (LLAMA_3_70B.kv_bytes_per_gpu(tensor, "bf16") for tensor in (8, 16))
    assert eight == sixteen == LLAMA_3_70B.kv_bytes(1, "bf16")


def test_erlang_c_as_tabulated():
    assert erlang_c(1, 0.5) == pytest.approx(0.5)
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert erlang_c(10, 8.0) == pytest.approx(0.409, abs=1e-3)
    assert erlang_c(3, 3.0) == 1.0


@given(st.floats(0.01, 200), st.floats(0.01, 10), st.floats(0, 10), st.floats(0.01, 0.5))
@examples(60)
def test_the_servers_needed_are_enough_and_one_less_is_not(offered, service_s, wait_s, late_share):
    servers = servers_needed(offered, service_s, wait_s, late_share)
    assert servers > offered
    assert waits_longer(servers, offered, service_s, wait_s) <= late_share
    if servers > 1:
        assert waits_longer(servers - 1, offered, service_s, wait_s) > late_share or servers - 1 <= offered


@given(
    st.sampled_from(list(NAMED_MODELS)),
    st.sampled_from(["H100", "H200", "B200", "MI300X"]),
    st.integers(512, 100_000),
    st.integers(1, 2000),
    st.sampled_from(["bf16", "fp8", "int4"]),
    st.sampled_from(["bf16", "fp8"]),
)
@examples(60)
def test_what_is_said_to_fit_does_fit(name, gpu, context, concurrency, weights, kv_dtype):
    load = replace(LOAD, context=context, prompt_len=context // 4, output_len=context // 4, concurrency=concurrency)
    hardware = Hardware(GPUS[gpu], GPUS[gpu], gpu, gpu, weights=weights, kv_dtype=kv_dtype, max_tensor=16)
    try:
        found = fit(NAMED_MODELS[name], load, hardware)
    except ConfigError:
        return
    for pool in (found.decode, found.collocated):
        if pool is None:
            continue
        assert pool.workers * pool.sequences >= concurrency
        used = pool.weight_bytes + pool.sequences * context * pool.kv_bytes_per_token
        assert used <= GPUS[gpu].memory_bytes * hardware.memory_share
        assert pool.tpot_s is not None
        assert pool.tpot_s <= load.tpot_s + 1e-9
    assert found.prefill.ttft_s is not None
    assert found.prefill.ttft_s <= load.ttft_s
    assert found.prefill.busy is not None
    assert found.prefill.busy < 1
    assert found.floor <= found.gpus or found.floor == 1
    assert found.floor <= found.floor_mha


@pytest.mark.parametrize(
    ("model", "changes", "hardware", "field", "says"),
    [
        ("405b", {}, {"max_tensor": 4}, "max_tensor", "812 GB of bf16 weights do not fit 4 × H200"),
        ("70b", {"context": 120_000}, {"max_tensor": 2, "memory_share": 0.55}, "context", "less than --context 120000"),
        ("70b", {"ttft_s": 0.01}, {}, "ttft", "more workers do not help"),
        ("70b", {"tpot_s": 0.001}, {}, "tpot", "more workers do not help"),
        ("8b", {"context": 140_000}, {}, "context", "beyond the model's 131072 positions"),
    ],
)
def test_what_cannot_fit_is_refused_with_the_reason(model, changes, hardware, field, says):
    with pytest.raises(ConfigError, match=says) as refused:
        fit(NAMED_MODELS[model], replace(LOAD, **changes), Hardware(**hardware))
    assert refused.value.field == field


def test_lengths_that_contradict_the_context_are_refused():
    with pytest.raises(ConfigError) as refused:
        replace(LOAD, prompt_len=7900)
    assert refused.value.field == "context"


def test_one_pool_is_said_to_be_better_where_two_waste_a_gpu():
    little = replace(LOAD, concurrency=4, rate=0.2)
    found = fit(LLAMA_3_8B, little, Hardware(prefill_price=2.0, decode_price=2.0))
    assert found.collocated is not None
    assert (found.gpus, found.collocated.gpus, found.collocated_is_better) == (2, 1, True)


def test_cost_is_hours_over_tokens():
    found = fit(LLAMA_3_70B, LOAD, Hardware(prefill_price=3.0, decode_price=2.0))
    assert found.cost is not None
    hourly = 3.0 * found.prefill.gpus + 2.0 * found.decode.gpus
    assert found.cost.per_hour == hourly
    tokens = LOAD.rate * 3600 * (LOAD.prompt_len + LOAD.output_len)
    assert found.cost.per_million_tokens == pytest.approx(hourly / tokens * 1e6)
    assert fit(LLAMA_3_70B, LOAD, Hardware()).cost is None


def test_narrow_weights_leave_more_room_for_kv():
    wide = room(LLAMA_3_70B, H200, Spread(2), Hardware())
    narrow = room(LLAMA_3_70B, H200, Spread(2), Hardware(weights="fp8"))
    assert narrow.kv_tokens > wide.kv_tokens > 0


def test_where_the_overlap_decides_two_pools_are_taken_until_it_is_known():
    load = Load(16_000, 128, 8000, 200, ttft_s=1.0, tpot_s=0.015, rate=32.0)
    hardware = Hardware(GPUS["H100"], GPUS["H100"], "H100", "H100", max_tensor=1)
    found = fit(LLAMA_3_8B, load, hardware)
    assert found.collocated is not None
    assert found.apart is not None
    assert found.apart.collocated is not None
    assert (found.gpus, found.collocated.gpus) == (18, 16)
    assert (found.apart.gpus, found.apart.collocated.gpus) == (19, 28)
    assert (found.is_undecided, found.takes_one_pool) == (True, False)
    known = {overlap: fit(LLAMA_3_8B, load, replace(hardware, overlap=overlap)) for overlap in (0.0, 1.0)}
    assert [known[overlap].takes_one_pool for overlap in (0.0, 1.0)] == [False, True]
    assert all(one.apart is None for one in known.values())


def test_measured_step_times_take_the_place_of_arithmetic_on_one_gpu():
    slow = replace(roofline(LLAMA_3_8B, H200, 1), token_s=1e-4)
    hardware = Hardware(max_tensor=1, measured=slow)
    load = replace(LOAD, prompt_len=2000, rate=1.0, concurrency=8)
    assert fit(LLAMA_3_8B, load, hardware).prefill.ttft_s == slow.prompt_s(2000)
    assert hardware.step_times(LLAMA_3_8B, H200, Spread(2)) == Hardware().step_times(LLAMA_3_8B, H200, Spread(2))


def test_layers_with_windows_keep_their_windows_alone():
    """gpt-oss's turns of 128 tokens: at 8,192 tokens half of the layers keep a 64th."""
    full = decoder(layers=24, hidden=2880, intermediate=2880, heads=64, kv_heads=8, vocabulary=1000, positions=131_072)
    windowed = replace(full, windows=(128,) * 12)
    assert windowed.kv_bytes(8, "bf16") == full.kv_bytes(8, "bf16")
    assert windowed.kv_bytes(8, "bf16", 8192) == full.kv_bytes(8, "bf16") * (12 + 12 / 64) / 24
    assert windowed.kv_bytes(8, "bf16", 100) == full.kv_bytes(8, "bf16")
    alone, stages = Spread(2), Spread(1, 2)
    more = room(windowed, H200, alone, Hardware(), 8192).kv_tokens / room(full, H200, alone, Hardware(), 8192).kv_tokens
    assert 1.96 < more < 1.98
    assert room(windowed, H200, stages, Hardware(), 8192) == room(full, H200, stages, Hardware(), 8192)


def test_steps_that_take_the_same_time_for_any_batch_are_bounded_by_memory():
    flat = StepTimes(fixed_s=0.01, read_s=0, token_s=0, sequence_s=0, kv_s=0, attention_s=0)
    found = fit(LLAMA_3_8B, LOAD, Hardware(measured=flat, max_tensor=1))
    assert found.decode.limits == [f"memory holds {found.decode.kv_tokens // 8000} sequences of 8000 tokens a worker"]


def test_a_rate_beyond_all_workers_is_refused():
    huge = Load(131_072, 32, 130_000, 500, ttft_s=3600.0, tpot_s=0.04, rate=1e6)
    with pytest.raises(ConfigError, match="--rate 1e\\+06 keeps") as refused:
        fit(LLAMA_3_8B, huge, Hardware())
    assert refused.value.field == "rate"
