"""Chooses the kernels for a model: those of the device, unless they lack an op that the architecture needs."""

from __future__ import annotations

import logging

import torch

from shared.errors import ConfigError
from shared.kernels.backend import Kernels
from shared.kernels.backends.registry import AUTO, choose_kernels
from shared.model.config.model_config import ModelConfig
from shared.model.layers.parameters import Specs

_TORCH = "torch"
_log = logging.getLogger(__name__)


def kernels_for(
    config: ModelConfig,
    device: torch.device | str,
    dtype: torch.dtype,
    wanted: str = AUTO,
    *,
    deterministic: bool = False,
    in_codes: bool = False,
) -> Kernels:
    """As `choose_kernels`; where `auto` gives kernels that do not attend to the latents which a model keeps, torch's.

    `in_codes`: whether weights are kept in fewer bits. Then `deterministic` spans processors: integer sums are exact,
    and all else is computed in the way that they have in common.

    Raises:
        ConfigError: as `choose_kernels` and `check_kernels`.
    """
    kernels = choose_kernels(device, dtype, wanted, deterministic=deterministic, alike=in_codes)
    if wanted == AUTO and not deterministic and config.latent is not None and not kernels.serves_latents:
        _log.warning("kernels %r do not attend to latents: torch's ops serve %s", kernels.name, config.architecture)
        kernels = choose_kernels(device, dtype, _TORCH)
    check_kernels(config, kernels)
    return kernels


def check_kernels(config: ModelConfig, kernels: Kernels) -> None:
    """Raises ConfigError where these kernels cannot serve this architecture: `deterministic` or `kernels`."""
    if kernels.is_deterministic:
        check_deterministic(config)
    if config.latent is not None and not kernels.serves_latents:
        raise ConfigError(
            f"kernels {kernels.name!r} do not attend to latents, which {config.architecture} keeps: take {_TORCH}",
            field="kernels",
        )


def check_deterministic(config: ModelConfig) -> None:
    """Raises ConfigError (`deterministic`) where no kernels serve this architecture in that mode."""
    if config.moe is not None or config.latent is not None:
        raise ConfigError(
            f"deterministic does not serve {config.architecture}: the products of experts and latents round by how "
            "many tokens a step has",
            field="deterministic",
        )
    if not stacks(config):
        raise ConfigError(
            f"deterministic does not serve {config.architecture}: what lies between its products is left to torch",
            field="deterministic",
        )


def check_specs(specs: Specs, kernels: Kernels, device: torch.device | str) -> None:
    """Raises ConfigError where these kernels cannot serve weights in fewer bits: `deterministic`."""
    if not kernels.is_deterministic:
        return
    on_cpu = torch.device(device).type == "cpu"
    for name, spec in specs.items():
        if not on_cpu or spec.kind == "fp8" or spec.index_groups:
            where = "on a CPU " if on_cpu else f"on {torch.device(device).type} "
            order = " with ordered columns" if spec.index_groups else ""
            raise ConfigError(
                f"deterministic {where}does not serve {name} in {spec.kind}{order}: take a plain checkpoint"
                + (", or one in int8 or int4" if on_cpu else ""),
                field="deterministic",
            )


def stacks(config: ModelConfig) -> bool:
    """Whether one call can compute the layers: dense ones with a norm before each part, or one before both."""
    names = config.names
    return (
        config.moe is None
        and config.latent is None
        and config.delta is None
        and not config.is_gated
        and names.input_norm is not None
        and (config.is_parallel or names.post_norm is not None)
        and config.qk_norm != "whole"
        and config.activation.gate != "clamped"
        and not config.has_sinks
        and config.residual_scale == 1.0
    )
