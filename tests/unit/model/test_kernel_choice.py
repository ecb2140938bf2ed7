"""Which kernels a model is given, and what arithmetic they have."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
import torch

from shared.errors import ConfigError
from shared.fingerprints import deterministic_fingerprint, difference, headed_fingerprint
from shared.kernels.backends import registry
from shared.kernels.backends.registry import Backend
from shared.kernels.pool_view import dtype_name
from shared.kernels.torch_backend import TorchKernels
from shared.model.arithmetic import arithmetic_digest
from shared.model.checkpoints import write_random_checkpoint
from shared.model.config.model_config import ModelConfig
from shared.model.decoder import Decoder
from shared.model.families.registry import parse_config
from shared.model.gguf.folder import gguf_folder
from shared.model.kernel_choice import check_kernels, kernels_for
from shared.model.weights.plan import AS_STORED, Quantization
from tests.demo import DEMO
from tests.gguf_files import write_model
from tests.unit.kernels.isas import ISAS, SUMS, needs_library

from .test_decoder import FAMILIES


class HeadsAlone(TorchKernels):
    """As Triton's kernels: no attention to latents."""

    name = "heads-alone"
    serves_latents = False


class Deterministic(TorchKernels):
    """As either deterministic backend."""

    is_deterministic = True


@pytest.fixture
def heads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `auto` tries first."""
    entry = Backend(HeadsAlone.name, ("cpu",), lambda _device, _dtype: None, HeadsAlone)
    known = registry.backends()
    monkeypatch.setattr(registry, "backends", lambda: (entry, *known))


def config_of(folder: Path, family: str) -> ModelConfig:
    return write_random_checkpoint(folder, **FAMILIES[family])


@pytest.mark.usefixtures("heads_alone")
def test_latents_are_left_to_torch_where_the_first_kernels_do_not_attend_to_them(tmp_path: Path) -> None:
    latents, heads = config_of(tmp_path / "v2", "deepseek-v2-lite"), config_of(tmp_path / "mixtral", "mixtral-window")
    assert kernels_for(latents, "cpu", torch.float32).name == "torch"
    assert kernels_for(heads, "cpu", torch.float32).name == HeadsAlone.name


@pytest.mark.usefixtures("heads_alone")
def test_kernels_that_were_named_are_refused_where_they_do_not_attend_to_latents(tmp_path: Path) -> None:
    config = config_of(tmp_path, "deepseek-v3")
    with pytest.raises(ConfigError, match="do not attend to latents") as caught:
        kernels_for(config, "cpu", torch.float32, HeadsAlone.name)
    assert caught.value.field == "kernels"


@pytest.mark.parametrize("family", ["mixtral-window", "qwen3-moe-every-other", "deepseek-v2-lite", "deepseek-v3"])
def test_deterministic_refuses_experts_and_latents(tmp_path: Path, family: str) -> None:
    with pytest.raises(ConfigError, match="deterministic does not serve") as caught:
        check_kernels(config_of(tmp_path, family), Deterministic())
    assert caught.value.field == "deterministic"


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("architecture", ["Olmo2ForCausalLM", "GraniteForCausalLM"])
def test_deterministic_takes_layers_that_are_one_call_alone(architecture: str) -> None:
    config = parse_config({**SMALL, "architectures": [architecture], "residual_multiplier": 0.5})
    with pytest.raises(ConfigError, match=f"deterministic does not serve {architecture}"):
        check_kernels(config, Deterministic())
    check_kernels(parse_config({**SMALL, "architectures": ["Gemma2ForCausalLM"]}), Deterministic())


def test_a_deterministic_worker_refuses_before_it_reads_the_weights(tmp_path: Path) -> None:
    config_of(tmp_path, "mixtral-window")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError) as caught:
        Decoder.load(tmp_path, torch.float32, "cpu", deterministic=True)
    assert caught.value.field == "deterministic"


def digest(
    dtype: torch.dtype,
    kernels: str = "auto",
    *,
    deterministic: bool = True,
    quantization: Quantization = AS_STORED,
    folder: Path = DEMO,
) -> str:
    decoder = Decoder.load(
        folder, dtype, "cpu", kernels=kernels, deterministic=deterministic, quantization=quantization
    )
    return arithmetic_digest(decoder, decoder.config.block_layout(16, dtype_name(dtype)))


@pytest.mark.slow
@needs_library
def test_instruction_sets_with_the_same_sums_have_the_same_digest() -> None:
    found = {isa: digest(torch.bfloat16, f"cpu:{isa}") for isa in ISAS}
    for isa, other in combinations(found, 2):
        alike = SUMS[isa] == SUMS[other]
        if not alike or SUMS[isa] == "fma":
            assert (found[isa] == found[other]) == alike, f"{isa} beside {other}"


@needs_library
@pytest.mark.skipif("avx2" not in ISAS, reason="needs two instruction sets")
def test_weights_in_codes_have_the_digest_of_the_least_processor() -> None:
    assert digest(torch.bfloat16, quantization="w8a8") == digest(torch.bfloat16, "cpu:avx2", quantization="w8a8")


@needs_library
@pytest.mark.skipif("avx2" not in ISAS, reason="needs two instruction sets")
def test_a_gguf_file_partly_in_codes_has_the_digest_of_the_least_processor(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "source", hidden_size=64, intermediate_size=64, num_heads=2, head_dim=32)
    write_model(tmp_path / "source", ("Q8_0", "F32"), tmp_path / "small.gguf", tmp_path / "opened")
    (tmp_path / "tokenizer.json").write_text("{}")
    folder = gguf_folder(tmp_path / "small.gguf", tmp_path / "cache")
    assert digest(torch.bfloat16, folder=folder) == digest(torch.bfloat16, "cpu:avx2", folder=folder)


@pytest.mark.slow
@needs_library
@pytest.mark.parametrize("quantization", ["w8a8", "int8", "int4"])
def test_weights_in_codes_have_one_digest_on_all_processors(quantization) -> None:
    isas = [isa for isa in ISAS if SUMS[isa] == "fma"]
    found = {isa: digest(torch.bfloat16, f"cpu:{isa}", quantization=quantization) for isa in isas}
    assert len(set(found.values())) == 1, found


@needs_library
@pytest.mark.parametrize(("quantization", "words"), [("fp8", "in fp8"), ("int8", "here is one of int8")])
def test_deterministic_refuses_codes_that_torch_would_open(tmp_path: Path, quantization, words) -> None:
    write_random_checkpoint(
        tmp_path, hidden_size=64, intermediate_size=64 if quantization == "fp8" else 40, num_heads=2, head_dim=32
    )
    with pytest.raises(ConfigError, match=words) as caught:
        Decoder.load(tmp_path, torch.bfloat16, "cpu", deterministic=True, quantization=quantization)
    assert caught.value.field == "deterministic"


@needs_library
def test_kernels_without_the_mode_are_found_out() -> None:
    with pytest.raises(ConfigError, match=r"kernels cpu:\S+ compute a prompt differently whole and in parts") as caught:
        digest(torch.float32, deterministic=False)
    assert caught.value.field == "deterministic"


def test_what_differs_is_said() -> None:
    ours, theirs = (deterministic_fingerprint("m", arithmetic) for arithmetic in ("1a", "2b"))
    assert difference(ours, theirs).startswith("computes model m in other bits (1a) than the fleet (2b)")
    assert difference("m", theirs) == "runs without deterministic, the fleet with it"
    assert difference(ours, "m") == "runs with deterministic, the fleet without it"
    assert difference("n", theirs) == f"serves model n, the fleet {theirs}"
    assert difference("n", "m") == "serves model n, the fleet m"
    own, apart, other = headed_fingerprint("m"), headed_fingerprint("m", "e1"), headed_fingerprint("m", "e2")
    assert difference(apart, "m") == "runs with speculation heads, the fleet without it"
    assert difference("m", own) == "runs without speculation heads, the fleet with it"
    assert difference(apart, own) == "guesses by head e1, the fleet by that of its model"
    assert difference(apart, other) == "guesses by head e1, the fleet by e2"
