"""`dtype: auto` on a CPU follows measured times, and every worker of a machine the same ones."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from shared.errors import ConfigError
from shared.kernels.backends import dtype_timing
from shared.kernels.backends.dtype_timing import Comparison, ProductTimes, faster_dtype, kept
from shared.kernels.backends.registry import choose_kernels

UNIT = ProductTimes(prompt_s=1.0, decode_s=1.0)


def compared(prompt: float, decode: float) -> Comparison:
    """bf16 takes `prompt` and `decode` of fp32's time."""
    return Comparison(bf16=ProductTimes(0.02 * prompt, 0.003 * decode), fp32=ProductTimes(0.02, 0.003))


@pytest.mark.parametrize(
    ("prompt", "decode", "dtype"),
    [
        (0.1, 0.4, torch.bfloat16),  # instructions for it
        (0.9, 0.3, torch.bfloat16),  # none, but weights of half the bytes
        (1.0, 1.0, torch.bfloat16),
        (2.0, 0.5, torch.bfloat16),
        (2.0, 0.6, torch.float32),
        (3.4, 1.1, torch.float32),  # emulated by torch
        (1.0, 1.3, torch.float32),
    ],
)
def test_bf16_is_taken_unless_prompts_and_tokens_together_are_slower(prompt, decode, dtype):
    assert compared(prompt, decode).faster == dtype


def test_times_are_measured_once_for_each_kind_of_kernels(tmp_path: Path) -> None:
    measured = []

    def measure(comparison: Comparison) -> Comparison:
        measured.append(comparison)
        return comparison

    for _ in range(2):
        assert kept(tmp_path, "cpu:avx2", lambda: measure(compared(1, 0.5))) == compared(1, 0.5)
        assert kept(tmp_path, "torch", lambda: measure(compared(4, 1))) == compared(4, 1)
    assert measured == [compared(1, 0.5), compared(4, 1)]


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"bf16": {"prompt_s": 1}}', Comparison(UNIT, ProductTimes(0.0, 1.0)).text, "null"],
)
def test_a_file_that_says_nothing_is_measured_and_written_anew(tmp_path: Path, content: str) -> None:
    kept(tmp_path, "torch", lambda: compared(4, 1))
    (path,) = tmp_path.glob("dtype-*.json")
    path.write_text(content)
    assert kept(tmp_path, "torch", lambda: compared(2, 3)) == compared(2, 3)
    assert Comparison.parse(path.read_text()) == compared(2, 3)


def test_a_machine_without_a_place_to_keep_them_measures_each_time(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("")
    assert kept(occupied, "torch", lambda: compared(4, 1)) == compared(4, 1)
    assert kept(occupied, "torch", lambda: compared(1, 4)) == compared(1, 4)


@pytest.mark.parametrize("wanted", ["auto", "torch"])
def test_the_choice_is_that_of_the_times_of_the_kernels_that_serve(tmp_path, monkeypatch, caplog, wanted):
    threads = torch.get_num_threads()
    with caplog.at_level(logging.INFO):
        chosen = faster_dtype(wanted, tmp_path)
    assert torch.get_num_threads() == threads
    (path,) = tmp_path.glob("dtype-*.json")
    times = Comparison.parse(path.read_text())
    assert times.faster == chosen
    kernels = choose_kernels("cpu", torch.float32, wanted).name
    assert f"dtype auto: {str(chosen).removeprefix('torch.')} with kernels {kernels}, where" in caplog.text
    monkeypatch.setattr(dtype_timing, "time_products", None)
    assert faster_dtype(wanted, tmp_path) == chosen


def test_kernels_that_refuse_bf16_leave_fp32(monkeypatch, tmp_path, caplog):
    real = choose_kernels

    def refusing(device, dtype, wanted="auto"):
        if dtype == torch.bfloat16:
            raise ConfigError("these kernels know no bf16", field="kernels")
        return real(device, dtype, wanted)

    monkeypatch.setattr(dtype_timing, "choose_kernels", refusing)
    with caplog.at_level(logging.INFO):
        assert faster_dtype("torch", tmp_path) == torch.float32
    assert "since these kernels know no bf16" in caplog.text
