"""The attention block of a layer: QKV projection, rotary embedding, KV write, attention, output projection."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.kernels.backend import DecoderOps
from shared.kernels.batch import AttentionBatch
from shared.kernels.cpu.torch_threads import in_this_thread
from shared.kernels.lora.step import Loras
from shared.kernels.pool_view import PoolView
from shared.model.config.model_config import ModelConfig
from shared.model.layers.modules import LayerModules, project


class AttentionBlock:
    """Grouped-query attention with rotary positions over paged KV, for every family without latents."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        layer: LayerModules,
        kernels: DecoderOps,
        place: tuple[int, int],
        number: int,
    ) -> None:
        """Keeps references to its arguments; `index` is the layer's number in the config, from 0, `place` one of
        `layer_places`, `number` that in blocks of all layers."""
        self._config = config
        self._kernels = kernels
        self._index = index
        self._group, self._row = place
        self._number = number
        self._layer = layer
        self._rope = config.ropes.index(config.layers[index].rope)
        self._window = config.layers[index].window
        self._is_chunked = config.layers[index].is_chunked
        self._temperature = config.temperature_encoding(index)
        self._norms_heads = config.qk_norm in ("head", "plain")
        self._is_gated = config.is_gated
        q_size = config.num_heads * config.head_dim * (2 if config.is_gated else 1)
        self._sizes = [q_size] + [config.num_kv_heads * config.head_dim] * 2

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """A token's shape of what `attend` reads, and of what it gives."""
        num_heads, head_dim = self._config.num_heads, self._config.head_dim
        return (num_heads, head_dim * (2 if self._is_gated else 1)), (num_heads * head_dim,)

    def place(
        self, x: Tensor, cos: Tensor, sin: Tensor, pool: PoolView, slots: Tensor, loras: Loras | None = None
    ) -> Tensor:
        """Write this step's K and V into `pool` and return the query, ready to attend.

        Args:
            x: [num_tokens, hidden_size], normalised.
            cos: [num_encodings, num_tokens, head_dim].
            sin: [num_encodings, num_tokens, head_dim].
            pool: of two planes, changed in place.
            slots: [num_tokens] int64, or of KV groups [num_groups, num_tokens]: `AttentionBatch.group_slots`.
            loras: what adapters add.

        Returns:
            [num_tokens, num_heads, head_dim], or where attention is gated, of 2 * head_dim, the gates behind.
        """
        config, layer = self._config, self._layer
        qkv = project(layer.qkv, x, loras, self._index, "qkv")
        parts = list(torch.split(qkv, self._sizes, dim=-1))
        if config.qk_norm == "whole":
            assert layer.q_norm is not None
            assert layer.k_norm is not None
            for part, norm in enumerate((layer.q_norm, layer.k_norm)):
                parts[part] = self._norm_whole(parts[part].contiguous(), norm)
        # each [num_tokens, num_heads or num_kv_heads, head_dim]
        gate = None
        if self._is_gated:
            with in_this_thread(parts[0], parts[0].numel()):
                query, gate = parts[0].view(x.shape[0], -1, 2, config.head_dim).unbind(2)
                parts[0] = query.flatten(1)
        query, key, value = (part.view(x.shape[0], -1, config.head_dim) for part in parts)
        placed = self._kernels.rotate_and_write(
            query,
            key,
            value,
            cos[self._rope],
            sin[self._rope],
            pool,
            self._row if slots.dim() == 2 else self._number,
            slots[self._group] if slots.dim() == 2 else slots,
            q_norm=layer.q_norm if self._norms_heads else None,
            k_norm=layer.k_norm if self._norms_heads else None,
            eps=config.rms_norm_eps,
        )
        if self._temperature is not None:
            with in_this_thread(placed, placed.numel()):
                placed *= cos[self._temperature][:, None]
        if gate is not None:
            with in_this_thread(placed, placed.numel()):
                return torch.cat((placed, gate), -1)
        return placed

    def _norm_whole(self, x: Tensor, norm: Tensor) -> Tensor:
        """[num_tokens, heads of this rank * head_dim] to the same, over the heads of all ranks."""
        group, eps = self._layer.group, self._config.rms_norm_eps
        if group is None:
            return self._kernels.rms_norm(x, norm, eps)
        with in_this_thread(x, x.numel()):
            squares = x.float().square().sum(-1, keepdim=True)
            group.all_reduce(squares)
            # Where several ranks hold a KV head, it counts on each of them, like every other.
            scale = torch.rsqrt(squares / (x.shape[1] * group.size) + eps)
            return (x.float() * scale).to(x.dtype) * norm

    def attend(self, query: Tensor, pool: PoolView, batch: AttentionBatch) -> Tensor:
        """What `place` gave to [num_tokens, num_heads * head_dim], over the K and V that it wrote."""
        config, gate = self._config, None
        if self._is_gated:
            with in_this_thread(query, query.numel()):
                query, gate = query[..., : config.head_dim].contiguous(), query[..., config.head_dim :]
        attended = self._kernels.paged_attention(
            query,
            pool,
            self._row if batch.groups else self._number,
            batch.groups[self._group] if batch.groups else batch,
            scale=config.attention_scale,
            window=self._window,
            softcap=config.softcap,
            sinks=self._layer.sinks,
            is_chunked=self._is_chunked,
        )
        if gate is None:
            return attended
        with in_this_thread(attended, attended.numel()):
            return attended * gate.sigmoid().flatten(1)

    def project(self, attended: Tensor, loras: Loras | None = None) -> Tensor:
        """[num_tokens, num_heads * head_dim] to [num_tokens, hidden_size]."""
        return project(self._layer.o, attended, loras, self._index, "o")
