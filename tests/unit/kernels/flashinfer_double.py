"""FlashInfer's two paged wrappers by their documentation, computed in torch: what ours must call, and with what.

Signatures and meaning of the arguments follow https://docs.flashinfer.ai/api/attention.html, as far as we use them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class _Wrapper:
    def __init__(self, library: Double, name: str, workspace: Tensor, layout: str) -> None:
        assert layout == "HND"
        assert workspace.dtype == torch.uint8
        assert not workspace.any()  # zeros before the first use
        self._library, self._name = library, name
        self._planned: SimpleNamespace | None = None

    def _note(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._library.calls.append((self._name, method, args, kwargs))

    def _keep(self, query_start: Tensor, start: Tensor, pages: Tensor, last: Tensor, **rest: Any) -> None:
        for lengths in (query_start, start, last):
            assert lengths.dtype == torch.int32
            assert lengths.device.type == "cpu"
        assert pages.dtype == torch.int32
        assert pages.shape == (int(start[-1]),)
        self._planned = SimpleNamespace(query_start=query_start, start=start, pages=pages, last=last, **rest)

    def run(self, q: Tensor, paged_kv_cache: Tensor) -> Tensor:
        self._note("run", (q, paged_kv_cache), {})
        plan = self._planned
        assert plan is not None
        assert q.dtype == plan.q_data_type
        assert paged_kv_cache.dtype == plan.kv_data_type
        assert q.shape == (int(plan.query_start[-1]), plan.num_heads, plan.head_dim)
        assert paged_kv_cache.shape[1:] == (2, plan.num_kv_heads, plan.page_size, plan.head_dim)
        output = torch.empty_like(q)
        for seq in range(len(plan.last)):
            rows = slice(int(plan.query_start[seq]), int(plan.query_start[seq + 1]))
            pages = plan.pages[int(plan.start[seq]) : int(plan.start[seq + 1])].long()
            kv_len = (len(pages) - 1) * plan.page_size + int(plan.last[seq])
            # [2, kv_len, num_kv_heads, head_dim]
            kv = paged_kv_cache[pages].permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :kv_len].double()
            output[rows] = _attend(q[rows].double(), kv, plan.sm_scale, plan.window_left).to(q.dtype)
        return output


def _attend(query: Tensor, kv: Tensor, scale: float, window_left: int) -> Tensor:
    query_len, kv_len = len(query), kv.shape[1]
    keys, values = kv.repeat_interleave(query.shape[1] // kv.shape[2], dim=2)
    own = torch.arange(kv_len - query_len, kv_len)[:, None]
    seen = torch.arange(kv_len) <= own
    if window_left >= 0:
        seen &= torch.arange(kv_len) >= own - window_left  # inclusive
    scores = torch.einsum("qhd,khd->hqk", query, keys) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), values)


class Double:
    """Stands for the module flashinfer; `calls` are (class, method, arguments) in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, tuple[Any, ...], dict[str, Any]]] = []

    def planned(self) -> list[str]:
        return [name for name, method, _, _ in self.calls if method == "plan"]

    def BatchDecodeWithPagedKVCacheWrapper(self, *args: Any, **kwargs: Any) -> _Decode:  # noqa: N802  # a class there
        self.calls.append(("BatchDecodeWithPagedKVCacheWrapper", "__init__", args, kwargs))
        return _Decode(self, *args, **kwargs)

    def BatchPrefillWithPagedKVCacheWrapper(self, *args: Any, **kwargs: Any) -> _Prefill:  # noqa: N802
        self.calls.append(("BatchPrefillWithPagedKVCacheWrapper", "__init__", args, kwargs))
        return _Prefill(self, *args, **kwargs)


class _Decode(_Wrapper):
    def __init__(
        self, library: Double, float_workspace_buffer: Tensor, kv_layout: str, use_tensor_cores: bool = False
    ) -> None:
        super().__init__(library, "BatchDecodeWithPagedKVCacheWrapper", float_workspace_buffer, kv_layout)

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **options: Any,
    ) -> None:
        sizes = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self._note("plan", (indptr, indices, last_page_len, *sizes), options)
        names = ("num_heads", "num_kv_heads", "head_dim", "page_size")
        one_each = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        self._keep(one_each, indptr, indices, last_page_len, **dict(zip(names, sizes, strict=True)), **options)


class _Prefill(_Wrapper):
    def __init__(self, library: Double, float_workspace_buffer: Tensor, kv_layout: str) -> None:
        super().__init__(library, "BatchPrefillWithPagedKVCacheWrapper", float_workspace_buffer, kv_layout)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        **options: Any,
    ) -> None:
        assert causal
        sizes = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        pages = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._note("plan", (qo_indptr, *pages, *sizes), {"causal": causal, **options})
        names = ("num_heads", "num_kv_heads", "head_dim", "page_size")
        self._keep(qo_indptr, *pages, **dict(zip(names, sizes, strict=True)), **options)
