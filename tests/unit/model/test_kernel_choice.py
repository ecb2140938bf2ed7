"""Which kernels a model gets, and which architectures they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared.errors import ConfigError
from shared.kernels.backends import registry
from shared.kernels.backends.registry import Backend
from shared.kernels.torch_backend import TorchKernels
from shared.model.checkpoints import write_random_checkpoint
from shared.model.config.model_config import ModelConfig
from shared.model.decoder import Decoder
from shared.model.kernel_choice import check_kernels, kernels_for

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


def test_a_deterministic_worker_refuses_before_it_reads_the_weights(tmp_path: Path) -> None:
    config_of(tmp_path, "mixtral-window")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError) as caught:
        Decoder.load(tmp_path, torch.float32, "cpu", deterministic=True)
    assert caught.value.field == "deterministic"
