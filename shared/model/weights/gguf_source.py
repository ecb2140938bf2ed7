"""The source of a weight in a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shared.errors import ModelLoadError
from shared.kernels.linear_spec import LinearSpec
from shared.kernels.quantized import Piece
from shared.model.gguf.blocks import BLOCKS
from shared.model.weights.checkpoint import Checkpoint
from shared.model.weights.safetensors_files import DENSE, TensorEntry
from shared.model.weights.sources import PIECE_ELEMENTS, OfOneTensor, check_entry


@dataclass(frozen=True)
class GgufSource(OfOneTensor):
    """A weight [out_size, in_size] in blocks along its rows, or one whose rows are put from pairs into halves."""

    @property
    def spec(self) -> LinearSpec | None:
        """See `WeightSource`; embeddings are opened."""
        of_blocks = BLOCKS.get(self.entry.dtype)
        return None if of_blocks is None or "embed_tokens" in self.entry.name else of_blocks.spec

    def check(self, checkpoint: Checkpoint) -> None:
        """Nothing small to read: scales lie between the codes, and are checked as they come."""

    def pieces(self, checkpoint: Checkpoint, begin: int, end: int) -> Iterator[tuple[int, Tensor | Piece]]:
        """See `WeightSource`."""
        out_size, in_size = self.entry.shape
        kind = BLOCKS.get(self.entry.dtype)
        rows = checkpoint.whole(self.name) if kind is None else self._raw(checkpoint)
        places = torch.arange(out_size)
        if self.entry.paired_heads:
            places = places.view(self.entry.paired_heads, -1, 2).transpose(1, 2).flatten()
        step = max(1, PIECE_ELEMENTS // in_size)
        for first in range(begin, end, step):
            own = rows[places[first : min(first + step, end)]]
            if kind is None or kind.open is None:
                yield first, own
                continue
            opened = kind.open(own.view(-1, in_size // kind.block, kind.num_bytes))
            if not all(bool(each.isfinite().all()) for each in (opened.scales, opened.zeros) if each is not None):
                raise ModelLoadError(f"{self.name} has scales that are no number: damaged", tensor=self.name)
            yield first, opened

    def _raw(self, checkpoint: Checkpoint) -> Tensor:
        """uint8 [out_size, bytes of a row]."""
        row_bytes = self.entry.num_bytes // self.entry.shape[0]
        return checkpoint.whole_as(replace(self.entry, dtype="U8", shape=(self.entry.shape[0], row_bytes)))


@dataclass(frozen=True)
class AddedSource(OfOneTensor):
    """Plain numbers to which the file has added one, which is taken away again."""

    spec: None = None

    def check(self, checkpoint: Checkpoint) -> None:
        """Nothing to read."""

    def pieces(self, checkpoint: Checkpoint, begin: int, end: int) -> Iterator[tuple[int, Tensor]]:
        """See `WeightSource`."""
        for first, piece in checkpoint.rows(self.name, begin, end):
            yield first, piece.float() - self.entry.added


@dataclass(frozen=True)
class StackedSource:
    """All experts' weights of a layer, inputs first [num_experts, in_size, out_size], or biases
    [num_experts, out_size]: of one tensor or, in turns, of gate and up, which have outputs first."""

    parts: tuple[TensorEntry, ...]
    spec: None = None

    @property
    def name(self) -> str:
        """See `WeightSource`."""
        return self.parts[0].name

    @property
    def names(self) -> tuple[str, ...]:
        """See `WeightSource`."""
        return tuple(part.name for part in self.parts)

    def check(self, checkpoint: Checkpoint) -> None:
        """Nothing small to read: scales lie between the codes, and are checked as they come."""

    def pieces(self, checkpoint: Checkpoint, begin: int, end: int) -> Iterator[tuple[int, Tensor]]:
        """See `WeightSource`; an expert at a time."""
        for expert in range(begin, end):
            found = [self._part(checkpoint, part, expert) for part in self.parts]
            yield expert, torch.stack(found, 1).flatten(0, 1).t()[None]

    def _part(self, checkpoint: Checkpoint, part: TensorEntry, expert: int) -> Tensor:
        """Of one expert: [out_size, in_size] or [out_size]."""
        num_bytes = part.num_bytes // part.shape[0]
        of_one = replace(part, shape=part.shape[1:], begin=part.begin + expert * num_bytes, num_bytes=num_bytes)
        if part.dtype not in BLOCKS:
            return checkpoint.whole_as(of_one).float()
        pieces = [piece for _, piece in GgufSource(of_one).pieces(checkpoint, 0, part.shape[1])]
        return torch.cat([piece if isinstance(piece, Tensor) else piece.dense() for piece in pieces])


_STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def stacked_source(name: str, shape: tuple[int, ...], entries: Mapping[str, TensorEntry]) -> StackedSource | None:
    """Of gpt-oss's experts; None for another tensor. Raises ModelLoadError for another shape."""
    prefix, _, own = name.rpartition(".")
    module, kind = own.removesuffix("_bias"), "bias" if own.endswith("_bias") else "weight"
    names = [f"{prefix}.{part}.{kind}" for part in _STACKED.get(module, ())]
    if not prefix.endswith(".experts") or not names or any(each not in entries for each in names):
        return None
    out_size = shape[-1] // len(names)
    for each in names:
        check_entry(entries[each], (shape[0], out_size, *shape[1:-1]), (*DENSE, *BLOCKS))
    return StackedSource(tuple(entries[each] for each in names))


def gguf_source(entry: TensorEntry, shape: tuple[int, ...]) -> GgufSource | AddedSource | None:
    """None for plain numbers as they are. Raises ModelLoadError for another shape."""
    if entry.added:
        check_entry(entry, shape, DENSE)
        return AddedSource(entry)
    if entry.dtype not in BLOCKS and not (entry.paired_heads and len(shape) == 2):
        return None
    check_entry(entry, shape, (entry.dtype,) if len(shape) == 2 else DENSE)
    if entry.paired_heads and entry.shape[0] % (2 * entry.paired_heads):
        raise ModelLoadError(
            f"{entry.name} has {entry.shape[0]} rows, which {entry.paired_heads} heads do not share", tensor=entry.name
        )
    return GgufSource(entry)
