"""The safetensors files of a model folder: their names and their validated headers.

Format: 8 bytes little-endian header length, a JSON header (name → dtype, shape, byte range), then the data.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ModelLoadError
from shared.kernels.cpu.beside_steps import pause
from shared.model.config.folder import GGUF_FILE, check_is_content, other_weights
from shared.model.config.json_fields import read_json_object
from shared.model.gguf.architectures import OF_POSITIONS, added_to, heads_of, plain_names
from shared.model.gguf.header import read_gguf

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_OF_TEXT = {"language_model.model.": "model.", "model.language_model.": "model.", "language_model.lm_head": "lm_head"}
"""How names of the text part begin in a checkpoint that reads images too → what they are without images."""
_IN_OTHERS = tuple(_OF_TEXT)
_SPARSE = ".block_sparse_moe."
_DENSE_AMONG_SPARSE = re.compile(re.escape(_SPARSE) + r"((?:gate|up|down)_proj)\b")
"""How transformers 5 saves a dense block of Kimi Linear, which is published as `mlp`."""
_EXPERT_AMONG_SPARSE = re.compile(re.escape(_SPARSE) + r"experts\.(\d+)\.(gate|up|down)_proj\b")
_PUBLISHED = {"gate": "w1", "up": "w3", "down": "w2"}
"""How tools that compress Mixtral as transformers 5 computes it name its experts → how they are published."""
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100 * 1024 * 1024  # the format's own limit


@dataclass(frozen=True)
class StoredDtype:
    """One of the format's element types."""

    num_bytes: int
    torch_name: str


STORED = {
    "F64": StoredDtype(8, "float64"),
    "F32": StoredDtype(4, "float32"),
    "F16": StoredDtype(2, "float16"),
    "BF16": StoredDtype(2, "bfloat16"),
    "F8_E4M3": StoredDtype(1, "float8_e4m3fn"),
    "I64": StoredDtype(8, "int64"),
    "I32": StoredDtype(4, "int32"),
    "I16": StoredDtype(2, "int16"),
    "I8": StoredDtype(1, "int8"),
    "U8": StoredDtype(1, "uint8"),
    "BOOL": StoredDtype(1, "bool"),
}
"""Dtypes by their names in the header."""
DENSE = ("F64", "F32", "F16", "BF16")
"""Dtypes of weights that are stored as plain numbers, and of scales."""

_OF_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file."""

    name: str  # as a checkpoint of text alone has it
    dtype: str  # as in the header, such as BF16
    shape: tuple[int, ...]
    begin: int  # byte offset in the file
    num_bytes: int
    paired_heads: int = 0  # heads whose rotated rows lie in pairs, as GGUF's do of some families; 0: in halves
    added: float = 0.0  # to each number, as to GGUF's norms of some families


@dataclass(frozen=True, eq=False)  # a hash over all entries would be taken anew for each tensor that is read
class SafetensorsFile:
    """One file's checked header."""

    path: Path
    header: bytes  # the unparsed JSON
    num_bytes: int  # size of the file
    entries: tuple[TensorEntry, ...]


def checkpoint_files(folder: Path) -> list[SafetensorsFile]:
    """Read the headers of a folder's weights: one file, or the shards in the index, in name order; or of `model.gguf`.

    Raises:
        ModelLoadError: no weights, a shard that is missing, or a file that is corrupt or truncated; `file`
            names it.
    """
    if (folder / SINGLE_FILE).is_file():
        return [read_header(folder / SINGLE_FILE)]
    if (folder / GGUF_FILE).is_file():
        return [_read_gguf(folder / GGUF_FILE)]
    if not (folder / INDEX_FILE).is_file():
        raise ModelLoadError(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}{other_weights(folder)}", field="model"
        )
    weight_map = read_json_object(folder / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelLoadError(
            f"{folder / INDEX_FILE}: weight_map must map tensor names to files",
            field="weight_map",
            file=INDEX_FILE,
        )
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name:
            raise ModelLoadError(f"{INDEX_FILE} names {name}, which is not a plain file name", file=INDEX_FILE)
        if not (folder / name).is_file():
            raise ModelLoadError(f"{INDEX_FILE} names {name}, which is missing from {folder}", file=name)
    return [read_header(folder / name) for name in names]


def read_header(path: Path) -> SafetensorsFile:
    """Read and check one file's header against the file's size.

    Raises:
        ModelLoadError: the file is corrupt or truncated, or a Git LFS pointer; `file` names it.
    """
    check_is_content(path)
    try:
        num_bytes = path.stat().st_size
        with path.open("rb") as file:
            header_len = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if num_bytes < _LENGTH_BYTES or header_len > min(_MAX_HEADER_BYTES, num_bytes - _LENGTH_BYTES):
                raise _corrupt(path, "its header is cut off")
            header = file.read(header_len)
    except OSError as error:
        raise _corrupt(path, str(error)) from error
    data_start = _LENGTH_BYTES + header_len
    try:
        fields = json.loads(header)
        fields.pop("__metadata__", None)
        entries = tuple(_entry(name, value, data_start) for name, value in fields.items())
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise _corrupt(path, f"its header is not valid ({error})") from error
    end = max((entry.begin + entry.num_bytes for entry in entries), default=data_start)
    if end != num_bytes:
        raise _corrupt(path, f"its header describes {end} bytes, the file has {num_bytes}")
    return SafetensorsFile(path=path, header=header, num_bytes=num_bytes, entries=entries)


def _read_gguf(path: Path) -> SafetensorsFile:
    """A GGUF file, its tensors by their names in Hugging Face layout, in its own types."""
    header = read_gguf(path)
    architecture = str(header.metadata.get("general.architecture", ""))
    entries = []
    for tensor in header.tensors:
        if tensor.name in OF_POSITIONS:
            continue
        names = plain_names(architecture, tensor.name, tensor.shape)
        shape = tensor.shape[1:] if len(tensor.shape) == 3 and _OF_ONE_EXPERT.search(names[0]) else tensor.shape
        num_bytes, heads = tensor.num_bytes // len(names), heads_of(header.metadata, tensor.name)
        added = added_to(architecture, tensor.name)
        for number, name in enumerate(names):
            begin = tensor.begin + number * num_bytes
            entries.append(TensorEntry(name, tensor.type, shape, begin, num_bytes, heads, added))
    return SafetensorsFile(path=path, header=header.raw, num_bytes=header.num_bytes, entries=tuple(entries))


def _entry(name: str, value: dict[str, object], data_start: int) -> TensorEntry:
    pause()  # of an adapter's header
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or not isinstance(shape, list) or not isinstance(offsets, list):
        raise TypeError(f"{name}: wrong types")
    begin, end = (int(offset) for offset in offsets)
    dims = tuple(int(dim) for dim in shape)
    if begin < 0 or end < begin or any(dim < 0 for dim in dims):
        raise ValueError(f"{name}: negative size")
    if dtype in STORED and math.prod(dims) * STORED[dtype].num_bytes != end - begin:
        raise ValueError(f"{name}: {dtype} of shape {list(dims)} does not take {end - begin} bytes")
    return TensorEntry(name=text_name(name), dtype=dtype, shape=dims, begin=data_start + begin, num_bytes=end - begin)


def text_name(name: str) -> str:
    """A tensor's or module's name as a checkpoint of text alone has it."""
    if name.startswith(_IN_OTHERS):
        prefix = next(filter(name.startswith, _OF_TEXT))
        return _OF_TEXT[prefix] + name.removeprefix(prefix)
    if _SPARSE not in name:
        return name
    name = _EXPERT_AMONG_SPARSE.sub(lambda found: f"{_SPARSE}experts.{found[1]}.{_PUBLISHED[found[2]]}", name)
    return _DENSE_AMONG_SPARSE.sub(r".mlp.\1", name)


def _corrupt(path: Path, problem: str) -> ModelLoadError:
    return ModelLoadError(f"{path} is corrupt or truncated: {problem}", file=path.name)
