"""Fill a decoder's parameters from safetensors files, and compute their fingerprint."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from shared.errors import ModelLoadError
from shared.kernels.quantized import Piece, QuantizedWeight, Weight, quantize_rows
from shared.model.config.json_fields import read_json_object
from shared.model.weights.checkpoint import Checkpoint
from shared.model.weights.safetensors_files import DENSE, checkpoint_files
from shared.model.weights.sources import TIED_NAME, TIED_SOURCE, WeightSource, check_left_biases

OnProgress = Callable[[int, int], None]
"""Called with (loaded_bytes, total_bytes) of the checkpoint after each tensor."""


_SAMPLE_BYTES = 64 * 1024
_HUGE_PAGES_SETTING = "THP_MEM_ALLOC_ENABLE"


@dataclass(frozen=True)
class Part:
    """What a rank holds of a tensor: rows, one behind the other, and parts of the other dimensions: (begin, end)."""

    rows: Sequence[tuple[int, int]]
    columns: tuple[int, int] | None = None  # of the second dimension, None for all
    depths: Sequence[tuple[int, int]] = ()  # of the third one, one behind the other; none for all


def fill_weights(
    checkpoint: Checkpoint,
    sources: Mapping[str, WeightSource],
    targets: Mapping[str, Weight],
    on_progress: OnProgress | None = None,
    parts: Mapping[str, Part] | None = None,
) -> None:
    """Copies each source into its target of the same name, in place and in the files' order, in the target's dtype,
    form and device. All scales are checked before the first weight is read.

    Beside the targets there is one piece of a tensor in memory, see `TensorReader`; of weights that are packed by
    columns one tensor. An `lm_head.weight` beside a tied embedding must equal it.

    `parts`: name → what a target holds; None: everything. Columns of quantized weights must begin and end between two
    groups. Raises ModelLoadError: weights corrupt (`file`), or with impossible scales (`tensor`).
    """
    wanted = {name: sources[name] for name in targets}
    for source in wanted.values():
        source.check(checkpoint)
    check_left_biases(checkpoint, sources)
    sizes = {name: sum(checkpoint.entries[part].num_bytes for part in wanted[name].names) for name in targets}
    total, loaded = sum(sizes.values()), 0
    for name in sorted(targets, key=lambda name: checkpoint.place(wanted[name].name)):
        part = Part([(0, targets[name].shape[0])]) if parts is None else parts[name]
        at = 0
        for begin, end in part.rows:
            for first, piece in wanted[name].pieces(checkpoint, begin, end):
                _put(targets[name], at + first - begin, piece, part)
            at += end - begin
        loaded += sizes[name]
        if on_progress is not None:
            on_progress(loaded, total)
    if parts is None and TIED_NAME not in targets and TIED_NAME in checkpoint.entries:
        _check_tied_duplicate(checkpoint, targets[TIED_SOURCE])


def _put(target: Weight, first: int, piece: Tensor | Piece, part: Part) -> None:
    """Rows `first`, … of a target, converted to its form."""
    if isinstance(target, QuantizedWeight):
        # Whole rows are rounded, so that ranks with parts of a row have the scales that one process has.
        codes = quantize_rows(piece, target.spec) if isinstance(piece, Tensor) else piece
        target.fill(first, codes if part.columns is None else codes.columns(*part.columns))
        return
    if isinstance(piece, Piece):
        piece = (piece if part.columns is None else piece.columns(*part.columns)).dense()
    else:
        if part.columns is not None:
            piece = piece[:, slice(*part.columns)]
        if part.depths:
            piece = torch.cat([piece[:, :, slice(*depth)] for depth in part.depths], dim=2)
    target[first : first + len(piece)].copy_(piece)


def fingerprint(folder: Path, dtype: str, quantization: str = "auto") -> str:
    """A fast fingerprint of a model's content: equal for copies of a folder, different for other weights.

    Hashes the configuration, each file's header and size, and the first, middle and last 64 KiB of every
    tensor, so that a fine-tune of the same shape differs. Times and paths are ignored.

    Args:
        folder: the model folder.
        dtype: name of the compute dtype, such as `bfloat16`.
        quantization: kind that the weights are rounded to as they are read; auto: none.

    Returns:
        32 hexadecimal digits.

    Raises:
        ModelLoadError: a file is missing, corrupt or truncated.
    """
    digest = blake2b(digest_size=16)

    def add(part: bytes) -> None:
        digest.update(len(part).to_bytes(8, "little") + part)

    add(dtype.encode())
    if quantization != "auto":
        add(f"rounded to {quantization}".encode())
    add(json.dumps(read_json_object(folder / "config.json"), sort_keys=True).encode())
    for file in checkpoint_files(folder):
        add(file.header)
        add(file.num_bytes.to_bytes(8, "little"))
        with file.path.open("rb") as data:
            for entry in file.entries:
                for offset in _sample_offsets(entry.num_bytes):
                    data.seek(entry.begin + offset)
                    add(data.read(min(_SAMPLE_BYTES, entry.num_bytes - offset)))
    return digest.hexdigest()


def _sample_offsets(num_bytes: int) -> list[int]:
    """Start offsets of a tensor's samples, which cover all of a small one."""
    if num_bytes <= 3 * _SAMPLE_BYTES:
        return list(range(0, num_bytes, _SAMPLE_BYTES))
    return [0, (num_bytes - _SAMPLE_BYTES) // 2, num_bytes - _SAMPLE_BYTES]


def _check_tied_duplicate(checkpoint: Checkpoint, embedding: Weight) -> None:
    assert isinstance(embedding, Tensor)
    entry = checkpoint.entries[TIED_NAME]
    is_stored = entry.shape == tuple(embedding.shape) and entry.dtype in DENSE
    if not is_stored or not all(
        piece.to(embedding).equal(embedding[first : first + len(piece)])
        for first, piece in checkpoint.rows(TIED_NAME, 0, entry.shape[0])
    ):
        raise ModelLoadError(
            f"{TIED_NAME} differs from {TIED_SOURCE} although tie_word_embeddings is true",
            field="tie_word_embeddings",
            tensor=TIED_NAME,
        )


def ask_for_huge_pages() -> None:
    """Makes torch ask Linux for pages of 2 MiB instead of 4 KiB for large allocations.

    Weights are read from end to end, KV in scattered blocks. With small pages a core has to translate an address for
    every block and head, which in a virtual machine takes longer than reading the data. Torch reads the setting at its
    first allocation, so call this before; later it has no effect. A value set from outside, such as 0, is kept.
    """
    os.environ.setdefault(_HUGE_PAGES_SETTING, "1")
