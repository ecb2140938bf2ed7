"""FlashInfer's wrappers, each planned for one step at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shared.kernels.attention.flashinfer.pages import PagedSequences

WORKSPACE_BYTES = 128 << 20
"""For partial results of split sequences, as FlashInfer's documentation recommends. All wrappers of a device share it:
they run one after another on one stream."""
WRAPPERS = 2
"""Wrappers of each kind: the host plans a step while the one before runs. A plan holds until the next but one of its
kind."""
TENSOR_CORE_GROUP = 4
"""Least query heads a KV head for which decode attention uses the tensor cores."""


@dataclass(frozen=True)
class Shape:
    """Sizes that FlashInfer plans for, apart from the sequences."""

    is_decode: bool
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    window: int | None
    scale: float
    dtype: torch.dtype
    device: torch.device


@dataclass(eq=False)
class _Slot:
    """One wrapper with what its last plan was."""

    wrapper: Any
    plans: int = 0
    copied: torch.cuda.Event | None = None
    """Event behind the copies of the last plan, which read the wrapper's host memory: the next plan overwrites it."""


@dataclass(frozen=True, eq=False)
class Plan:
    """A step's plan: the layers with the same shape run it, until two more are made of that shape."""

    slot: _Slot
    number: int

    def run(self, query: Tensor, kv_pages: Tensor) -> Tensor:
        """[num_tokens, num_heads, head_dim] of [num_tokens, num_heads, head_dim] over one layer's
        [num_blocks, 2, num_kv_heads, block_size, head_dim]."""
        assert self.slot.plans == self.number, "FlashInfer's wrapper was planned anew before this step ended"
        output: Tensor = self.slot.wrapper.run(query, kv_pages)
        return output


class Wrappers:
    """Makes wrappers as shapes come up, and plans them in turns. For one thread."""

    def __init__(self, library: Any) -> None:
        """`library`: the module flashinfer."""
        self._library = library
        self._workspaces: dict[torch.device, Tensor] = {}
        self._slots: dict[Shape, list[_Slot]] = {}

    def plan(self, shape: Shape, seqs: PagedSequences) -> Plan:
        """Plans a step's attention on the host, and queues the copies of the plan."""
        slots = self._slots.setdefault(shape, [])
        if len(slots) < WRAPPERS:
            slots.append(_Slot(self._make(shape)))
        else:
            slots.append(slots.pop(0))  # the one that was planned longest ago
        slot = slots[-1]
        if slot.copied is not None:
            slot.copied.synchronize()
        plan = _plan_decodes if shape.is_decode else _plan_chunks
        plan(slot.wrapper, shape, seqs)
        slot.plans += 1
        if shape.device.type == "cuda":
            slot.copied = slot.copied or torch.cuda.Event()  # type: ignore[no-untyped-call]
            slot.copied.record(torch.cuda.current_stream(shape.device))
        return Plan(slot, slot.plans)

    def _make(self, shape: Shape) -> Any:
        workspace = self._workspaces.get(shape.device)
        if workspace is None:
            workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=shape.device)
            self._workspaces[shape.device] = workspace
        if not shape.is_decode:
            return self._library.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        uses_matrix_units = shape.num_heads // shape.num_kv_heads >= TENSOR_CORE_GROUP
        return self._library.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=uses_matrix_units)


def _plan_decodes(wrapper: Any, shape: Shape, seqs: PagedSequences) -> None:
    wrapper.plan(seqs.page_start, seqs.pages, seqs.last_page_lens, *_sizes(shape), **_options(shape))


def _plan_chunks(wrapper: Any, shape: Shape, seqs: PagedSequences) -> None:
    wrapper.plan(
        seqs.query_start, seqs.page_start, seqs.pages, seqs.last_page_lens, *_sizes(shape), causal=True,
        **_options(shape),
    )  # fmt: skip


def _sizes(shape: Shape) -> tuple[int, int, int, int]:
    return shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size


def _options(shape: Shape) -> dict[str, Any]:
    return {
        "q_data_type": shape.dtype,
        "kv_data_type": shape.dtype,
        "sm_scale": shape.scale,
        # Tokens before the query's own that it sees; our window counts its own too.
        "window_left": -1 if shape.window is None else shape.window - 1,
    }
