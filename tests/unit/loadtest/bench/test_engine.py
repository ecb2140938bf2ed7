"""The engine's benchmark on a model of two layers: figures come out, and mean what they say."""

from __future__ import annotations

import pytest
import torch

from loadtest.bench.engine import cpu as bench_engine
from loadtest.bench.engine.cpu import Bench, run, step_time
from loadtest.bench.engine.cuda import Step
from loadtest.bench.engine.step_work import active_parameters, prefill_flops
from loadtest.bench.peers.adapter import Settings
from loadtest.bench.peers.ours import Ours
from shared.kernels.backends import cpu as cpu_backend
from shared.model.checkpoints import write_random_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_random_checkpoint(folder, vocab_size=32000, hidden_size=64, head_dim=16, max_position_embeddings=4096)
    return folder


@pytest.fixture(scope="module")
def ours(folder):
    engine = Ours(Settings(folder, folder, 1))
    yield engine
    engine.close()


def test_steps_are_measured_against_limits_of_the_same_run(folder, monkeypatch):
    monkeypatch.setattr(bench_engine, "matmul_rate", lambda repeats: 1e9)
    monkeypatch.setattr(bench_engine, "read_bandwidth", lambda repeats: 1e9)
    bench = Bench(folder, torch.float32, "auto", 512)
    prefill, decode = run(bench, [Step(1, 0, 64), Step(4, 64, 1)], repeats=1)
    assert (prefill.name, decode.name) == ("prefill 64", "decode 4 at 64")
    assert prefill.limit == pytest.approx(64 * 1e9 / prefill_flops(bench.decoder.config, 64))
    kv_bytes = 4 * 64 * 2 * 2 * 2 * 16 * 4  # sequences, tokens, layers, K and V, KV heads, head_dim, bytes
    weight_bytes = bench.decoder.projection_bytes
    num_parameters = active_parameters(bench.decoder.config)
    assert weight_bytes == 4 * num_parameters
    assert decode.limit == pytest.approx(4 * 1e9 / max(weight_bytes + kv_bytes, 8 * num_parameters))
    assert decode.fraction == pytest.approx(decode.value / decode.limit)


def test_our_logits_are_those_of_the_decoder(ours, folder):
    transformers = pytest.importorskip("transformers")
    prompt = list(range(40, 60))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0]
    found = torch.tensor(ours.logits(prompt))
    assert float((found - expected).abs().mean() / expected.std()) < 0.02  # bf16


def test_overhead_is_what_is_left_of_a_step_beside_the_library(ours, monkeypatch):
    if not isinstance(ours.decoder.kernels, cpu_backend.CpuKernels):
        assert step_time(ours, 2, 8, 3) is None
        return
    library = ours.decoder.kernels.library
    found = step_time(ours, 2, 8, 3)
    assert found is not None
    assert found.step_s > 0.0
    assert 0.0 < found.overhead < 1.0
    assert ours.decoder.kernels.library is library
