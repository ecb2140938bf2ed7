"""What a worker's dtypes, device and kernels may be, and what follows from its role."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from services.worker.engine_parts import open_speculator
from services.worker.group.start import check_group
from services.worker.host import _gpu_binding
from services.worker.machine import choices
from services.worker.machine.choices import (
    DTYPES,
    check_device,
    choose_backend,
    choose_dtype,
    choose_kv_dtype,
    choose_swap_bytes,
)
from services.worker.settings import WorkerSettings
from shared.config import load_settings
from shared.errors import ConfigError
from shared.identity import BOTH, DECODE, PREFILL, Roles
from shared.model.families.registry import load_config
from shared.structure.compiler import StructureCompiler
from tests.integration.engine.families import write_family


@pytest.mark.parametrize(
    ("published", "device", "dtype"),
    [
        ("bfloat16", "cpu", torch.bfloat16),
        ("float16", "cpu", torch.float32),
        ("float32", "cpu", torch.float32),
        ("bfloat16", "cuda", torch.bfloat16),
        ("float16", "cuda:1", torch.float16),
        ("float32", "cuda", torch.float32),
    ],
)
def test_auto_is_the_published_dtype_or_on_a_cpu_the_faster_one(monkeypatch, published, device, dtype) -> None:
    asked = []

    def fastest(backend: str) -> torch.dtype:
        asked.append(backend)
        return torch.bfloat16

    monkeypatch.setattr(choices, "faster_dtype", fastest)
    config = replace(load_config(Path("models/demo")), dtype=published)
    assert choose_dtype("auto", config, device, "cpu:avx2") == dtype
    assert asked == (["cpu:avx2"] if (published, device) == ("bfloat16", "cpu") else [])
    assert choose_dtype("fp32", config, device) == torch.float32


@pytest.mark.parametrize("compute", DTYPES.values())
def test_the_kv_is_kept_as_it_is_computed_unless_said(compute: torch.dtype) -> None:
    assert choose_kv_dtype("auto", compute) == compute


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_codes_go_with_fp32_and_with_bf16_but_not_for_latents(compute: torch.dtype) -> None:
    assert choose_kv_dtype("int8", compute) == torch.int8
    assert choose_kv_dtype("fp8", compute) == torch.float8_e4m3fn
    for wanted in ("int8", "fp8"):
        refusal = f"kv_dtype {wanted} is not supported .* of a model with latent attention, only auto or [fp32, ]*bf16$"
        with pytest.raises(ConfigError, match=refusal) as caught:
            choose_kv_dtype(wanted, compute, has_latents=True)
        assert caught.value.field == "kv_dtype"
    assert choose_kv_dtype("bf16", compute, has_latents=True) == torch.bfloat16


def test_bf16_kv_goes_with_fp32_and_with_bf16() -> None:
    assert choose_kv_dtype("bf16", torch.float32) == torch.bfloat16
    assert choose_kv_dtype("bf16", torch.bfloat16) == torch.bfloat16


@pytest.mark.parametrize(
    ("wanted", "compute"), [("fp32", "bf16"), *((wanted, "fp16") for wanted in ("fp32", "bf16", "int8", "fp8"))]
)
def test_a_pair_that_no_kernel_serves_is_refused_by_name(wanted: str, compute: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_dtype {wanted} is not supported .* only auto or {compute}") as caught:
        choose_kv_dtype(wanted, DTYPES[compute])
    assert caught.value.field == "kv_dtype"


def settings(*flags: str) -> WorkerSettings:
    return load_settings(WorkerSettings, ["--name", "w", "--model", "m", *flags])


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0", "cuda:11", "cuda:0,1"])
def test_a_device_is_the_cpu_or_a_gpu(device: str) -> None:
    assert settings("--device", device).device == device


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device", "gpu"),
        ("device", "cuda:0,"),
        ("collectives", "mpi"),
        ("collectives", "nccl"),  # on the CPU
        ("group_pool", "half"),
        ("device", "cuda:-1"),
        ("gpu_memory", "0"),
        ("gpu_memory", "1.5"),
        ("piecewise_tokens", "256"),  # on the CPU
        ("gpu_direct", "true"),  # likewise
        ("piecewise_tokens", "8193"),
        ("piecewise_tokens", "-2"),
        ("max_num_batched_tokens", "8"),
        ("max_num_batched_tokens", "-1"),
        ("host_swap_bytes", "-2"),
    ],
)
def test_a_wrong_setting_is_named(field: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(f"--{field.replace('_', '-')}", value)
    assert caught.value.field == field


def test_blocks_leave_a_gpu_directly_unless_the_host_encrypts_them_or_ranks_share_them() -> None:
    key = ("--fleet-key", 16 * "k")
    encrypted = (*key, "--block-encryption", "aes-gcm")
    for flags in (("--device", "cuda"), ("--device", "cuda", *key), ("--device", "cuda", "--gpu-direct", "true", *key)):
        assert settings(*flags).sends_from_gpu
    for flags in (
        (), ("--device", "cuda", "--gpu-direct", "false"), ("--device", "cuda", *encrypted),
        ("--device", "cuda", "--tp", "2"),
    ):  # fmt: skip
        assert not settings(*flags).sends_from_gpu
    with pytest.raises(ConfigError, match="block_encryption") as caught:
        settings("--device", "cuda", "--gpu-direct", "true", *encrypted)
    assert caught.value.field == "gpu_direct"


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device is cuda:1, but torch sees no CUDA device"):
        check_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_device("cuda:1")
    with pytest.raises(ConfigError, match="device is cuda:2, but torch sees 2 CUDA devices"):
        check_device("cuda:2")


@pytest.mark.parametrize(
    ("flags", "devices"),
    [
        (("--tp", "2"), ("cpu", "cpu")),
        (("--device", "cuda"), ("cuda",)),
        (("--device", "cuda:3"), ("cuda:3",)),
        (("--device", "cuda", "--tp", "2", "--pp", "2"), ("cuda:0", "cuda:1", "cuda:2", "cuda:3")),
        (("--device", "cuda:4,01", "--pp", "2"), ("cuda:4", "cuda:1")),
    ],
)
def test_each_rank_has_a_device_of_its_own(flags: tuple[str, ...], devices: tuple[str, ...]) -> None:
    assert settings(*flags).devices == devices


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--device", "cuda:0,1"), "names 2 GPUs, and tp 1 times pp 1 takes 1"),
        (("--device", "cuda:0", "--tp", "2"), "names 1 GPUs, and tp 2 times pp 1 takes 2"),
        (("--device", "cuda:0,0", "--tp", "2"), "names 1 GPUs, and tp 2 times pp 1 takes 2"),
        (("--device", "cuda:0,1,2", "--tp", "2", "--pp", "2"), "names 3 GPUs, and tp 2 times pp 2 takes 4"),
    ],
)
def test_gpus_that_are_not_as_many_as_ranks_are_refused_with_both_numbers(flags: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        assert settings(*flags).devices
    assert caught.value.field == "device"


def test_a_group_needs_as_many_gpus_as_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    given = settings("--model", "models/demo", "--device", "cuda", "--tp", "2", "--collectives", "gloo")
    with pytest.raises(ConfigError, match="tp 2 times pp 1 takes 2 GPUs, torch sees 1") as caught:
        check_group(given)
    assert (caught.value.field, caught.value.details["limit"]) == ("tp", 1)


def test_stages_with_pools_of_their_own_do_not_split_states(tmp_path: Path) -> None:
    given = settings("--model", str(write_family(tmp_path / "model", "qwen3.5")), "--pp", "2", "--group-pool", "own")
    with pytest.raises(ConfigError, match="do not split the states of Qwen3_5ForCausalLM by layers") as caught:
        check_group(given)
    assert caught.value.details == {"field": "pp", "value": 2, "limit": 1}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--collectives", "nccl"), "cannot be nccl with device cpu"),
        (("--device", "cuda:0,1", "--collectives", "shm"), "cannot be shm with device cuda:0,1"),
        (("--device", "cuda", "--tp", "2", "--group-pool", "shared"), "each GPU has its own memory"),
        (("--device", "cuda", "--gpu-direct", "true", "--tp", "2"), "cannot be above 1 with gpu_direct True"),
        (("--device", "cuda", "--piecewise-tokens", "64", "--pp", "2"), "cannot be above 1 with piecewise_tokens 64"),
    ],
)
def test_what_a_group_cannot_have_is_refused_by_name(flags: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings(*flags)


@pytest.mark.parametrize("value", ["-1", "0"])
def test_steps_in_pieces_by_default_leave_groups_and_cpus_as_they_are(value: str) -> None:
    assert settings().piecewise_tokens == -1
    assert settings("--piecewise-tokens", value, "--device", "cuda", "--tp", "2").degrees.tensor == 2
    assert settings("--piecewise-tokens", value).piecewise_tokens == int(value)


def test_a_group_shares_memory_on_a_cpu_and_has_pools_of_its_own_on_gpus() -> None:
    on_cpu, on_gpu = settings("--tp", "2"), settings("--tp", "2", "--device", "cuda")
    assert (on_cpu.backend, on_cpu.has_own_pools) == ("shm", False)
    assert (on_gpu.backend, on_gpu.has_own_pools) == ("nccl", True)
    assert settings("--group-pool", "own").has_own_pools


def test_prompts_on_a_gpu_are_cut_into_larger_chunks_where_no_answers_run() -> None:
    def chunk(roles: Roles, *flags: str) -> int:
        return settings(*flags).for_roles(roles).max_num_batched_tokens

    assert chunk(PREFILL, "--device", "cuda:1") == 2048
    assert chunk(PREFILL) == chunk(DECODE) == chunk(DECODE, "--device", "cuda") == 512
    assert chunk(BOTH, "--device", "cuda") == 512
    assert chunk(PREFILL, "--device", "cuda", "--max-num-batched-tokens", "640") == 640


def test_a_gpu_decodes_more_sequences_at_once() -> None:
    for flags, expected in (((), 64), (("--device", "cuda"), 256), (("--device", "cuda", "--max-num-seqs", "9"), 9)):
        assert settings(*flags).for_roles(DECODE).max_num_seqs == expected


def test_a_step_has_a_token_for_each_sequence() -> None:
    def both(*flags: str) -> tuple[int, int]:
        filled = settings(*flags).for_roles(DECODE)
        return filled.max_num_seqs, filled.max_num_batched_tokens

    assert both("--max-num-seqs", "1024") == (1024, 1024)
    assert both("--max-num-batched-tokens", "16") == (16, 16)
    assert both("--max-num-seqs", "16", "--max-num-batched-tokens", "16") == (16, 16)
    with pytest.raises(ConfigError) as caught:
        both("--max-num-seqs", "17", "--max-num-batched-tokens", "16")
    assert caught.value.field == "max_num_batched_tokens"
    assert "at least max_num_seqs, 17" in caught.value.message


@pytest.mark.parametrize(
    ("flags", "backend"),
    [
        ((), "auto"),
        (("--kernels", "cpu"), "cpu"),
        (("--cpu-isa", "avx2"), "cpu:avx2"),
        (("--cpu-isa", "avx512", "--kernels", "cpu"), "cpu:avx512"),
        (("--cpu-isa", "torch"), "torch"),
        (("--cpu-isa", "avx2", "--kernels", "torch"), "torch"),
        (("--cpu-isa", "avx2", "--device", "cuda"), "auto"),
    ],
)
def test_the_instruction_set_names_the_backend(monkeypatch: pytest.MonkeyPatch, flags, backend) -> None:
    for name in ("CPU_ISA", "TANDEM_CPU_ISA", "TANDEM_WORKER_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    assert choose_backend(settings(*flags)) == backend


def test_the_environment_names_the_instruction_set_and_a_flag_overrides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CPU_ISA", "avx2")
    assert settings().cpu_isa == "avx2"
    assert settings("--cpu-isa", "auto").cpu_isa == "auto"
    monkeypatch.setenv("TANDEM_CPU_ISA", "mmx")
    with pytest.raises(ConfigError, match=r"cpu_isa.*'mmx'"):
        settings()


GIB = 1 << 30


@pytest.mark.parametrize(
    ("flags", "pool_bytes", "free_bytes", "expected"),
    [
        ((), 4 * GIB, 64 * GIB, 256 << 20),
        (("--device", "cuda"), 40 * GIB, 1000 * GIB, 8 * GIB),
        (("--device", "cuda"), 40 * GIB, 32 * GIB, 4 * GIB),
        (("--device", "cuda"), 2 * GIB, 32 * GIB, 2 * GIB),
        (("--device", "cuda", "--host-swap-bytes", "0"), 2 * GIB, 32 * GIB, 0),
        (("--host-swap-bytes", "4096"), 2 * GIB, 32 * GIB, 4096),
    ],
)
def test_preempted_sequences_get_host_memory_by_the_pool_and_by_what_is_free(
    flags: tuple[str, ...], pool_bytes: int, free_bytes: int, expected: int
) -> None:
    assert choose_swap_bytes(settings(*flags), pool_bytes, free_bytes) == expected


@pytest.mark.parametrize(
    ("flags", "methods"),
    [
        ([], None),
        (["--speculation", "off"], None),
        (["--speculation", "ngram"], {"ngram"}),
        (["--speculation", "auto"], {"ngram", "grammar"}),
        (["--speculation", "ngram", "--device", "cuda"], {"ngram"}),
        (["--speculation", "auto", "--device", "cuda:1"], {"ngram", "grammar"}),
        (["--speculation", "auto", "--draft", "small", "--device", "cuda"], {"ngram", "grammar"}),
        (["--speculation", "heads", "--device", "cuda"], set()),
        (["--speculation", "auto", "--device", "timed:steps.json"], None),
    ],
)
def test_what_guesses_is_what_the_settings_say_as_far_as_the_device_can(flags, methods) -> None:
    structures = StructureCompiler(lambda: None, [1])
    speculator = open_speculator(settings(*flags), SimpleNamespace(), structures)
    assert (speculator and speculator.methods) == methods


@pytest.mark.parametrize(
    ("flags", "roles", "is_loaded"),
    [
        ((), DECODE, True),
        ((), BOTH, True),
        ((), PREFILL, False),
        (("--device", "cuda"), DECODE, True),
        (("--device", "timed:steps.json"), DECODE, False),
    ],
)
def test_a_draft_model_is_loaded_where_something_may_ask_it(
    flags: tuple[str, ...], roles: Roles, is_loaded: bool
) -> None:
    found = settings("--speculation", "auto", "--draft", "models/demo-draft", *flags).for_roles(roles)
    assert found.draft == ("models/demo-draft" if is_loaded else "")


@pytest.mark.parametrize("speculation", ["off", "ngram"])
def test_a_draft_model_that_nothing_asks_is_refused(speculation: str) -> None:
    with pytest.raises(ConfigError, match=f"needs speculation auto or heads, which is {speculation}") as refused:
        settings("--speculation", speculation, "--draft", "models/demo-draft")
    assert refused.value.field == "draft"


def test_a_thread_that_moves_a_gpus_blocks_is_bound_to_that_gpu() -> None:
    for device, number in (("cuda", 0), ("cuda:0", 0), ("cuda:3", 3)):
        bind = _gpu_binding(settings("--device", device), DECODE)
        assert isinstance(bind, partial)
        assert (bind.func, bind.args) == (torch.cuda.set_device, (number,))
    assert _gpu_binding(settings(), DECODE) is None
