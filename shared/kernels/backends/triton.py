"""Every op as a Triton kernel. Importing this imports triton; the registry does so only where it will run."""

from __future__ import annotations

from shared.kernels.activation import launch as activation
from shared.kernels.attention import paged, uniform
from shared.kernels.attention.prefill import cudnn
from shared.kernels.blocks import launch as blocks
from shared.kernels.coded.launch import make_coded_linear
from shared.kernels.delta import launch as delta
from shared.kernels.experts import launch as grouped
from shared.kernels.experts import reference as experts
from shared.kernels.experts import routing_launch as routing
from shared.kernels.latent import launch as latent
from shared.kernels.lora import launch as lora
from shared.kernels.lora.static import TritonSlots
from shared.kernels.matmul.few import make_few_rows_linear
from shared.kernels.matmul.launch import make_rowwise_linear
from shared.kernels.opened import OpenedLinear
from shared.kernels.rmsnorm import launch as rmsnorm
from shared.kernels.rotary import launch as rotary
from shared.kernels.sampling import history_launch as history
from shared.kernels.sampling import launch as sampling
from shared.kernels.sampling import mask_launch as masking


class TritonKernels:
    """`Kernels` for CUDA devices, and for the CPU under Triton's interpreter."""

    name = "triton"

    is_deterministic = False
    serves_latents = True
    make_linear = staticmethod(make_few_rows_linear)
    make_experts = staticmethod(grouped.make_grouped_experts)
    choose_experts = staticmethod(routing.choose_experts)
    make_batched_linear = staticmethod(experts.make_plain_batched_linear)
    make_quantized_linear = staticmethod(make_coded_linear)
    make_quantized_experts = staticmethod(experts.make_opened_experts)
    rms_norm = staticmethod(rmsnorm.rms_norm)
    add_rms_norm = staticmethod(rmsnorm.add_rms_norm)
    rotate_and_write = staticmethod(rotary.rotate_and_write)
    rotate_and_write_latent = staticmethod(latent.rotate_and_write_latent)
    paged_attention = staticmethod(paged.paged_attention)
    prepare_thread = staticmethod(cudnn.prepare_thread)
    delta_attention = staticmethod(delta.delta_attention)
    act_and_mul = staticmethod(activation.act_and_mul)
    make_lora = staticmethod(lora.TritonLora)
    add_lora = staticmethod(lora.add_lora)
    hold_loras = staticmethod(TritonSlots)
    gather_blocks = staticmethod(blocks.gather_blocks)
    scatter_blocks = staticmethod(blocks.scatter_blocks)
    block_checksums = staticmethod(blocks.block_checksums)
    block_key_sums = staticmethod(blocks.block_key_sums)
    sample_tokens = staticmethod(sampling.sample_tokens)
    penalize = staticmethod(history.penalize)
    count_tokens = staticmethod(history.count_tokens)
    mask_tokens = staticmethod(masking.mask_tokens)
    greedy_tokens = staticmethod(masking.greedy_tokens)


class DeterministicTritonKernels(TritonKernels):
    """`Kernels` in which a sequence's results depend on that sequence alone, to the bit.

    The ops that it shares with `TritonKernels` compute row by row at sizes that follow from the row's length. A worker
    compares a prompt with its tokens one by one before it serves.
    """

    name = "triton-deterministic"

    is_deterministic = True
    serves_latents = False
    make_linear = staticmethod(make_rowwise_linear)
    make_quantized_linear = staticmethod(OpenedLinear)
    paged_attention = staticmethod(uniform.paged_attention)
