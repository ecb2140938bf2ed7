"""The files of a model folder as they cross to another worker: which, in which parts, and how each part is checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shared.errors import ModelLoadError
from shared.kv.checksum_weights import checksum_weights, weighted_sum
from shared.model.config.folder import CONFIG_FILE
from shared.model.weights.loader import fingerprint
from shared.model.weights.safetensors_files import SINGLE_FILE, TensorEntry, checkpoint_files, read_header

PIECE_BYTES = 4 << 20
"""Bytes of one message of the transfer plane."""
PART_PIECES = 8
"""Pieces that are asked for at once."""
TRAILER_BYTES = 8
"""Bytes of the zeros behind each part's pieces."""
MAX_FILES = 10_000
_TEXTS = ("*.json", "*.jinja")
"""Configuration, tokenizer and templates; the weights' own files are those that the folder's index names."""


@dataclass(frozen=True, slots=True)
class FilePart:
    """Adjacent pieces of one file."""

    file: str
    offset: int
    num_pieces: int
    num_bytes: int  # the last piece may end behind the file


def folder_files(folder: Path) -> list[Path]:
    """The files that a copy of the folder needs, the configuration last: where that is, the others are. Raises
    ModelLoadError where the folder cannot be served."""
    texts = {path for pattern in _TEXTS for path in folder.glob(pattern) if path.is_file()}
    weights = [file.path for file in checkpoint_files(folder)]
    return [*weights, *sorted(texts - {folder / CONFIG_FILE}), folder / CONFIG_FILE]


def is_whole(folder: Path) -> bool:
    """Whether the folder has a configuration and all of its weights' files."""
    try:
        return (folder / CONFIG_FILE).is_file() and bool(checkpoint_files(folder))
    except (OSError, ModelLoadError):
        return False


def content_digest(folder: Path) -> str:
    """See `WeightFiles.digest`. Reads a part of every tensor. Raises ModelLoadError."""
    return fingerprint(folder, "")


def parts_of(file: str, num_bytes: int) -> Iterator[FilePart]:
    """The parts of a file of that many bytes; none of an empty one."""
    step = PIECE_BYTES * PART_PIECES
    for offset in range(0, num_bytes, step):
        length = min(step, num_bytes - offset)
        yield FilePart(file, offset, -(-length // PIECE_BYTES), length)


def piece_views(buffer: npt.NDArray[np.uint8], num_pieces: int) -> list[memoryview]:
    """The first pieces of a buffer of PART_PIECES."""
    whole = memoryview(buffer.data)
    return [whole[number * PIECE_BYTES : (number + 1) * PIECE_BYTES] for number in range(num_pieces)]


def checksums_of(pieces: Sequence[memoryview]) -> list[int]:
    """The checksum of each piece, as of a block (`shared/kv/checksum.py`)."""
    return [weighted_sum(np.frombuffer(piece, np.uint64), _weights()) for piece in pieces]


@lru_cache(maxsize=1)
def _weights() -> npt.NDArray[np.uint64]:
    return checksum_weights(PIECE_BYTES // 8)


def entries_of(path: Path) -> tuple[TensorEntry, ...]:
    """The tensors of a file, none of one that has no weights. Raises ModelLoadError."""
    return read_header(path).entries if path.suffix == Path(SINGLE_FILE).suffix else ()


def what_lies_at(entries: Sequence[TensorEntry], offset: int) -> str:
    """The first and the last tensor of a file's piece, empty where none begins or continues in it."""
    end = offset + PIECE_BYTES
    found = [entry.name for entry in entries if entry.begin < end and offset < entry.begin + entry.num_bytes]
    return " to ".join(dict.fromkeys((found[0], found[-1]))) if found else ""
