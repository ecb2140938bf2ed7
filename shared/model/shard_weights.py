"""Reads one rank's slice of a checkpoint, and no more of it: memory-mapped, given back piece by piece.

A mapped page counts as resident until it is given back, and a slice of a projection's columns touches all of its pages.
So a tensor is copied a few MiB at a time, and what was read is unmapped at once: while a rank loads, its memory holds
its slice and one piece.
"""

from __future__ import annotations

import mmap
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shared.errors import ModelLoadError
from shared.model.parameters import DecoderParameters, unused_tensors
from shared.model.safetensors_files import SafetensorsFile, TensorEntry, checkpoint_files
from shared.model.shard import Shard, Span
from shared.model.weights import OnProgress, match_entries

PIECE_BYTES = 4 << 20
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_LAYERS = "model.layers."
_DENSE = ("gate_proj", "up_proj", "down_proj")
"""Names of a dense block's projections, and of the shared experts'."""
_PANEL_ROWS = 32
"""The fewest rows of a linear layer that is there to be made, not to be used."""


def allocate_shard(shard: Shard, dtype: torch.dtype) -> DecoderParameters:
    """Uninitialised parameters of this rank's sizes, on the CPU: of `shard.local_config`, and of its experts alone."""
    parameters = DecoderParameters.allocate(shard.local_config, dtype, "cpu", shard.experts)
    if shard.is_last:
        return parameters
    # No stage but the last one has a use for it.
    return replace(parameters, lm_head=torch.zeros(_PANEL_ROWS, shard.config.hidden_size, dtype=dtype))


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
        with _Mapped(file) as mapped:
            for entry in wanted:
                _copy(mapped, entry, *_slices(shard, entry), targets[entry.name])
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
    config = shard.config
    heads, size = shard.heads, config.head_dim
    rows = Span(0, entry.shape[0])
    columns = Span(0, entry.shape[1] if len(entry.shape) > 1 else 1)
    module, _, kind = entry.name.rpartition(".")
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
        case name if name in (*_DENSE[:2], gate, up):
            rows = _inner(shard, module)
        case name if name in (_DENSE[2], down) and of_weight:
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


class _Mapped:
    """A file's bytes, as a context manager."""

    def __init__(self, file: SafetensorsFile) -> None:
        self._path = file.path

    def __enter__(self) -> mmap.mmap:
        try:
            with self._path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # read alone: no page is copied
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{self._path} cannot be read: {error}", file=self._path.name) from error
        self._map.madvise(mmap.MADV_RANDOM)  # else the kernel reads ahead what other ranks hold
        return self._map

    def __exit__(self, *_: object) -> None:
        self._map.close()


def _copy(mapped: mmap.mmap, entry: TensorEntry, rows: Span, columns: Span, target: Tensor) -> None:
    width = entry.shape[1] if len(entry.shape) > 1 else 1
    dtype = _DTYPES[entry.dtype]
    row_bytes = width * dtype.itemsize
    step = max(1, PIECE_BYTES // max(1, row_bytes))
    flat = target.view(target.shape[0], -1)
    item = dtype.itemsize
    for begin in range(rows.begin, rows.end, step):
        count = min(step, rows.end - begin)
        offset = entry.begin + begin * row_bytes
        shape, strides = (count, columns.length * item), (row_bytes, 1)
        wanted = np.ndarray(shape, np.uint8, mapped, offset + columns.begin * item, strides)
        piece = torch.from_numpy(wanted.copy()).view(dtype)  # its bytes may lie at any address
        del wanted  # or the file could not be unmapped
        at = begin - rows.begin
        flat[at : at + count].copy_(piece)
        page = offset // mmap.PAGESIZE * mmap.PAGESIZE
        mapped.madvise(mmap.MADV_DONTNEED, page, offset + count * row_bytes - page)
