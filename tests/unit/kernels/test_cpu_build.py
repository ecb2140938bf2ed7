"""Which instruction set the C++ kernels run with, how they are compiled, and what is said where they cannot be had."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch

from shared.errors import ConfigError
from shared.kernels.backends.registry import choose_kernels
from shared.kernels.cpu import build, isa, self_check
from shared.kernels.cpu.isa import AVX2, AVX512_BF16, BUILT
from shared.kernels.cpu.multilinear import fastest_sum

from .isas import ISAS, every_isa, needs_library

LOWEST = BUILT[-1] if BUILT else AVX2
"""What every machine here runs that has kernels at all."""
on_x86 = pytest.mark.skipif(LOWEST is not AVX2, reason="other kinds of processors have one instruction set here")


def pretend(monkeypatch: pytest.MonkeyPatch, *features: str) -> None:
    monkeypatch.setattr(isa, "processor_features", lambda: frozenset(features))


class NoCompiler:
    @staticmethod
    def which(_name: str) -> None:
        return None


def assert_left_to_torch(caplog: pytest.LogCaptureFixture, reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        choose_kernels("cpu", torch.float32, "cpu")
    with caplog.at_level(logging.WARNING):
        assert choose_kernels("cpu", torch.float32).name == "torch"
    assert "'cpu' passed over" in caplog.text


@on_x86
def test_a_processor_without_vectors_is_left_to_torch(monkeypatch, caplog):
    pretend(monkeypatch, "sse2")
    assert_left_to_torch(caplog, "the processor lacks avx2, fma")


def test_another_architecture_is_left_to_torch_before_any_compiler_is_asked(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(build.platform, "machine", lambda: "riscv64")
    monkeypatch.setattr(isa, "BUILT", ())
    monkeypatch.setattr(build, "_run", lambda *_: pytest.fail("a compiler was run"))
    pretend(monkeypatch)
    assert_left_to_torch(caplog, "they are written for x86-64 and aarch64, not for riscv64")
    with pytest.raises(ConfigError, match="not for riscv64"):
        choose_kernels("cpu", torch.float32, "cpu:avx2")
    with pytest.raises(build.CannotBuild, match="not for riscv64"):
        build.prebuild(tmp_path / "prebuilt")
    assert fastest_sum() is None


def test_a_machine_without_compiler_is_left_to_torch(monkeypatch, caplog, tmp_path):
    pretend(monkeypatch, *LOWEST.needs)
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    monkeypatch.setattr(build, "shutil", NoCompiler)
    assert_left_to_torch(caplog, "g++ is not installed")


@needs_library
@every_isa
def test_an_instruction_set_can_be_named(isa):
    assert choose_kernels("cpu", torch.float32, f"cpu:{isa}").name == f"cpu:{isa}"


@on_x86
def test_one_that_the_processor_lacks_is_refused_by_what_is_missing(monkeypatch):
    pretend(monkeypatch, *AVX512_BF16.needs, "amx_tile", "amx_int8")
    with pytest.raises(ConfigError, match=r"'cpu:amx' cannot serve this worker: the processor lacks amx_bf16$"):
        choose_kernels("cpu", torch.float32, "cpu:amx")
    with pytest.raises(ConfigError, match=r"kernels for amx, avx512-bf16, amx-int8, .*, avx512, avx2, not for 'sse9'"):
        choose_kernels("cpu", torch.float32, "cpu:sse9")


@pytest.mark.slow
@pytest.mark.parametrize("best", BUILT, ids=lambda each: each.name)
def test_auto_takes_the_fastest_that_the_processor_has(monkeypatch, best):
    """AVX512-BF16 among them, where a timing finds it faster; here any library takes that timing's place."""
    pretend(monkeypatch, *best.needs)
    usable = build.library(LOWEST) if LOWEST.name in ISAS else None
    if usable is None:
        pytest.skip("no C++ kernels here")
    monkeypatch.setattr(build, "made", lambda isa: usable)
    monkeypatch.setattr(build, "AUTO_ORDER", BUILT)
    assert build.choose()[0] == best


@needs_library
def test_a_library_is_compiled_once(monkeypatch, tmp_path):
    compiled = []

    def compile_nothing(_compiler, isa, target):
        compiled.append(isa)
        target.write_bytes(real.read_bytes())

    real = build.library(LOWEST)
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr(build, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(build, "_compile", compile_nothing)
    assert build.library(LOWEST) == build.library(LOWEST)
    assert compiled == [LOWEST]


@needs_library
def test_libraries_compiled_ahead_need_no_compiler(monkeypatch, tmp_path):
    real = build.library(LOWEST)
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    monkeypatch.setattr(build, "_compile", lambda compiler, isa, target: target.write_bytes(real.read_bytes()))
    made = build.prebuild(tmp_path)
    assert len(made) == len(set(made)) == 2 * len(BUILT)  # each with its deterministic build
    monkeypatch.setattr(build, "shutil", NoCompiler)
    assert build.library(LOWEST) in made


@needs_library
def test_what_the_compiler_says_is_the_reason(monkeypatch, tmp_path):
    (tmp_path / "broken.cpp").write_text("#error no such thing\n")
    monkeypatch.setattr(build, "SOURCE", tmp_path)
    monkeypatch.setattr(build, "cache_folder", lambda: tmp_path / "cache")
    with pytest.raises(build.CannotBuild, match=r"g\+\+ failed"):
        build.library(LOWEST)
    assert not list((tmp_path / "cache").glob("*.so"))


@pytest.mark.slow
@needs_library
def test_every_instruction_set_compiles():
    """Also those that this processor lacks: nothing is run. What was compiled before from the very same sources, with
    the same compiler and flags, is taken from the cache: a library's name is a digest of all three."""
    assert all(build.made(isa).stat().st_size > 0 for isa in build.prebuilt_sets())


@needs_library
def test_fp16_is_left_to_torch():
    with pytest.raises(ConfigError, match=r"float32 and bfloat16, not in torch.float16"):
        choose_kernels("cpu", torch.float16, "cpu")
    assert choose_kernels("cpu", torch.float16).name == "torch"


@pytest.mark.slow
@needs_library
def test_a_library_that_passes_its_self_check_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = build.choose()[1]
    monkeypatch.setattr(build, "cache_folder", lambda: tmp_path)
    assert build._failed_check(path) is None
    assert [made.name for made in tmp_path.iterdir()] == [f"{path.stem}.checked"]
    monkeypatch.setattr(build.subprocess, "run", None)
    assert build._failed_check(path) is None


@pytest.mark.slow
def test_a_library_that_ends_its_process_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "cache_folder", lambda: tmp_path)
    broken = tmp_path / "kernels-amx-0.so"
    broken.write_bytes(b"no library")
    reason = build._failed_check(broken)
    assert reason is not None
    assert "self-check failed" in reason
    assert list(tmp_path.glob("*.checked")) == []


@needs_library
def test_the_self_check_names_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "TOLERANCE", 0.0)
    monkeypatch.setattr(self_check.sys, "argv", ["self_check", str(build.choose()[1])])
    with pytest.raises(SystemExit, match=r"a product of 1 rows is off by"):
        self_check.main()
