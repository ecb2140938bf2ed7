"""What loading a model folder reads, and in which form each projection is kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from shared.errors import ConfigError
from shared.kernels.linear_spec import Kind, LinearSpec, int4_spec
from shared.kernels.quantized import Weight
from shared.model.config.model_config import ModelConfig
from shared.model.config.quantization import STACKED
from shared.model.layers.head import HeadParameters
from shared.model.layers.parameters import NO_SPECS, DecoderParameters, Specs, unused_tensors
from shared.model.weights.checkpoint import Checkpoint
from shared.model.weights.schemes import MAKERS
from shared.model.weights.sources import TIED_NAME, TIED_SOURCE, WeightSource, match_sources

RATES = (
    *(f"in_proj_{end}" for end in ("ba", "b", "a")),
    *(f"{name}_proj" for name in ("b", "f_a", "f_b", "g_a", "g_b")),
)
"""Projections to rates, decays and gates of lower rank."""
Quantization = Literal["auto", "int8", "int4", "fp8", "w8a8", "w4a8"]
"""auto: as the checkpoint has its weights; else the kind that plain ones are rounded to while they are read. w8a8
and w4a8: int8 and int4, and activations to int8 too where the computation is in 16 bits."""
AS_STORED: Quantization = "auto"
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)


@dataclass(frozen=True)
class WeightPlan:
    """The sources of all of a model's tensors, and the forms of its projections."""

    shapes: Mapping[str, tuple[int, ...]]
    sources: Mapping[str, WeightSource]
    specs: Specs

    @classmethod
    def make(
        cls,
        checkpoint: Checkpoint,
        config: ModelConfig,
        quantization: Quantization = AS_STORED,
        *,
        has_head: bool = False,
        device: torch.device | str = "cpu",
    ) -> WeightPlan:
        """Checks every name, shape and dtype, and reads no tensor. `has_head`: of the head, too. `device`: that the
        weights are read onto; only kernels of a CPU read codes with lows, elsewhere these are opened.

        Raises:
            ConfigError: another `quantization` than a checkpoint in fewer bits has.
            ModelLoadError: as `match_sources`.
        """
        shapes = {name: tuple(view.shape) for name, view in _views(config, NO_SPECS, has_head=has_head).items()}
        sources = match_sources(checkpoint, shapes, MAKERS, config.quantization, unused_tensors(config))
        if quantization == "auto":
            reads_lows = torch.device(device).type == "cpu"
            forms = {name: spec for name, source in sources.items() if (spec := source.spec) is not None}
            found = {name: spec for name, spec in forms.items() if reads_lows or not spec.has_lows}
            return cls(shapes, sources, _kept(config, found, has_head=has_head) if found else found)
        if config.quantization is not None:
            raise ConfigError(
                f"quantization is {quantization}, but the checkpoint's weights are quantized already "
                f"({config.quantization.method}): take auto, or a checkpoint in 16 or 32 bits",
                field="quantization",
                value=quantization,
            )
        coded = next((source for source in sources.values() if source.spec is not None), None)
        if coded is not None:
            raise ConfigError(
                f"quantization is {quantization}, but {coded.name} is stored in fewer bits already: take auto, or a "
                "checkpoint in 16 or 32 bits",
                field="quantization",
                value=quantization,
            )
        if config.has_stacked_experts:
            raise ConfigError(
                f"quantization is {quantization}, which is not supported for {config.architecture}: {STACKED}",
                field="quantization",
                value=quantization,
            )
        return cls(shapes, sources, rounding_specs(config, shapes, quantization))

    @property
    def kinds(self) -> str:
        """Kinds of weights in fewer bits, such as `int4+int8`; empty where there are none."""
        return "+".join(sorted({_named(spec) for spec in self.specs.values()}))

    def weight_bytes(self, element_bytes: int) -> int:
        """Bytes of all tensors, plain numbers of `element_bytes` each; of a tied output projection that is rounded
        too."""
        total = sum(
            _num_bytes(self.specs[name], shape) if name in self.specs else math.prod(shape) * element_bytes
            for name, shape in self.shapes.items()
        )
        if TIED_NAME in self.specs and TIED_NAME not in self.shapes:
            total += _num_bytes(self.specs[TIED_NAME], self.shapes[TIED_SOURCE])
        return total


def _views(config: ModelConfig, specs: Specs, *, has_head: bool) -> dict[str, Weight]:
    """What the checkpoint's tensors fill, without memory."""
    views = DecoderParameters.allocate(config, torch.float32, "meta", specs=specs).checkpoint_views(config)
    if has_head:
        views |= HeadParameters.allocate(config, torch.float32, "meta", specs).checkpoint_views(config)
    return views


def _kept(config: ModelConfig, specs: Specs, *, has_head: bool) -> Specs:
    """Less the forms of weights that are opened, since they are fused with parts of another form."""
    views = _views(config, specs, has_head=has_head)
    return {name: spec for name, spec in specs.items() if not isinstance(views.get(name), Tensor)}


def _named(spec: LinearSpec) -> str:
    return f"w{4 if spec.kind == 'int4' else 8}a8" if spec.rounds_input else spec.kind


def rounding_specs(
    config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], kind: Kind | Literal["w8a8", "w4a8"]
) -> dict[str, LinearSpec]:
    """The forms that plain projections are rounded to: int8 and fp8 with a scale a row, int4 with one a group. The
    output projection has 8 bits at least, and what it is multiplied with is not rounded: its errors are the answer's.
    """
    routers = () if config.moe is None else (f".{config.moe.prefix}.{config.moe.router}.weight",)
    # Rounding would change the routers' choice; the latents' projections are used in both directions, and those of
    # rates and decays are small.
    kept_plain = (*routers, ".kv_b_proj.weight", *(f".{name}.weight" for name in RATES))
    if config.moe is not None and config.moe.shared_gate is not None:
        kept_plain = (*kept_plain, f".{config.moe.shared_gate}.weight")
    specs: dict[str, LinearSpec] = {}
    rounded = ("model.layers.", *(() if config.head is None or config.head.is_apart else (config.head.names.prefix,)))
    for name, shape in shapes.items():
        if not name.startswith(rounded) or not name.endswith(".weight") or len(shape) != 2:
            continue
        if not name.endswith(kept_plain) and (spec := _rounding(kind, shape[1])) is not None:
            specs[name] = spec
    head = _rounding("fp8" if kind == "fp8" else "int8", config.hidden_size)
    return specs if head is None else {**specs, TIED_NAME: head}


def _rounding(kind: Kind | Literal["w8a8", "w4a8"], in_size: int) -> LinearSpec | None:
    if kind == "w8a8":
        return LinearSpec("int8", 0, rounds_input=True)
    if kind == "w4a8":
        spec = int4_spec(in_size)
        return None if spec is None else replace(spec, rounds_input=True)
    return int4_spec(in_size) if kind == "int4" else LinearSpec(kind, 0)


def _num_bytes(spec: LinearSpec, shape: tuple[int, ...]) -> int:
    out_size, in_size = shape[-2:]
    codes = in_size // 2 if spec.kind == "int4" else in_size
    of_group = 4 + (4 if spec.has_lows else 2 if spec.has_zeros else 0)
    return out_size * (codes + of_group * spec.num_groups(in_size)) + (4 * in_size if spec.index_groups else 0)
