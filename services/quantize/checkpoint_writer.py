"""Writes a checkpoint's files anew, tensor by tensor: beside the open file there is one piece of a tensor in memory."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from services.quantize.compressed import Scheme, Stored, codes_of, stored_tensors
from services.quantize.rescaling import Rescaling
from services.quantize.rounding import quantize_narrowed
from shared.kernels.linear_spec import LinearSpec
from shared.kernels.quantized import quantize_rows
from shared.model.weights.safetensors_files import INDEX_FILE, STORED, SafetensorsFile, TensorEntry
from shared.model.weights.tensor_reader import TensorReader

OnProgress = Callable[[int, int], None]
"""Called with (read_bytes, total_bytes) of the checkpoint after each tensor."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")
"""Ends of the names of files with weights, of which none is carried along."""
_OWN_CONTENT = ("config.json", INDEX_FILE)


@dataclass(frozen=True)
class Task:
    """What becomes of a checkpoint's tensors, by their names as a checkpoint of text alone has them."""

    scheme: Scheme
    specs: Mapping[str, LinearSpec]
    """Forms of the weights that are rounded; the rest is copied."""
    rescalings: Mapping[str, Rescaling]
    """Rescalings of the weights that are multiplied before."""


@dataclass(frozen=True)
class _Tensor:
    """One tensor of a file, with its own name in it."""

    name: str
    entry: TensorEntry


def write_weights(files: Sequence[SafetensorsFile], out: Path, task: Task, on_progress: OnProgress) -> int:
    """Writes each file under its name, and an index where there are several; returns the bytes of all tensors."""
    total = sum(entry.num_bytes for file in files for entry in file.entries)
    weight_map: dict[str, str] = {}
    done = written = 0
    for file in files:
        tensors = _tensors(file)
        places, size = _places(tensors, task)
        written += size
        weight_map |= dict.fromkeys(places, file.path.name)
        with TensorReader(file) as reader, (out / file.path.name).open("wb") as sink:
            begin = _write_header(sink, places)
            for tensor in tensors:
                for name, offset, content in _contents(tensor, reader, task):
                    sink.seek(begin + places[name].begin + offset)
                    sink.write(content.contiguous().flatten().view(torch.uint8).numpy().data)
                done += tensor.entry.num_bytes
                on_progress(done, total)
    if len(files) > 1:
        index = {"metadata": {"total_size": written}, "weight_map": weight_map}
        (out / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return written


def copy_others(source: Path, out: Path) -> None:
    """Copies the tokenizer and whatever else lies beside the weights."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix not in WEIGHTS and path.name not in _OWN_CONTENT and path.name[0] != ".":
            shutil.copyfile(path, out / path.name)


def raw_names(file: SafetensorsFile) -> list[str]:
    """Names of a file's tensors as they stand in it, in the order of its entries."""
    return [name for name in json.loads(file.header) if name != "__metadata__"]


def module_of(name: str) -> str:
    """The module that a tensor belongs to."""
    return name.rpartition(".")[0]


def _tensors(file: SafetensorsFile) -> list[_Tensor]:
    return [_Tensor(name, entry) for name, entry in zip(raw_names(file), file.entries, strict=True)]


@dataclass(frozen=True)
class _Place:
    stored: Stored
    begin: int  # behind the header
    num_bytes: int


def _places(tensors: Sequence[_Tensor], task: Task) -> tuple[dict[str, _Place], int]:
    """Where each tensor of the new file lies, by its name in it; and the bytes of all."""
    wanted: list[tuple[str, Stored]] = []
    for tensor in tensors:
        entry, spec = tensor.entry, task.specs.get(tensor.entry.name)
        if spec is None:
            wanted.append((tensor.name, Stored(entry.dtype, entry.shape)))
            continue
        for end, stored in stored_tensors(task.scheme, spec, entry.shape, entry.dtype).items():
            wanted.append((f"{module_of(tensor.name)}.{end}", stored))
    # Readers view bytes as numbers: those of the widest come first, so that none lies askew.
    wanted.sort(key=lambda item: -STORED[item[1].dtype].num_bytes if item[1].dtype in STORED else 0)
    places, begin = {}, 0
    sizes = {tensor.name: tensor.entry.num_bytes for tensor in tensors}
    for name, stored in wanted:
        known = STORED.get(stored.dtype)
        num_bytes = sizes[name] if known is None else math.prod(stored.shape) * known.num_bytes
        places[name] = _Place(stored, begin, num_bytes)
        begin += num_bytes
    return places, begin


def _write_header(sink: BinaryIO, places: Mapping[str, _Place]) -> int:
    """Returns where the tensors begin."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for name, place in places.items():
        offsets = [place.begin, place.begin + place.num_bytes]
        fields[name] = {"dtype": place.stored.dtype, "shape": list(place.stored.shape), "data_offsets": offsets}
    header = json.dumps(fields, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    sink.write(len(header).to_bytes(8, "little") + header)
    return 8 + len(header)


def _contents(tensor: _Tensor, reader: TensorReader, task: Task) -> Iterator[tuple[str, int, Tensor]]:
    """(name of the new tensor, offset in it, bytes) of all that becomes of a tensor."""
    entry = tensor.entry
    spec, rescaling = task.specs.get(entry.name), task.rescalings.get(entry.name)
    if spec is None:
        yield from _copied(tensor, reader, rescaling)
        return
    ends = list(stored_tensors(task.scheme, spec, entry.shape, entry.dtype))
    module, offset = module_of(tensor.name), 0
    scales: list[Tensor] = []
    for first, rows in reader.pieces(entry, 0, entry.shape[0]):
        weight = rows.float() if rescaling is None else rescaling.apply(rows.float(), first)
        if spec.kind == "int4":
            importance = None if rescaling is None else rescaling.importance
            piece = quantize_narrowed(weight, spec, _scale_dtype(entry), importance)
        else:
            piece = quantize_rows(weight, spec, _scale_dtype(entry))
        codes = codes_of(task.scheme, piece)
        yield f"{module}.{ends[0]}", offset, codes
        offset += codes.nbytes
        scales.append(piece.scales)
    yield f"{module}.{ends[1]}", 0, torch.cat(scales).to(_scale_dtype(entry))
    for end in ends[2:]:
        yield f"{module}.{end}", 0, torch.tensor(entry.shape)


def _copied(tensor: _Tensor, reader: TensorReader, rescaling: Rescaling | None) -> Iterator[tuple[str, int, Tensor]]:
    entry = tensor.entry
    if entry.dtype not in STORED or not entry.shape:
        yield tensor.name, 0, reader.whole(replace(entry, dtype="U8", shape=(entry.num_bytes,)))
        return
    offset = 0
    for first, rows in reader.pieces(entry, 0, entry.shape[0]):
        content = rows if rescaling is None else rescaling.apply(rows.float(), first).to(rows.dtype)
        yield tensor.name, offset, content
        offset += content.nbytes


def _scale_dtype(entry: TensorEntry) -> torch.dtype:
    """Scales have the dtype of the weight that they are of."""
    found: torch.dtype = getattr(torch, STORED[entry.dtype].torch_name)
    return found
