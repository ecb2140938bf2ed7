"""Reads one rank's slice of a checkpoint: its rows alone; where it holds columns, whole rows, a piece at a time."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from shared.errors import ConfigError
from shared.kernels.quantized import Weight
from shared.model.layers.expert_copies import ExpertCopies
from shared.model.layers.parameters import NO_SPECS, DecoderParameters, LayerParameters, Specs
from shared.model.ranks.shard import Shard, Span
from shared.model.weights.checkpoint import Checkpoint
from shared.model.weights.loader import OnProgress, fill_weights
from shared.model.weights.plan import WeightPlan

_LAYERS = "model.layers."
_DENSE = ("gate_proj", "up_proj", "down_proj")
"""Names of a dense block's projections, and of the shared experts'."""
_PANEL_ROWS = 32
"""The fewest rows of a linear layer that is there to be made, not to be used."""


def allocate_shard(
    shard: Shard, dtype: torch.dtype, device: torch.device | str = "cpu", specs: Specs = NO_SPECS
) -> DecoderParameters:
    """Uninitialised parameters of this rank's sizes: of `shard.local_config`, and of its experts alone. `specs`: forms
    of the whole model's projections."""
    own = {_own_name(shard, name): spec for name, spec in specs.items()}
    parameters = DecoderParameters.allocate(shard.local_config, dtype, device, shard.experts, own)
    layers = tuple(_with_copies(shard, index, layer, device) for index, layer in enumerate(parameters.layers))
    parameters = replace(parameters, layers=layers)
    if shard.is_last:
        return parameters
    # No stage but the last one has a use for it.
    unused = torch.zeros(_PANEL_ROWS, shard.config.hidden_size, dtype=dtype, device=device)
    return replace(parameters, lm_head=unused, head_spec=None)


def _own_name(shard: Shard, name: str) -> str:
    """The name of a tensor where layers are counted from the stage's first; those before have no such name."""
    if not name.startswith(_LAYERS):
        return name
    number, _, rest = name.removeprefix(_LAYERS).partition(".")
    return f"{_LAYERS}{int(number) - shard.layers.begin}.{rest}"


def _with_copies(shard: Shard, index: int, layer: LayerParameters, device: torch.device | str) -> LayerParameters:
    sets = shard.placed(index)
    if layer.experts is None or sets is None:
        return layer
    copies = ExpertCopies.of(sets, shard.expert_set, device)
    return replace(layer, experts=replace(layer.experts, copies=copies))


def load_shard(
    checkpoint: Checkpoint,
    shard: Shard,
    plan: WeightPlan,
    parameters: DecoderParameters,
    on_progress: OnProgress | None = None,
) -> None:
    """Fills what `allocate_shard` made.

    Raises ConfigError where a rank's columns split a group of a weight in fewer bits, ModelLoadError as `fill_weights`.
    """
    targets = _targets(shard, parameters)
    slices: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {}
    for name in targets:
        rows, columns = _slices(shard, name, plan.shapes[name])
        _check_columns(shard, plan, name, columns)
        slices[name] = (rows.begin, rows.end), (columns.begin, columns.end)
    fill_weights(checkpoint, plan.sources, targets, on_progress, slices)
    if shard.part:
        for name, target in targets.items():  # they are added once, by the first rank of a stage
            if name.endswith(("o_proj.bias", "down_proj.bias")):
                assert isinstance(target, Tensor)
                target.zero_()


def _check_columns(shard: Shard, plan: WeightPlan, name: str, columns: Span) -> None:
    spec = plan.sources[name].spec or plan.specs.get(name)
    if spec is None or not spec.group or spec.index_groups:
        return
    size = plan.shapes[name][1]
    if columns.begin % spec.group or (columns.end % spec.group and columns.end != size):
        raise ConfigError(
            f"tp is {shard.degrees.tensor}, which gives a rank columns {columns.begin} to {columns.end} of {name}, but "
            f"{spec.group} columns share a scale: take a degree that splits its {size} columns at multiples of that",
            field="tp",
            value=shard.degrees.tensor,
            limit=spec.group,
        )


def _targets(shard: Shard, parameters: DecoderParameters) -> dict[str, Weight]:
    """Checkpoint tensor name → where this rank's slice of it goes."""
    targets: dict[str, Weight] = {}
    for name, view in parameters.checkpoint_views(shard.local_config).items():
        if name == "model.embed_tokens.weight" and not shard.is_first and not _is_tied_head(shard):
            continue
        if name in ("lm_head.weight", "model.norm.weight") and not shard.is_last:
            continue
        if name.startswith(_LAYERS):
            number, _, rest = name.removeprefix(_LAYERS).partition(".")
            targets[f"{_LAYERS}{int(number) + shard.layers.begin}.{rest}"] = view
        else:
            targets[name] = view
    return targets


def _is_tied_head(shard: Shard) -> bool:
    return shard.config.tie_word_embeddings and shard.is_last


def _slices(shard: Shard, name: str, shape: tuple[int, ...]) -> tuple[Span, Span]:
    """(rows, columns) of a tensor that this rank holds; a vector has one column."""
    config = shard.config
    heads, size = shard.heads, config.head_dim
    rows = Span(0, shape[0])
    columns = Span(0, shape[1] if len(shape) > 1 else 1)
    module, _, kind = name.rpartition(".")
    of_weight = kind == "weight"
    gate, up, down = _DENSE if config.moe is None else config.moe.projections
    match module.rpartition(".")[2]:
        case "q_proj" | "q_b_proj":
            rows = _times(heads, size)
        case "k_proj" | "v_proj":
            rows = _times(shard.kv_heads, size)
        case "kv_b_proj" if config.latent is not None:
            rows = _times(heads, config.latent.nope_dim + config.latent.value_dim)
        case "o_proj" if of_weight:
            columns = _times(heads, config.value_dim)
        case leaf if leaf in (*_DENSE[:2], gate, up):
            rows = _inner(shard, module)
        case leaf if leaf in (_DENSE[2], down) and of_weight:
            columns = _inner(shard, module)
        case "embed_tokens" | "lm_head":
            rows = shard.vocab
    return rows, columns


def _inner(shard: Shard, module: str) -> Span:
    """A rank's columns of the block that a projection belongs to."""
    if ".experts." in module:
        return shard.expert_inner
    return shard.shared_inner if ".shared_experts." in module else shard.inner


def _times(span: Span, size: int) -> Span:
    return Span(span.begin * size, span.end * size)
