"""Launchers of the C++ kernels: assert what they need, take pointers, fall back where a shape does not fit vectors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64

import torch
from torch import Tensor

from shared.collectives.interface import Collectives
from shared.kernels.activation import reference as activations
from shared.kernels.activation.activations import GATES, SILU, Activation
from shared.kernels.attention import reference as attention
from shared.kernels.attention.contract import check_paged_attention
from shared.kernels.backend import Experts, Linear
from shared.kernels.batch import AttentionBatch
from shared.kernels.cpu.c_pool import CPool
from shared.kernels.cpu.coded import coded_linear
from shared.kernels.cpu.delta import delta_attention, fits_delta
from shared.kernels.cpu.experts import PackedBatchedLinear, PackedExperts, choose_experts, coded_experts
from shared.kernels.cpu.layer_stack import CpuLayerStack
from shared.kernels.cpu.linear import LANES, WideLinear, fits_panels, is_bf16, pack
from shared.kernels.cpu.lora import CpuLora, add_lora, fits_lora
from shared.kernels.cpu.torch_threads import in_this_thread
from shared.kernels.delta import reference as delta
from shared.kernels.delta_layer import DeltaLayer
from shared.kernels.experts.reference import PlainExperts
from shared.kernels.experts.routing_rules import Routing
from shared.kernels.latent import reference as latents
from shared.kernels.layer_stack import LayerSizes, LayerWeights
from shared.kernels.linear import PlainLinear
from shared.kernels.lora import reference as loras_reference
from shared.kernels.lora.parts import LoraPart
from shared.kernels.lora.rows import LoraRows
from shared.kernels.lora.step import Lora
from shared.kernels.opened import OpenedLinear
from shared.kernels.pool_view import PoolView
from shared.kernels.quantized import QuantizedWeight, Weight
from shared.kernels.rmsnorm import reference as rmsnorm
from shared.kernels.rotary import reference as rotary
from shared.kernels.sampling import reference as sampling
from shared.kernels.sampling.history import Penalties, TokenHistory, check_count_tokens, check_penalize
from shared.kernels.sampling.reference import check_greedy_tokens, check_mask_tokens
from shared.kernels.sampling.rows import SamplingRows

LONGEST_SAMPLED = 1 << 22
"""Tokens of a vocabulary that the sampling kernel can count."""

MOST_ROTATED, MOST_RANK = 512, 2048
"""Most elements of a head, and of a latent: as in source/elementwise.cpp."""


class CpuOps:
    """`DecoderOps` on the CPU in fp32 or bf16. Every product and sum is taken in fp32, whatever the dtype."""

    is_deterministic = False
    serves_latents = True

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self._has_bf16 = bool(torch.cpu._is_avx512_bf16_supported())

    def make_linear(self, weight: Tensor, bias: Tensor | None, *, own: bool) -> Linear:
        """See `DecoderOps`. A weight that does not fit vectors is left to torch."""
        if fits_panels(weight):
            return pack(lambda: self.library, weight if own else weight.clone(), bias)
        if weight.dtype == torch.bfloat16 and not self._has_bf16:
            return WideLinear(weight, bias)
        return PlainLinear(weight, bias)

    def make_experts(
        self, gate_up: Tensor, down: Tensor, first_expert: int, *, own: bool, activation: Activation = SILU
    ) -> PackedExperts:
        """See `DecoderOps`."""
        return PackedExperts(lambda: self.library, gate_up, down, first_expert, own=own, activation=activation)

    def make_quantized_linear(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        """See `DecoderOps`. A form or size that the kernels do not read is opened by torch."""
        return coded_linear(lambda: self.library, weight, bias, dtype) or OpenedLinear(weight, bias, dtype)

    def make_quantized_experts(
        self, gate_up: Weight, down: Weight, first_expert: int, dtype: torch.dtype, activation: Activation = SILU
    ) -> Experts:
        """See `DecoderOps`; as `make_quantized_linear`."""
        coded = coded_experts(lambda: self.library, gate_up, down, first_expert, dtype, activation)
        return coded or PlainExperts(gate_up, down, first_expert, activation)

    def choose_experts(self, logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
        """See `DecoderOps`."""
        return choose_experts(lambda: self.library, logits, bias, routing)

    def make_batched_linear(self, weight: Tensor, *, own: bool) -> PackedBatchedLinear:
        """See `DecoderOps`."""
        return PackedBatchedLinear(lambda: self.library, weight, own=own)

    def make_lora(self, parts: Sequence[LoraPart], in_size: int, like: Tensor) -> Lora:
        """See `LoraOps`. Sizes that do not fit vectors are left to torch."""
        if fits_lora(parts, in_size):
            return CpuLora(parts, in_size, like)
        return loras_reference.make_plain_lora(parts, in_size, like)

    def add_lora(self, out: Tensor, x: Tensor, loras: Sequence[Lora | None], rows: LoraRows) -> None:
        """See `LoraOps`."""
        # Of a fused projection the parts of one adapter may fit vectors, and those of another not.
        loras_reference.add_lora(out, x, [None if isinstance(lora, CpuLora) else lora for lora in loras], rows)
        add_lora(self.library, out, x, [lora if isinstance(lora, CpuLora) else None for lora in loras], rows)

    def stack_layers(
        self, layers: Sequence[LayerWeights], last_norm: Tensor, sizes: LayerSizes, group: Collectives | None = None
    ) -> CpuLayerStack | None:
        """See `StacksLayers`; `group` as in `CpuLayerStack.build`."""
        return CpuLayerStack.build(lambda: self.library, layers, last_norm, sizes, group)

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float, *, is_centered: bool = False) -> Tensor:
        """See `DecoderOps`."""
        if weight is None or x.shape[-1] % LANES or not x.is_contiguous():
            return rmsnorm.rms_norm(x, weight, eps, is_centered=is_centered)
        out = torch.empty_like(x)
        self._norm(x, None, weight, out, None, eps, is_centered)
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, *, is_centered: bool = False
    ) -> tuple[Tensor, Tensor]:
        """See `DecoderOps`."""
        assert x.shape == residual.shape, f"{tuple(x.shape)} and {tuple(residual.shape)}"
        if weight is None:
            with in_this_thread(x, x.numel()):
                return rmsnorm.add_rms_norm(x, residual, None, eps)
        if x.shape[-1] % LANES or not x.is_contiguous() or not residual.is_contiguous():
            return rmsnorm.add_rms_norm(x, residual, weight, eps, is_centered=is_centered)
        out, total = torch.empty_like(x), torch.empty_like(x)
        self._norm(x, residual, weight, out, total, eps, is_centered)
        return out, total

    def _norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        out: Tensor,
        total: Tensor | None,
        eps: float,
        is_centered: bool,
    ) -> None:
        size = x.shape[-1]
        assert weight.shape == (size,), f"weight {tuple(weight.shape)} for rows of {size}"
        assert weight.dtype == x.dtype, f"weight {weight.dtype} for {x.dtype}"
        rows = x.numel() // size
        pointers = (x.data_ptr(), _pointer(residual), weight.data_ptr(), out.data_ptr(), _pointer(total))
        self.library.tandem_rms_norm(*pointers, rows, size, eps, is_centered, is_bf16(x))

    def delta_attention(self, projected: Tensor, layer: DeltaLayer, pool: PoolView, batch: AttentionBatch) -> Tensor:
        """See `DecoderOps`."""
        if fits_delta(layer):
            return delta_attention(self.library, projected, layer, pool, batch)
        with in_this_thread(projected, batch.num_seqs * layer.state_elements + projected.numel()):
            return delta.delta_attention(projected, layer, pool, batch)

    def act_and_mul(self, gate_up: Tensor, activation: Activation = SILU) -> Tensor:
        """See `DecoderOps`."""
        rows, both = gate_up.shape
        if both % (2 * LANES):
            return activations.act_and_mul(gate_up, activation)
        assert gate_up.is_contiguous(), "gate_up is strided"
        out = torch.empty((rows, both // 2), dtype=gate_up.dtype)
        rule = (GATES.index(activation.gate), activation.alpha, activation.limit)
        self.library.tandem_act_and_mul(gate_up.data_ptr(), out.data_ptr(), rows, both // 2, *rule, is_bf16(gate_up))
        return out

    def rotate_and_write(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cos: Tensor,
        sin: Tensor,
        pool: PoolView,
        layer: int,
        slots: Tensor,
        *,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        """See `DecoderOps`."""
        num_tokens, num_heads, head_dim = query.shape
        if head_dim % (2 * LANES) or head_dim > 512:
            return rotary.rotate_and_write(
                query, key, value, cos, sin, pool, layer, slots, q_norm=q_norm, k_norm=k_norm, eps=eps
            )
        rotary.check_rotate_and_write(query, key, value, cos, sin, pool, layer, slots, q_norm, k_norm)
        for part in (query, key, value):
            assert part.stride()[1:] == (head_dim, 1), "the heads of a token are not contiguous"
        assert cos.is_contiguous(), "cos is strided"
        assert sin.is_contiguous(), "sin is strided"
        out = torch.empty((num_tokens, num_heads, head_dim), dtype=query.dtype)
        strides = (c_int64 * 3)(query.stride(0), key.stride(0), value.stride(0))
        sizes = (c_int64 * 3)(num_tokens, num_heads, layer)
        self.library.tandem_rotate_and_write(
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            strides,
            cos.data_ptr(),
            sin.data_ptr(),
            ctypes.byref(CPool.of(pool)),
            slots.data_ptr(),
            _pointer(q_norm),
            _pointer(k_norm),
            eps,
            out.data_ptr(),
            sizes,
            is_bf16(query),
        )
        return out

    def rotate_and_write_latent(
        self,
        query: Tensor,
        latent: Tensor,
        cos: Tensor,
        sin: Tensor,
        pool: PoolView,
        layer: int,
        slots: Tensor,
        *,
        norm: Tensor,
        eps: float,
        is_interleaved: bool,
    ) -> Tensor:
        """See `DecoderOps`."""
        num_tokens, num_heads, query_dim = query.shape
        rope_dim, rank = cos.shape[1], norm.shape[0]
        if rope_dim % (2 * LANES) or rope_dim > MOST_ROTATED or rank % LANES or rank > MOST_RANK:
            return latents.rotate_and_write_latent(
                query, latent, cos, sin, pool, layer, slots, norm=norm, eps=eps, is_interleaved=is_interleaved
            )
        latents.check_rotate_and_write_latent(query, latent, cos, sin, pool, layer, slots, norm)
        assert query.stride()[1:] == (query_dim, 1), "the heads of a token are not contiguous"
        assert latent.stride(1) == 1, "a latent is strided"
        assert all(tensor.is_contiguous() for tensor in (cos, sin, slots, norm))
        out = torch.empty((num_tokens, num_heads, query_dim), dtype=query.dtype)
        strides = (c_int64 * 2)(query.stride(0), latent.stride(0))
        sizes = (c_int64 * 6)(num_tokens, num_heads, query_dim - rope_dim, rope_dim, rank, layer)
        self.library.tandem_rotate_and_write_latent(
            query.data_ptr(),
            latent.data_ptr(),
            strides,
            cos.data_ptr(),
            sin.data_ptr(),
            ctypes.byref(CPool.of(pool)),
            slots.data_ptr(),
            norm.data_ptr(),
            eps,
            out.data_ptr(),
            sizes,
            int(is_interleaved),
            is_bf16(query),
        )
        return out

    def paged_attention(
        self,
        query: Tensor,
        pool: PoolView,
        layer: int,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        is_chunked: bool = False,
    ) -> Tensor:
        """See `DecoderOps`."""
        num_tokens, num_heads, head_dim = query.shape
        if head_dim % LANES:
            return attention.paged_attention(
                query, pool, layer, batch, scale=scale, window=window, softcap=softcap, sinks=sinks,
                is_chunked=is_chunked,
            )  # fmt: skip
        check_paged_attention(query, pool, layer, batch, window, softcap, sinks, part=True, is_chunked=is_chunked)
        assert query.is_contiguous(), "the query is strided"
        out = torch.empty((num_tokens, num_heads * head_dim), dtype=query.dtype)
        sizes = (c_int64 * 6)(batch.num_seqs, num_heads, layer, batch.block_tables.shape[1], window or 0, is_chunked)
        self.library.tandem_paged_attention(
            query.data_ptr(),
            ctypes.byref(CPool.of(pool)),
            batch.block_tables.data_ptr(),
            batch.query_start.data_ptr(),
            batch.seq_lens.data_ptr(),
            out.data_ptr(),
            scale,
            softcap or 0.0,
            _pointer(sinks),
            sizes,
            is_bf16(query),
        )
        return out

    def mask_tokens(self, logits: Tensor, masks: Tensor, rows: Tensor) -> None:
        """See `SamplingOps`."""
        check_mask_tokens(logits, masks, rows)
        self.library.tandem_mask_tokens(
            logits.data_ptr(), masks.data_ptr(), rows.data_ptr(), masks.shape[0], logits.shape[1], masks.shape[1]
        )

    def penalize(self, logits: Tensor, history: TokenHistory, penalties: Penalties) -> None:
        """See `SamplingOps`. Of tokens that were not seen only the bits are read."""
        check_penalize(logits, history, penalties)
        self.library.tandem_penalize(
            logits.data_ptr(), history.seen.data_ptr(), history.counts.data_ptr(), penalties.slots.data_ptr(),
            penalties.repetition.data_ptr(), penalties.presence.data_ptr(), penalties.frequency.data_ptr(),
            *logits.shape, history.seen.shape[1],
        )  # fmt: skip

    def count_tokens(self, history: TokenHistory, slots: Tensor, tokens: Tensor) -> None:
        """See `SamplingOps`."""
        check_count_tokens(history, slots, tokens)
        self.library.tandem_count_tokens(
            history.seen.data_ptr(), history.counts.data_ptr(), slots.data_ptr(), tokens.data_ptr(),
            slots.shape[0], history.counts.shape[1], history.seen.shape[1],
        )  # fmt: skip

    def greedy_tokens(self, logits: Tensor, masks: Tensor | None = None, rows: Tensor | None = None) -> Tensor:
        """See `SamplingOps`. The logits are read once, also where they are masked."""
        check_greedy_tokens(logits, masks, rows)
        num_rows, vocab_size = logits.shape
        num_masks, num_words = (0, 0) if masks is None else masks.shape
        out = torch.empty(num_rows, dtype=torch.int64)
        self.library.tandem_greedy_tokens(
            logits.data_ptr(), _pointer(masks), _pointer(rows), out.data_ptr(),
            num_rows, num_masks, vocab_size, num_words,
        )  # fmt: skip
        return out

    def sample_tokens(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """See `SamplingOps`. Nothing is sorted, and each row is read by one thread.

        Weights are rounded otherwise than the reference's: the tokens are the same unless the two fastest are as fast
        within that rounding (about 1e-7), or top-p or min-p ends within it of a boundary between two.
        """
        sampling.check_sample_tokens(logits, rows)
        num_rows, vocab_size = logits.shape
        if vocab_size > LONGEST_SAMPLED:
            return sampling.sample_tokens(logits, rows)
        out = torch.empty(num_rows, dtype=torch.int64)
        pointers = [column.data_ptr() for column in vars(rows).values()]
        self.library.tandem_sample_tokens(logits.data_ptr(), *pointers, out.data_ptr(), num_rows, vocab_size)
        return out


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
