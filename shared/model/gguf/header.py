"""The header of a GGUF file: its metadata, and where its tensors lie.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from shared.errors import ModelLoadError
from shared.model.config.folder import GGUF_MAGIC
from shared.model.gguf.blocks import TYPES

Value = int | float | bool | str | list["Value"]
"""Value of one entry of the metadata."""

_VERSIONS = (2, 3)
_MOST_BYTES = 256 << 20
"""Most bytes of a header; vocabularies are its largest part."""
_MOST_DIMS = 4
_MOST_NUMBERS = 4096
"""Of a tensor that is read with the header."""
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of a file."""

    name: str  # as the file has it
    type: str  # of `TYPES`
    shape: tuple[int, ...]  # the last dimension lies side by side
    begin: int  # byte offset in the file
    num_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    """A file's checked header."""

    path: Path
    raw: bytes  # as it lies in the file
    num_bytes: int  # of the file
    metadata: dict[str, Value]
    tensors: tuple[GgufTensor, ...]

    def numbers(self, name: str) -> list[float] | None:
        """The numbers of a short tensor in fp32; None where there is none of that name. Raises ModelLoadError
        (`tensor`) for one of another kind, or that cannot be read."""
        tensor = next((tensor for tensor in self.tensors if tensor.name == name), None)
        if tensor is None:
            return None
        if tensor.type != "F32" or tensor.num_bytes > _MOST_NUMBERS * 4:
            raise ModelLoadError(f"{name} must be at most {_MOST_NUMBERS} numbers in F32", tensor=name)
        try:
            with self.path.open("rb") as file:
                file.seek(tensor.begin)
                return list(struct.unpack(f"<{tensor.num_bytes // 4}f", file.read(tensor.num_bytes)))
        except (OSError, struct.error) as error:
            raise ModelLoadError(f"{name} cannot be read: {error}", tensor=name) from error


def read_gguf(path: Path) -> GgufHeader:
    """Reads and checks a header against the file's size.

    Raises:
        ModelLoadError: the file is no GGUF, of another version, corrupt or truncated (`file`), or has a tensor of a
            type that is not read (`tensor`).
    """
    try:
        with path.open("rb") as file:
            return _read(path, file)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error}", file=path.name) from error


def _read(path: Path, file: BinaryIO) -> GgufHeader:
    num_bytes = path.stat().st_size
    cursor = _Cursor(path, file, min(num_bytes, _MOST_BYTES))
    if cursor.take(4) != GGUF_MAGIC:
        raise cursor.fault("it does not begin with GGUF")
    version = cursor.number("I")
    if version not in _VERSIONS:
        raise ModelLoadError(
            f"{path} is of GGUF version {version}; supported: {', '.join(map(str, _VERSIONS))}", file=path.name
        )
    num_tensors, num_values = cursor.number("Q"), cursor.number("Q")
    metadata: dict[str, Value] = {}
    for _ in range(num_values):
        name = cursor.text()
        if name in metadata:
            raise cursor.fault(f"{name} is stored twice")
        metadata[name] = cursor.value(cursor.number("I"))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or isinstance(alignment, bool) or not 1 <= alignment <= 1 << 16:
        raise cursor.fault(f"general.alignment is {alignment!r}")
    infos = [cursor.tensor() for _ in range(num_tensors)]
    header_bytes = cursor.place
    start = -(-header_bytes // alignment) * alignment
    tensors = tuple(_placed(path, info, start, num_bytes) for info in infos)
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise cursor.fault("a tensor is stored twice")
    file.seek(0)
    return GgufHeader(path, file.read(header_bytes), num_bytes, metadata, tensors)


def _placed(path: Path, info: tuple[str, tuple[int, ...], int, int], start: int, file_bytes: int) -> GgufTensor:
    name, shape, number, offset = info
    kind = TYPES.get(number)
    if kind is None:
        known = ", ".join(each.name for each in TYPES.values())
        raise ModelLoadError(
            f"{path}: {name} is stored in a type with number {number}, which is not supported; supported: {known}",
            file=path.name,
            tensor=name,
        )
    if not all(shape) or shape[-1] % kind.block:
        raise ModelLoadError(
            f"{path}: {name} has shape {list(shape)}: empty, or its rows are no whole blocks of {kind.block}",
            file=path.name,
            tensor=name,
        )
    num_bytes = math.prod(shape) // kind.block * kind.num_bytes
    if start + offset + num_bytes > file_bytes:
        raise ModelLoadError(
            f"{path} is truncated: {name} ends at byte {start + offset + num_bytes}, the file at {file_bytes}",
            file=path.name,
            tensor=name,
        )
    return GgufTensor(name, kind.name, shape, start + offset, num_bytes)


class _Cursor:
    """Reads a header from its begin to its end."""

    def __init__(self, path: Path, file: BinaryIO, most_bytes: int) -> None:
        """`file`: at its begin, of which `most_bytes` may be read."""
        self.place = 0
        self._path = path
        self._file = file
        self._most_bytes = most_bytes

    def fault(self, problem: str) -> ModelLoadError:
        return ModelLoadError(f"{self._path} is corrupt or truncated: {problem}", file=self._path.name)

    def take(self, count: int) -> bytes:
        content = self._file.read(count) if count <= self._most_bytes - self.place else b""
        if len(content) < count:
            raise self.fault(f"its header is cut off, or longer than {_MOST_BYTES >> 20} MiB")
        self.place += count
        return content

    def number(self, code: str) -> int:
        return int(struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0])

    def text(self) -> str:
        try:
            return self.take(self.number("Q")).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fault(f"a string is no UTF-8 ({error})") from error

    def value(self, kind: int) -> Value:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            of = self.number("I")
            count = self.number("Q")
            if of == _STRING:
                self._check_room(count, 8)
                return [self.text() for _ in range(count)]
            if of not in _SCALARS:
                raise self.fault(f"an array of type {of}")
            size = struct.calcsize(f"<{_SCALARS[of]}")
            self._check_room(count, size)
            return list(struct.unpack(f"<{count}{_SCALARS[of]}", self.take(count * size)))
        if kind not in _SCALARS:
            raise self.fault(f"a value of type {kind}")
        found: Value = struct.unpack(f"<{_SCALARS[kind]}", self.take(struct.calcsize(f"<{_SCALARS[kind]}")))[0]
        return found

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """(name, shape, number of its type, offset)."""
        name, num_dims = self.text(), self.number("I")
        if not 1 <= num_dims <= _MOST_DIMS:
            raise self.fault(f"{name} has {num_dims} dimensions")
        shape = tuple(self.number("Q") for _ in range(num_dims))[::-1]
        return name, shape, self.number("I"), self.number("Q")

    def _check_room(self, count: int, size: int) -> None:
        if count > (self._most_bytes - self.place) // size:
            raise self.fault(f"an array of {count} does not fit in its header")
