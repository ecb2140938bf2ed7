"""Reads one rank's slice of a checkpoint: its rows alone; where it holds columns, whole rows, a piece at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from shared.model.layers.expert_copies import ExpertCopies
from shared.model.layers.parameters import DecoderParameters, LayerParameters, unused_tensors
from shared.model.ranks.shard import Shard, Span
from shared.model.weights.loader import OnProgress, match_entries
from shared.model.weights.safetensors_files import TensorEntry, checkpoint_files
from shared.model.weights.tensor_reader import TensorReader

_LAYERS = "model.layers."
_DENSE = ("gate_proj", "up_proj", "down_proj")
"""Names of a dense block's projections, and of the shared experts'."""
_SUMMED = ("o_proj.bias", "down_proj.bias")
"""Biases that are added once, by the first rank of a stage."""
_PANEL_ROWS = 32
"""The fewest rows of a linear layer that is there to be made, not to be used."""


def allocate_shard(shard: Shard, dtype: torch.dtype, device: torch.device | str = "cpu") -> DecoderParameters:
    """Uninitialised parameters of this rank's sizes: of `shard.local_config`, and of its experts alone."""
    parameters = DecoderParameters.allocate(shard.local_config, dtype, device, shard.experts)
    layers = tuple(_with_copies(shard, index, layer, device) for index, layer in enumerate(parameters.layers))
    parameters = replace(parameters, layers=layers)
    if shard.is_last:
        return parameters
    # No stage but the last one has a use for it.
    unused = torch.zeros(_PANEL_ROWS, shard.config.hidden_size, dtype=dtype, device=device)
    return replace(parameters, lm_head=unused)


def _with_copies(shard: Shard, index: int, layer: LayerParameters, device: torch.device | str) -> LayerParameters:
    sets = shard.placed(index)
    if layer.experts is None or sets is None:
        return layer
    copies = ExpertCopies.of(sets, shard.expert_set, device)
    return replace(layer, experts=replace(layer.experts, copies=copies))


def load_shard(
    folder: Path, shard: Shard, parameters: DecoderParameters, on_progress: OnProgress | None = None
) -> None:
    """Fills what `allocate_shard` made. Names, shapes and dtypes of the whole checkpoint are checked first.

    Raises ModelLoadError, as `load_weights`.
    """
    files = checkpoint_files(folder)
    whole = DecoderParameters.allocate(shard.config, torch.float32, "meta").checkpoint_views(shard.config)
    entries = match_entries(files, whole, unused_tensors(shard.config))
    targets = _targets(shard, parameters)
    total = sum(target.nbytes for target in targets.values())
    loaded = 0
    for file in files:
        wanted = [entry for entry in file.entries if entry.name in targets and entries[entry.name] is entry]
        if not wanted:
            continue
        with TensorReader(file) as reader:
            for entry in wanted:
                _copy(reader, entry, _part(shard, entry), targets[entry.name])
                loaded += targets[entry.name].nbytes
                if on_progress is not None:
                    on_progress(loaded, total)
    for name, target in targets.items():
        is_added_twice = shard.part and name.endswith(_SUMMED)
        if is_added_twice or (shard.expert_inner.begin and name.endswith("down_proj_bias")):
            target.zero_()


def _targets(shard: Shard, parameters: DecoderParameters) -> dict[str, Tensor]:
    """Checkpoint tensor name → where this rank's slice of it goes."""
    targets: dict[str, Tensor] = {}
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


@dataclass(frozen=True)
class _Part:
    """What a rank holds of a tensor."""

    rows: Sequence[Span]
    columns: Span | None = None  # of the second dimension, None for all
    depths: Span | None = None  # of the third one


def _part(shard: Shard, entry: TensorEntry) -> _Part:
    config = shard.config
    heads, size = shard.heads, config.head_dim
    module, _, kind = entry.name.rpartition(".")
    of_weight = kind == "weight"
    whole = [Span(0, entry.shape[0])]
    q, kv = _times(heads, size), _times(shard.kv_heads, size)
    gate, up, down = _DENSE if config.moe is None else config.moe.projections
    match module.rpartition(".")[2]:
        case "q_proj" | "q_b_proj":
            return _Part([q])
        case "k_proj" | "v_proj":
            return _Part([kv])
        case "qkv_proj":
            first_key = config.num_heads * size
            first_value = first_key + config.num_kv_heads * size
            return _Part([q, _moved(kv, first_key), _moved(kv, first_value)])
        case "kv_b_proj" if config.latent is not None:
            return _Part([_times(heads, config.latent.nope_dim + config.latent.value_dim)])
        case "o_proj" if of_weight:
            return _Part(whole, _times(heads, config.value_dim))
        case "gate_up_proj":
            inner = _inner(shard, module)
            return _Part([inner, _moved(inner, entry.shape[0] // 2)])
        case name if name in (*_DENSE[:2], gate, up):
            return _Part([_inner(shard, module)])
        case name if name in (_DENSE[2], down) and of_weight:
            return _Part(whole, _inner(shard, module))
        case "embed_tokens" | "lm_head":
            return _Part([shard.vocab])
        case "self_attn" if kind == "sinks":
            return _Part([heads])
        case "experts":
            return _stacked(shard, entry, kind)
    return _Part(whole)


def _stacked(shard: Shard, entry: TensorEntry, kind: str) -> _Part:
    """Of a tensor of all experts of a layer, in which gate and up lie in turns."""
    assert shard.experts is not None
    layer = int(entry.name.removeprefix(_LAYERS).partition(".")[0]) - shard.layers.begin
    rows = [Span(expert, expert + 1) for expert in shard.experts[layer]]
    inner = shard.expert_inner
    match kind:
        case "gate_up_proj":
            return _Part(rows, None, _times(inner, 2))
        case "gate_up_proj_bias":
            return _Part(rows, _times(inner, 2))
        case "down_proj":
            return _Part(rows, inner)
    return _Part(rows)


def _inner(shard: Shard, module: str) -> Span:
    """A rank's columns of the block that a projection belongs to."""
    if ".experts." in module:
        return shard.expert_inner
    return shard.shared_inner if ".shared_experts." in module else shard.inner


def _times(span: Span, size: int) -> Span:
    return Span(span.begin * size, span.end * size)


def _moved(span: Span, by: int) -> Span:
    return Span(span.begin + by, span.end + by)


def _copy(reader: TensorReader, entry: TensorEntry, part: _Part, target: Tensor) -> None:
    at = 0
    for rows in part.rows:
        for _, piece in reader.pieces(entry, rows.begin, rows.end):
            for dim, span in ((1, part.columns), (2, part.depths)):
                if span is not None:
                    piece = piece.narrow(dim, span.begin, span.length)
            target[at : at + len(piece)].copy_(piece)
            at += len(piece)
