"""Fill a decoder's parameters from safetensors files, and compute their fingerprint."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from pathlib import Path

from torch import Tensor

from shared.errors import ModelLoadError
from shared.model.config.json_fields import read_json_object
from shared.model.weights.safetensors_files import STORED, SafetensorsFile, TensorEntry, checkpoint_files
from shared.model.weights.tensor_reader import TensorReader

OnProgress = Callable[[int, int], None]
"""Called with (loaded_bytes, total_bytes) of the checkpoint after each tensor."""

TIED_NAME = "lm_head.weight"
TIED_SOURCE = "model.embed_tokens.weight"

_FLOAT_DTYPES = tuple(name for name, stored in STORED.items() if stored.weights is not None)
_SAMPLE_BYTES = 64 * 1024
_NAMES_SHOWN = 3
_HUGE_PAGES_SETTING = "THP_MEM_ALLOC_ENABLE"


def load_weights(
    folder: Path,
    targets: Mapping[str, Tensor],
    on_progress: OnProgress | None = None,
    unused: tuple[str, ...] = (),
) -> None:
    """Copy every checkpoint tensor into its target, in place, converting to the target's dtype and device.

    Beside the targets there is one piece of a tensor in memory, see `TensorReader`. All names and shapes are checked
    before the first byte is copied. The rotary frequencies of old checkpoints are skipped. An `lm_head.weight` beside a
    tied embedding must equal it.

    Args:
        folder: the model folder.
        targets: tensor name → tensor of the checkpoint's shape.
        on_progress: see `OnProgress`.
        unused: how the names of tensors begin that may be there and are not read.

    Raises:
        ModelLoadError: weights missing or corrupt (`file`), tensors missing or unexpected (`tensor`, `count`),
            or of a wrong shape or dtype (`tensor`).
    """
    files = checkpoint_files(folder)
    entries = match_entries(files, targets, unused)
    tied_duplicate = TIED_NAME not in targets
    total_bytes = sum(entry.num_bytes for entry in entries.values())
    loaded_bytes = 0
    for file in files:
        with TensorReader(file) as reader:
            for entry in file.entries:
                if entries.get(entry.name) is not entry:
                    continue
                target = targets[entry.name]
                for first, piece in reader.pieces(entry, 0, entry.shape[0]):
                    target[first : first + len(piece)].copy_(piece)
                loaded_bytes += entry.num_bytes
                if on_progress is not None:
                    on_progress(loaded_bytes, total_bytes)
    if tied_duplicate:
        _check_tied_duplicate(files, targets[TIED_SOURCE])


def fingerprint(folder: Path, dtype: str) -> str:
    """A fast fingerprint of a model's content: equal for copies of a folder, different for other weights.

    Hashes the configuration, each file's header and size, and the first, middle and last 64 KiB of every
    tensor, so that a fine-tune of the same shape differs. Times and paths are ignored.

    Args:
        folder: the model folder.
        dtype: name of the compute dtype, such as `bfloat16`.

    Returns:
        32 hexadecimal digits.

    Raises:
        ModelLoadError: a file is missing, corrupt or truncated.
    """
    digest = blake2b(digest_size=16)

    def add(part: bytes) -> None:
        digest.update(len(part).to_bytes(8, "little") + part)

    add(dtype.encode())
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


def match_entries(
    files: Iterable[SafetensorsFile], targets: Mapping[str, Tensor], unused: tuple[str, ...] = ()
) -> dict[str, TensorEntry]:
    """The entry of each target, with every name, shape and dtype checked. Raises ModelLoadError, as `load_weights`."""
    found: dict[str, TensorEntry] = {}
    for file in files:
        for entry in file.entries:
            if entry.name in found:
                raise ModelLoadError(f"{entry.name} is stored twice", tensor=entry.name, file=file.path.name)
            found[entry.name] = entry
    _refuse_names("is missing from", [name for name in targets if name not in found])
    ignored = {name for name in found if name.endswith("rotary_emb.inv_freq")} | {TIED_NAME}
    extra = [name for name in found if name not in targets and name not in ignored and not name.startswith(unused)]
    _refuse_names("is not expected in", extra)
    for name, target in targets.items():
        entry = found[name]
        if entry.shape != tuple(target.shape):
            raise ModelLoadError(
                f"{name} has shape {list(entry.shape)}, expected {list(target.shape)}",
                tensor=name,
                expected=str(list(target.shape)),
                found=str(list(entry.shape)),
            )
        if entry.dtype not in _FLOAT_DTYPES:
            raise ModelLoadError(f"{name} is stored as {entry.dtype}, expected one of {_FLOAT_DTYPES}", tensor=name)
    return {name: found[name] for name in targets}


def _refuse_names(problem: str, names: list[str]) -> None:
    if not names:
        return
    shown = ", ".join(names[:_NAMES_SHOWN]) + (", …" if len(names) > _NAMES_SHOWN else "")
    raise ModelLoadError(
        f"{len(names)} tensor(s) whose name {problem} the checkpoint: {shown}",
        tensor=names[0],
        count=len(names),
    )


def _check_tied_duplicate(files: Iterable[SafetensorsFile], embedding: Tensor) -> None:
    for file in files:
        for entry in file.entries:
            if entry.name == TIED_NAME and not _is_stored(file, entry, embedding):
                raise ModelLoadError(
                    f"{TIED_NAME} differs from {TIED_SOURCE} although tie_word_embeddings is true",
                    field="tie_word_embeddings",
                    tensor=TIED_NAME,
                )


def _is_stored(file: SafetensorsFile, entry: TensorEntry, tensor: Tensor) -> bool:
    """Whether a file's tensor is this one, once it is converted."""
    if entry.shape != tuple(tensor.shape) or entry.dtype not in _FLOAT_DTYPES:
        return False
    with TensorReader(file) as reader:
        return all(
            piece.to(tensor).equal(tensor[first : first + len(piece)])
            for first, piece in reader.pieces(entry, 0, entry.shape[0])
        )


def ask_for_huge_pages() -> None:
    """Makes torch ask Linux for pages of 2 MiB instead of 4 KiB for large allocations.

    Weights are read from end to end, KV in scattered blocks. With small pages a core has to translate an address for
    every block and head, which in a virtual machine takes longer than reading the data. Torch reads the setting at its
    first allocation, so call this before; later it has no effect. A value set from outside, such as 0, is kept.
    """
    os.environ.setdefault(_HUGE_PAGES_SETTING, "1")
