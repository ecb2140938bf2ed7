"""Reads one rank's slice of a checkpoint: its rows alone; where it holds columns, whole rows, a piece at a time."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from shared.model.parameters import DecoderParameters
from shared.model.safetensors_files import TensorEntry, checkpoint_files
from shared.model.shard import Shard, Span
from shared.model.tensor_reader import TensorReader
from shared.model.weights import OnProgress, match_entries

_LAYERS = "model.layers."


def load_shard(
    folder: Path, shard: Shard, parameters: DecoderParameters, on_progress: OnProgress | None = None
) -> None:
    """Fills the parameters of `shard.local_config`. Names, shapes and dtypes of the whole checkpoint are checked first.

    Raises ModelLoadError, as `load_weights`.
    """
    files = checkpoint_files(folder)
    whole = DecoderParameters.allocate(shard.config, torch.float32, "meta").checkpoint_views(shard.config)
    entries = match_entries(files, whole)
    targets = _targets(shard, parameters)
    total = sum(target.nbytes for target in targets.values())
    loaded = 0
    for file in files:
        wanted = [entry for entry in file.entries if entry.name in targets and entries[entry.name] is entry]
        if not wanted:
            continue
        with TensorReader(file) as reader:
            for entry in wanted:
                _copy(reader, entry, *_slices(shard, entry), targets[entry.name])
                loaded += targets[entry.name].nbytes
                if on_progress is not None:
                    on_progress(loaded, total)
    if shard.part:
        for name, target in targets.items():  # they are added once, by the first rank of a stage
            if name.endswith(("o_proj.bias", "down_proj.bias")):
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


def _slices(shard: Shard, entry: TensorEntry) -> tuple[Span, Span]:
    """(rows, columns) of a tensor that this rank holds; a vector has one column."""
    size = shard.config.head_dim
    heads, kv_heads, inner = shard.heads, shard.kv_heads, shard.inner
    rows = Span(0, entry.shape[0])
    columns = Span(0, entry.shape[1] if len(entry.shape) > 1 else 1)
    name = entry.name
    if "q_proj" in name:
        rows = Span(heads.begin * size, heads.end * size)
    elif "k_proj" in name or "v_proj" in name:
        rows = Span(kv_heads.begin * size, kv_heads.end * size)
    elif "gate_proj" in name or "up_proj" in name:
        rows = inner
    elif name.endswith("o_proj.weight"):
        columns = Span(heads.begin * size, heads.end * size)
    elif name.endswith("down_proj.weight"):
        columns = inner
    elif name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = shard.vocab
    return rows, columns


def _copy(reader: TensorReader, entry: TensorEntry, rows: Span, columns: Span, target: Tensor) -> None:
    flat = target.view(target.shape[0], -1)
    for first, piece in reader.pieces(entry, rows.begin, rows.end):
        at = first - rows.begin
        flat[at : at + len(piece)].copy_(piece[:, columns.begin : columns.end])
