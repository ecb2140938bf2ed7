"""Every family, storage of weights and of KV, and adapters on a GPU: the tokens of the CPU's reference."""

from __future__ import annotations

import random
from contextlib import closing
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

pytest.importorskip("numpy", reason="the engine's inputs are NumPy arrays")
pytest.importorskip("safetensors", reason="checkpoints are safetensors files")

from shared.engine.runner.runner import RunnerConfig
from shared.kernels.pool_view import dtype_name
from shared.model.adapters.random_adapter import write_random_adapter
from shared.model.checkpoints import write_random_checkpoint
from tests.integration.engine import test_adapters
from tests.integration.engine.engine_run import EngineRun, hand_off
from tests.integration.engine.families import EXPERTS, FAMILIES, OTHERS, STATES, write_family
from tests.quantized_checkpoints import STORAGES, write_mxfp4, write_quantized

PROMPT = [7 + (i * 37) % 190 for i in range(53)]
SHORT = [5 + (i * 11) % 180 for i in range(9)]
NUM_TOKENS = 24
SIZES = {"hidden_size": 128, "intermediate_size": 128, "num_heads": 8, "num_kv_heads": 4}


def tokens_of_the_cpu(folder: Path) -> list[list[int]]:
    with closing(EngineRun(folder, kernels="torch")) as run:
        return run.generate(PROMPT, SHORT, max_tokens=NUM_TOKENS)


def check_the_gpu(folder: Path) -> None:
    """All steps in graphs as a worker has them, decode steps alone, and none."""
    expected = tokens_of_the_cpu(folder)
    graphs = RunnerConfig(max_num_seqs=4, max_seq_len=128)
    for config in (
        replace(graphs, piecewise_tokens=None, max_num_batched_tokens=24),
        graphs,
        replace(graphs, static_decode=False),
    ):
        with closing(EngineRun(folder, device="cuda", config=config)) as run:
            assert run.decoder.kernels.name == "triton"
            assert run.generate(PROMPT, SHORT, max_tokens=NUM_TOKENS) == expected
            assert run.generate(PROMPT, SHORT, max_tokens=NUM_TOKENS) == expected, "behind its own prefix"


@pytest.mark.parametrize("family", [*FAMILIES, *EXPERTS, *OTHERS, *STATES])
def test_a_family_gives_the_tokens_of_the_cpu(tmp_path: Path, family: str) -> None:
    check_the_gpu(write_family(tmp_path / "model", family))


@pytest.mark.parametrize("storage", STORAGES)
def test_weights_in_fewer_bits_give_the_tokens_of_the_cpu(tmp_path: Path, storage: str) -> None:
    source = write_family(tmp_path / "source", "LlamaForCausalLM", **SIZES)
    write_quantized(source, STORAGES[storage], tmp_path / "quantized", tmp_path / "opened")
    check_the_gpu(tmp_path / "quantized")


def test_experts_in_mxfp4_give_the_tokens_of_the_cpu(tmp_path: Path) -> None:
    source = write_family(tmp_path / "source", "gpt-oss", hidden_size=64, intermediate_size=64)
    write_mxfp4(source, tmp_path / "quantized", tmp_path / "opened")
    check_the_gpu(tmp_path / "quantized")


@pytest.mark.parametrize(
    ("family", "kv_dtype"),
    [
        *product(("LlamaForCausalLM", "gemma3"), ("bfloat16", "int8", "float8_e4m3fn")),
        ("deepseek-v3", "bfloat16"),  # latents are not kept as codes
    ],
)
def test_kv_in_fewer_bits_gives_the_same_tokens_by_every_way(tmp_path: Path, family: str, kv_dtype: str) -> None:
    folder = write_family(tmp_path / "model", family)
    with (
        closing(EngineRun(folder, device="cuda", kv_dtype=kv_dtype)) as prefill,
        closing(EngineRun(folder, device="cuda", kv_dtype=kv_dtype)) as decode,
    ):
        expected = decode.generate(PROMPT, max_tokens=NUM_TOKENS)[0]
        assert len(set(expected)) > 2
        decode.pool.clear_cache()
        assert hand_off(prefill, decode, PROMPT, NUM_TOKENS) == expected
        decode.pool.clear_cache()
        assert hand_off(prefill, decode, PROMPT, NUM_TOKENS, corrupt=1) == expected


def test_blocks_pass_between_a_cpu_and_a_gpu(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "model", "gpt-oss")
    expected = tokens_of_the_cpu(folder)[0]
    with closing(EngineRun(folder)) as cpu, closing(EngineRun(folder, device="cuda")) as gpu:
        assert hand_off(cpu, gpu, PROMPT, NUM_TOKENS) == expected
        cpu.pool.clear_cache()
        assert hand_off(gpu, cpu, PROMPT[::-1], NUM_TOKENS) == cpu.generate(PROMPT[::-1], max_tokens=NUM_TOKENS)[0]


def test_adapters_mixed_give_the_tokens_of_the_cpu(tmp_path: Path) -> None:
    base = tmp_path / "base"
    config = write_random_checkpoint(base, "LlamaForCausalLM", num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32)
    folders = [
        base,
        *(
            write_random_adapter(tmp_path / f"adapter{seed}", config, rank=4 + 9 * seed, seed=seed, strength=2.0)
            for seed in range(3)
        ),
    ]
    draw = random.Random(3)
    prompts = [draw.choices(range(3, 97), k=draw.randint(2, 50)) for _ in range(5)]
    slots = [0, 1, 2, 3, 1]
    with test_adapters.started(folders, kernels="torch") as run:
        expected = test_adapters.answers(run, prompts, slots)
    without = RunnerConfig(max_num_seqs=8)
    for graphs in (without, replace(without, adapter_slots=test_adapters.NUM_ADAPTERS, adapter_max_rank=64)):
        with test_adapters.started(folders, device="cuda", config=graphs) as run:
            assert test_adapters.answers(run, prompts, slots) == expected
            run.place(1, folders[2])  # what the graphs read of a slot that is filled anew
            assert test_adapters.answers(run, prompts[1:2], [1]) != expected[1:2]


def test_deterministic_steps_give_the_tokens_of_the_cpu(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "model", "LlamaForCausalLM", **SIZES, head_dim=32)
    expected = tokens_of_the_cpu(folder)
    with closing(EngineRun(folder, device="cuda", deterministic=True)) as run:
        assert run.generate(PROMPT, SHORT, max_tokens=NUM_TOKENS) == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_batch_in_16_bits_gives_the_same_tokens_twice(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = write_family(tmp_path / "model", "Qwen3ForCausalLM")
    kept = dtype_name(dtype)
    with closing(EngineRun(folder, device="cuda", dtype=dtype, kv_dtype=kept)) as run:
        first = run.generate(PROMPT, SHORT, max_tokens=NUM_TOKENS)
        run.pool.clear_cache()
        assert run.generate(PROMPT, SHORT, max_tokens=NUM_TOKENS) == first
