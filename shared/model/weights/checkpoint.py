"""A checkpoint's tensors by name, over all of its files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from torch import Tensor

from shared.errors import ModelLoadError
from shared.model.weights.safetensors_files import SafetensorsFile, TensorEntry, checkpoint_files
from shared.model.weights.tensor_reader import ReadAhead, TensorReader


class Checkpoint:
    """Tensors of safetensors files, read by name; a context manager, which closes what it opened.

    Reading raises ModelLoadError where a file cannot be read or ends early.
    """

    def __init__(self, files: list[SafetensorsFile], *, ahead: bool = False) -> None:
        """Opens nothing yet. `ahead`: see `ReadAhead`. Raises ModelLoadError for a tensor that is stored twice."""
        self._is_ahead = ahead
        self._ahead: ReadAhead | None = None
        self._readers: dict[SafetensorsFile, TensorReader] = {}
        self._stack = ExitStack()
        self._files: dict[str, SafetensorsFile] = {}
        self.entries: dict[str, TensorEntry] = {}
        for file in files:
            for entry in file.entries:
                if entry.name in self.entries:
                    raise ModelLoadError(f"{entry.name} is stored twice", tensor=entry.name, file=file.path.name)
                self.entries[entry.name] = entry
                self._files[entry.name] = file

    @classmethod
    def of(cls, folder: Path, *, ahead: bool = False) -> Checkpoint:
        """A model folder's. Raises ModelLoadError, as `checkpoint_files`."""
        return cls(checkpoint_files(folder), ahead=ahead)

    def __enter__(self) -> Self:
        if self._is_ahead:
            self._ahead = self._stack.enter_context(ReadAhead())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._readers.clear()

    def place(self, name: str) -> tuple[str, int]:
        """Sorts tensors as they lie: by file, then by offset."""
        return self._files[name].path.name, self.entries[name].begin

    def whole(self, name: str) -> Tensor:
        """A tensor in memory of its own."""
        return self._reader(name).whole(self.entries[name])

    def whole_as(self, entry: TensorEntry) -> Tensor:
        """As `whole`, of one of the entries with another dtype and shape of as many bytes."""
        return self._reader(entry.name).whole(entry)

    def rows(self, name: str, begin: int, end: int) -> Iterator[tuple[int, Tensor]]:
        """As `TensorReader.pieces`."""
        return self._reader(name).pieces(self.entries[name], begin, end)

    def rows_as(self, entry: TensorEntry, begin: int, end: int) -> Iterator[tuple[int, Tensor]]:
        """As `rows`, of one of the entries with another shape of as many bytes."""
        return self._reader(entry.name).pieces(entry, begin, end)

    def _reader(self, name: str) -> TensorReader:
        file = self._files[name]
        if file not in self._readers:
            self._readers[file] = self._stack.enter_context(TensorReader(file, self._ahead))
        return self._readers[file]
