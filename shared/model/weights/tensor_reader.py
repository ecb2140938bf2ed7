"""Reads tensors of a safetensors file a few MiB at a time, through one buffer, or ahead through several.

A mapped page counts as resident until it is given back: a mapped checkpoint doubles a process's memory while it loads.
So files are read, not mapped: beside what it loads, a process holds one piece, or `AHEAD` of them where they go to a
GPU, which takes them faster than one thread reads.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import torch
from torch import Tensor

from shared.errors import ModelLoadError
from shared.model.weights.safetensors_files import STORED, SafetensorsFile, TensorEntry

PIECE_BYTES = 4 << 20
"""Rows are read whole: a longer one is a piece of its own."""
AHEAD = 8
"""Pieces that are read at once, by as many threads."""


class ReadAhead:
    """Buffers and threads that every file of a checkpoint shares; a context manager. The buffers are pinned where
    there is a GPU: its driver copies from other memory by way of a pinned piece of its own."""

    def __init__(self) -> None:
        """Allocates no buffer yet."""
        self._threads = ThreadPoolExecutor(AHEAD, "weights")
        self._unused: list[Tensor] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._unused.clear()

    def read(self, reader: TensorReader, spans: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
        """[num_bytes] uint8 of each (offset, num_bytes) in order; valid until the next one is asked for. Raises
        ModelLoadError."""
        largest = max((num_bytes for _, num_bytes in spans), default=0)
        free = [self._buffer(largest) for _ in spans[:AHEAD]]
        under_way: deque[tuple[Future[None], Tensor, int]] = deque()
        left = iter(spans)
        try:
            while True:
                while free and (span := next(left, None)) is not None:
                    offset, num_bytes = span
                    into = memoryview(free[-1].numpy().data)[:num_bytes]
                    under_way.append((self._threads.submit(reader.read_into, into, offset), free.pop(), num_bytes))
                if not under_way:
                    return
                read, buffer, num_bytes = under_way.popleft()
                free.append(buffer)
                read.result()
                yield buffer[:num_bytes]
        finally:
            for read, buffer, _ in under_way:
                free.append(buffer)
                if not read.cancel():
                    read.exception()  # waits: the next tensor gets this buffer
            self._unused += free

    def _buffer(self, num_bytes: int) -> Tensor:
        """[at least num_bytes] uint8"""
        for index, buffer in enumerate(self._unused):
            if buffer.numel() >= num_bytes:
                return self._unused.pop(index)
        size = max(num_bytes, PIECE_BYTES)
        return torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())


class TensorReader:
    """A file's tensors, as a context manager. Raises ModelLoadError where the file cannot be read or ends early."""

    def __init__(self, file: SafetensorsFile, ahead: ReadAhead | None = None) -> None:
        """Opens nothing yet. `ahead`: pieces are read before they are asked for."""
        self._path = file.path
        self._ahead = ahead
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
        dtype = _dtype(entry)
        width = math.prod(entry.shape[1:])
        row_bytes = width * dtype.itemsize
        step = max(1, PIECE_BYTES // max(1, row_bytes))
        counts = {first: min(step, end - first) for first in range(begin, end, step)}
        spans = [(entry.begin + first * row_bytes, count * row_bytes) for first, count in counts.items()]
        read = self._one_by_one(spans) if self._ahead is None else self._ahead.read(self, spans)
        for (first, count), piece in zip(counts.items(), read, strict=True):
            yield first, piece.view(dtype).view(count, *entry.shape[1:])

    def whole(self, entry: TensorEntry) -> Tensor:
        """A tensor in memory of its own."""
        dtype, found = _dtype(entry), torch.empty(entry.num_bytes, dtype=torch.uint8)
        if entry.num_bytes:
            self.read_into(memoryview(found.numpy().data), entry.begin)
        return found.view(dtype).view(entry.shape)

    def _one_by_one(self, spans: list[tuple[int, int]]) -> Iterator[Tensor]:
        for offset, num_bytes in spans:
            if len(self._buffer) < num_bytes:
                self._buffer = bytearray(num_bytes)
            self.read_into(memoryview(self._buffer)[:num_bytes], offset)
            yield torch.frombuffer(self._buffer, dtype=torch.uint8, count=num_bytes)

    def read_into(self, left: memoryview, offset: int) -> None:
        """Fills the memory with what lies at that offset; from any thread."""
        try:
            while left:
                got = os.preadv(self._file.fileno(), [left], offset)
                if not got:
                    raise ModelLoadError(f"{self._path} is truncated", file=self._path.name)
                left, offset = left[got:], offset + got
        except OSError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: OSError) -> ModelLoadError:
        return ModelLoadError(f"{self._path} cannot be read: {error}", file=self._path.name)


def _dtype(entry: TensorEntry) -> torch.dtype:
    if entry.dtype not in STORED:
        known = ", ".join(STORED)
        raise ModelLoadError(
            f"{entry.name} is stored as {entry.dtype}, which is not read; supported: {known}", tensor=entry.name
        )
    found: torch.dtype = getattr(torch, STORED[entry.dtype].torch_name)
    return found
