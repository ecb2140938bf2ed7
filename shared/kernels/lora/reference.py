"""Low-rank additions in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from shared.kernels.lora.parts import LoraPart
from shared.kernels.lora.rows import LoraRows
from shared.kernels.lora.step import Lora


@dataclass(frozen=True, eq=False)
class PlainLora:
    """See `Lora`: the parts as they are, in the model's dtype."""

    parts: tuple[LoraPart, ...]

    @property
    def nbytes(self) -> int:
        """See `Lora`."""
        return sum(part.a.nbytes + part.b.nbytes for part in self.parts)


def make_plain_lora(parts: Sequence[LoraPart], in_size: int, like: Tensor) -> PlainLora:
    """`LoraOps.make_lora` of the backends that multiply by weights as they are."""
    check_parts(parts, in_size)
    return PlainLora(tuple(LoraPart(part.a.to(like), part.b.to(like), part.scale, part.begin) for part in parts))


def check_parts(parts: Sequence[LoraPart], in_size: int) -> None:
    """Asserts what `make_lora` asks for."""
    end = 0
    for part in parts:
        assert part.a.shape[1] == in_size, f"{tuple(part.a.shape)} beside {in_size} columns of x"
        assert part.b.shape[1] == part.a.shape[0], f"ranks {part.b.shape[1]} and {part.a.shape[0]}"
        assert part.begin >= end, "parts overlap, or are not in order"
        end = part.begin + part.b.shape[0]


def check_add_lora(out: Tensor, x: Tensor, loras: Sequence[Lora | None], rows: LoraRows) -> None:
    """Asserts what `add_lora` asks for."""
    assert out.dim() == x.dim() == 2
    assert out.shape[0] == x.shape[0]
    assert out.dtype == x.dtype
    assert out.is_contiguous()
    assert x.is_contiguous()
    assert len(loras) == len(rows.starts) - 1
    assert rows.num_rows <= x.shape[0]


def add_lora(out: Tensor, x: Tensor, loras: Sequence[Lora | None], rows: LoraRows) -> None:
    """See `LoraOps`."""
    check_add_lora(out, x, loras, rows)
    for lora, begin, end in zip(loras, rows.starts, rows.starts[1:], strict=False):
        if lora is None or begin == end:
            continue
        assert isinstance(lora, PlainLora)
        own = rows.order[begin:end]
        wide = x.index_select(0, own).float()
        for part in lora.parts:
            delta = (wide @ part.a.float().t()) @ part.b.float().t() * part.scale
            last = part.begin + delta.shape[1]
            out[own, part.begin : last] = (out[own, part.begin : last].float() + delta).to(out.dtype)
