"""What a worker computes: it tests itself, and is known by it."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.worker.loaded_model import LoadedModel, load_model
from services.worker.machine import self_test as module
from services.worker.machine.self_test import NUM_OUTPUT_TOKENS, self_test
from services.worker.settings import WorkerSettings
from shared.config import load_settings
from shared.engine.runner.runner import Runner, RunnerConfig
from shared.errors import ConfigError, Internal, NumericalFault
from shared.identity import BOTH, DECODE, PREFILL, Roles
from shared.kv.groups import KVGroups
from shared.model.decoder import Decoder
from tests.demo import DEMO
from tests.integration.engine.families import write_family
from tests.unit.kernels.isas import ISAS, SUMS, needs_library
from tests.waiting import DEADLINE_S


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What asks for emulated kernels (`isas.py`) is no setting, and settings refuse what they do not know."""
    monkeypatch.delenv("TANDEM_TEST_EMULATED", raising=False)


def loaded(*flags: str, roles: Roles = BOTH) -> LoadedModel:
    always = ("--name", "w", "--model", str(DEMO), "--dtype", "bf16", "--num-kv-blocks", "16")
    return load_model(load_settings(WorkerSettings, [*always, *flags]), lambda *_: None, roles=roles)


@needs_library
def test_blocks_of_another_arithmetic_are_those_of_another_model() -> None:
    plain, deterministic, again = loaded(), loaded("--deterministic", "True"), loaded("--deterministic", "True")
    assert deterministic.fingerprint == again.fingerprint
    assert deterministic.fingerprint.startswith(f"{plain.fingerprint}-deterministic-")
    assert deterministic.roots.of("", 9) != plain.roots.of("", 9)


@pytest.mark.parametrize(
    ("flags", "roles", "why"),
    [
        (("--kv-dtype", "int8", "--prefill-kv-dtype", "bf16"), BOTH, "bf16 beside kv_dtype int8 needs two pools"),
        (("--kv-dtype", "int8", "--prefill-kv-dtype", "fp32"), PREFILL, "kv_dtype fp32 is not supported beside"),
    ],
)
def test_a_pair_of_kv_formats_that_this_worker_cannot_serve_is_refused(flags, roles, why) -> None:
    with pytest.raises(ConfigError, match=why):
        loaded(*flags, roles=roles)
    with pytest.raises(ConfigError, match=r"prefill_kv_dtype.*with deterministic"):
        loaded("--kv-dtype", "int8", "--prefill-kv-dtype", "bf16", "--deterministic", "True")


def test_each_side_of_a_pair_has_its_own_format_and_names() -> None:
    flags = ("--kv-dtype", "int8", "--prefill-kv-dtype", "bf16")
    prefill, decode = loaded(*flags, roles=PREFILL), loaded(*flags, roles=DECODE)
    alone = loaded("--kv-dtype", "int8")
    assert [model.layout.name for model in (prefill, decode, alone)] == ["bfloat16", "int8<bfloat16", "int8"]
    assert prefill.layout.handed_off == decode.layout
    assert prefill.fingerprint == decode.fingerprint == alone.fingerprint
    assert decode.roots.of("", 9) != alone.roots.of("", 9)
    assert prefill.roots.of("", 9) == loaded().roots.of("", 9)


@needs_library
@pytest.mark.slow
def test_processors_that_compute_alike_have_one_identity() -> None:
    found = {isa: loaded("--deterministic", "True", "--kernels", f"cpu:{isa}").fingerprint for isa in ISAS}
    for isa, other in combinations(found, 2):
        alike = SUMS[isa] == SUMS[other]
        if not alike or SUMS[isa] == "fma":
            assert (found[isa] == found[other]) == alike, f"{isa} beside {other}"


@needs_library
@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "int4", "w8a8"])
def test_codes_have_one_digest_on_all_processors(quantization: str) -> None:
    """With AVX2, AVX-512, VNNI and AMX, as far as they are here, and with `TANDEM_TEST_EMULATED=1` AMX in plain C++."""
    flags = ("--deterministic", "True", "--quantization", quantization)
    alike = [isa for isa in ISAS if SUMS[isa] == "fma"]
    found = {isa: loaded(*flags, "--kernels", f"cpu:{isa}").fingerprint for isa in alike}
    assert len(set(found.values())) == 1, found


@needs_library
def test_deterministic_mode_beside_states_stops_the_start(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "model", "qwen3.5")
    with pytest.raises(ConfigError, match="Qwen3_5ForCausalLM") as refused:
        loaded("--model", str(folder), "--deterministic", "True")
    assert refused.value.field == "deterministic"


@needs_library
@pytest.mark.parametrize("flags", [("--kernels", "torch"), ("--cpu-isa", "torch"), ("--dtype", "fp16")])
def test_what_has_no_such_mode_stops_the_start(flags: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"deterministic|float16"):  # kernels that are named refuse the dtype first
        loaded("--deterministic", "True", *flags)


ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_family(tmp_path / "model", "LlamaForCausalLM")


def break_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})


def started(folder: Path) -> tuple[Runner, int]:
    decoder = Decoder.load(folder, torch.float32, "cpu")
    runner = Runner(decoder, decoder.config.block_layout(16, "float32"), 2, RunnerConfig(max_num_seqs=1))
    with torch.inference_mode():
        runner.start()
    return runner, decoder.config.vocab_size


def test_a_sound_model_passes(folder: Path) -> None:
    runner, vocab_size = started(folder)
    self_test(runner, KVGroups(16), vocab_size)


def test_a_model_whose_numbers_are_not_finite_does_not(folder: Path) -> None:
    break_weights(folder)
    runner, vocab_size = started(folder)
    with pytest.raises(NumericalFault):
        self_test(runner, KVGroups(16), vocab_size)


def test_answers_that_differ_do_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, vocab_size = started(folder)
    answers = iter(([1] * NUM_OUTPUT_TOKENS, [2] * NUM_OUTPUT_TOKENS))
    monkeypatch.setattr(module, "_answer", lambda *_: next(answers))
    with pytest.raises(Internal, match="two answers"):
        self_test(runner, KVGroups(16), vocab_size)


@pytest.mark.slow
def test_such_a_worker_ends_before_it_is_ready(folder: Path) -> None:
    break_weights(folder)
    command = [sys.executable, "-m", "services.decode", "--name", "d", "--model", str(folder), "--num-kv-blocks", "8"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ}, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 2
    assert '"ready"' not in done.stdout
    assert "NumericalFault" in done.stdout
