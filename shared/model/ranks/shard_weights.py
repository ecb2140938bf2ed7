"""Reads one rank's slice of a checkpoint: its rows alone; where it holds columns, whole rows, a piece at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shared.errors import ConfigError
from shared.kernels.quantized import Weight
from shared.model.config.model_config import ModelConfig
from shared.model.layers.expert_copies import ExpertCopies
from shared.model.layers.parameters import NO_SPECS, DecoderParameters, LayerParameters, Specs
from shared.model.ranks.shard import Shard, Span
from shared.model.weights.checkpoint import Checkpoint
from shared.model.weights.loader import OnProgress, Part, fill_weights
from shared.model.weights.plan import WeightPlan

_LAYERS = "model.layers."
_DENSE = ("gate_proj", "up_proj", "down_proj")
"""Names of a dense block's projections, and of the shared experts'."""
_SUMMED = ("o_proj.bias", "down_proj.bias")
"""Biases that are added once, by the first rank of a stage."""
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
    parts = {name: part_of(shard, name, plan.shapes[name]) for name in targets}
    for name, part in parts.items():
        _check_columns(shard, plan, name, part)
    fill_weights(checkpoint, plan.sources, targets, on_progress, parts)
    for name, target in targets.items():
        is_added_twice = shard.part and name.endswith(_SUMMED)
        if is_added_twice or (shard.expert_inner.begin and name.endswith("down_proj_bias")):
            assert isinstance(target, Tensor)
            target.zero_()


def _check_columns(shard: Shard, plan: WeightPlan, name: str, part: Part) -> None:
    spec = plan.sources[name].spec or plan.specs.get(name)
    if spec is None or not spec.group or spec.index_groups or part.columns is None:
        return
    (begin, end), size = part.columns, plan.shapes[name][1]
    if begin % spec.group or (end % spec.group and end != size):
        raise ConfigError(
            f"tp is {shard.degrees.tensor}, which gives a rank columns {begin} to {end} of {name}, but "
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


def part_of(shard: Shard, name: str, shape: tuple[int, ...]) -> Part:
    """What a rank holds of a checkpoint's tensor of this name and shape."""
    config = shard.config
    heads, size = shard.heads, config.head_dim
    module, _, kind = name.rpartition(".")
    of_weight = kind == "weight"
    rows = Span(0, shape[0])
    q, kv = _times(heads, size), _times(shard.kv_heads, size)
    gate, up, down = _DENSE if config.moe is None else config.moe.projections
    if _is_of_state(config, module):
        return _of_delta(shard, module.rpartition(".")[2], kind, shape)
    match module.rpartition(".")[2]:
        case "q_proj" if config.is_gated:
            return _of([_times(q, 2)])
        case "q_proj" | "q_b_proj":
            return _of([q])
        case "q_norm" if config.qk_norm == "whole":
            return _of([q])
        case "k_norm" if config.qk_norm == "whole":
            return _of([kv])
        case "k_proj" | "v_proj":
            return _of([kv])
        case "qkv_proj":
            first_key = config.num_heads * size
            first_value = first_key + config.num_kv_heads * size
            return _of([q, _moved(kv, first_key), _moved(kv, first_value)])
        case "kv_b_proj" if config.latent is not None:
            return _of([_times(heads, config.latent.nope_dim + config.latent.value_dim)])
        case "o_proj" if of_weight:
            return _of([rows], _times(heads, config.value_dim))
        case "gate_up_proj":
            inner = _inner(shard, module)
            return _of([inner, _moved(inner, shape[0] // 2)])
        case leaf if leaf in (*_DENSE[:2], gate, up):
            return _of([_inner(shard, module)])
        case leaf if leaf in (_DENSE[2], down) and of_weight:
            return _of([rows], _inner(shard, module))
        case "embed_tokens" | "lm_head":
            return _of([shard.vocab])
        case "self_attn" if kind == "sinks":
            return _of([heads])
        case "experts":
            return _stacked(shard, name, kind)
    return _of([rows])


def _is_of_state(config: ModelConfig, module: str) -> bool:
    """Whether a module mixes tokens by a state."""
    layer, _, rest = module.removeprefix(_LAYERS).partition(".")
    is_mixer = rest.startswith(("self_attn", "linear_attn"))
    return module.startswith(_LAYERS) and is_mixer and config.layers[int(layer)].has_state


def _of_delta(shard: Shard, leaf: str, kind: str, shape: tuple[int, ...]) -> Part:
    """The part of a tensor of a layer with a state."""
    delta, heads = shard.config.delta, shard.delta_heads
    assert delta is not None
    times = delta.num_value_heads // delta.num_key_heads
    keys, value_heads = _times(heads, delta.key_dim), _times(heads, times)
    values, rows = _times(value_heads, delta.value_dim), Span(0, shape[0])
    match leaf:
        case "q_proj" | "k_proj" | "q_conv1d" | "k_conv1d" | "f_b_proj":
            return _of([keys])
        case "v_proj" | "v_conv1d" | "g_b_proj":
            return _of([values])
        case "self_attn":
            return _of([rows], None, [value_heads]) if kind == "A_log" else _of([keys])
        case "in_proj_qkvz":
            return _of([_times(heads, 2 * (delta.key_dim + times * delta.value_dim))])
        case "in_proj_ba":
            return _of([_times(value_heads, 2)])
        case "in_proj_qkv" | "conv1d":
            return _of([keys, _moved(keys, delta.key_size), _moved(values, 2 * delta.key_size)])
        case "in_proj_z":
            return _of([values])
        case "in_proj_b" | "in_proj_a" | "b_proj":
            return _of([value_heads])
        case "linear_attn" if kind in ("A_log", "dt_bias"):
            return _of([value_heads])
        case "out_proj" | "o_proj":
            return _of([rows], values)
    return _of([rows])


def _stacked(shard: Shard, name: str, kind: str) -> Part:
    """The part of a tensor of all experts of a layer."""
    moe = shard.config.moe
    assert moe is not None
    assert shard.experts is not None
    layer = int(name.removeprefix(_LAYERS).partition(".")[0]) - shard.layers.begin
    rows = [Span(expert, expert + 1) for expert in shard.experts[layer]]
    inner = shard.expert_inner
    match kind:
        case "gate_up_proj":
            if moe.stacked == "turns":
                return _of(rows, None, [_times(inner, 2)])
            return _of(rows, None, [inner, _moved(inner, moe.expert_size)])
        case "gate_up_proj_bias":
            return _of(rows, _times(inner, 2))
        case "down_proj":
            return _of(rows, inner)
    return _of(rows)


def _inner(shard: Shard, module: str) -> Span:
    """A rank's columns of the block that a projection belongs to."""
    if ".experts." in module:
        return shard.expert_inner
    moe = shard.config.moe
    return shard.shared_inner if moe is not None and f".{moe.shared}." in module else shard.inner


def _times(span: Span, size: int) -> Span:
    return Span(span.begin * size, span.end * size)


def _moved(span: Span, by: int) -> Span:
    return Span(span.begin + by, span.end + by)


def _of(rows: Sequence[Span], columns: Span | None = None, depths: Sequence[Span] = ()) -> Part:
    return Part(
        [(span.begin, span.end) for span in rows],
        None if columns is None else (columns.begin, columns.end),
        [(span.begin, span.end) for span in depths],
    )
