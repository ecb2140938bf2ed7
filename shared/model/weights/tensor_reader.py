"""Reads tensors of a safetensors file a few MiB at a time, through one buffer.

A mapped page counts as resident until it is given back: a mapped checkpoint doubles a process's memory while it loads.
So files are read, not mapped: beside what it loads, a process holds one piece.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Self

import torch
from torch import Tensor

from shared.errors import ModelLoadError
from shared.model.weights.safetensors_files import STORED, SafetensorsFile, TensorEntry

PIECE_BYTES = 4 << 20
"""Rows are read whole: a longer one is a piece of its own."""


class TensorReader:
    """A file's tensors, as a context manager. Raises ModelLoadError where the file cannot be read or ends early."""

    def __init__(self, file: SafetensorsFile) -> None:
        """Opens nothing yet."""
        self._path = file.path
        self._buffer = bytearray()

    def __enter__(self) -> Self:
        try:
            self._file = self._path.open("rb", buffering=0)
        except OSError as error:
            raise self._unreadable(error) from error
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def pieces(self, entry: TensorEntry, begin: int, end: int) -> Iterator[tuple[int, Tensor]]:
        """Rows begin … end - 1 of a tensor, in order: (first row, [num_rows, …] as the tensor's) each.

        A piece is valid until the next one is asked for.
        """
        dtype = getattr(torch, STORED[entry.dtype].torch_name)
        width = math.prod(entry.shape[1:])
        row_bytes = width * dtype.itemsize
        step = max(1, PIECE_BYTES // max(1, row_bytes))
        for first in range(begin, end, step):
            count = min(step, end - first)
            self._read(entry.begin + first * row_bytes, count * row_bytes)
            yield first, torch.frombuffer(self._buffer, dtype=dtype, count=count * width).view(count, *entry.shape[1:])

    def whole(self, entry: TensorEntry) -> Tensor:
        """A tensor in memory of its own."""
        found = torch.empty(entry.num_bytes, dtype=torch.uint8)
        if entry.num_bytes:
            self._read_into(memoryview(found.numpy().data), entry.begin)
        return found.view(getattr(torch, STORED[entry.dtype].torch_name)).view(entry.shape)

    def _read(self, offset: int, num_bytes: int) -> None:
        """Fills the begin of the buffer."""
        if len(self._buffer) < num_bytes:
            self._buffer = bytearray(num_bytes)
        self._read_into(memoryview(self._buffer)[:num_bytes], offset)

    def _read_into(self, left: memoryview, offset: int) -> None:
        try:
            self._file.seek(offset)
            while left:
                got = self._file.readinto(left)
                if not got:
                    raise ModelLoadError(f"{self._path} is truncated", file=self._path.name)
                left = left[got:]
        except OSError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: OSError) -> ModelLoadError:
        return ModelLoadError(f"{self._path} cannot be read: {error}", file=self._path.name)
