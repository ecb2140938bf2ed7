"""Every op in plain torch: the reference, and what serves where no other backend does."""

from __future__ import annotations

from shared.kernels.activation import reference as activation
from shared.kernels.attention import reference as attention
from shared.kernels.blocks import reference as blocks
from shared.kernels.delta import reference as delta
from shared.kernels.experts import reference as experts
from shared.kernels.experts import routing
from shared.kernels.latent import reference as latent
from shared.kernels.linear import make_plain_linear
from shared.kernels.lora import reference as lora
from shared.kernels.opened import OpenedLinear
from shared.kernels.rmsnorm import reference as rmsnorm
from shared.kernels.rotary import reference as rotary
from shared.kernels.sampling import history
from shared.kernels.sampling import reference as sampling


class TorchKernels:
    """`Kernels` for any device that torch knows."""

    name = "torch"

    is_deterministic = False
    serves_latents = True
    make_linear = staticmethod(make_plain_linear)
    make_experts = staticmethod(experts.make_plain_experts)
    choose_experts = staticmethod(routing.choose_experts)
    make_batched_linear = staticmethod(experts.make_plain_batched_linear)
    make_quantized_linear = staticmethod(OpenedLinear)
    make_quantized_experts = staticmethod(experts.make_opened_experts)
    rms_norm = staticmethod(rmsnorm.rms_norm)
    add_rms_norm = staticmethod(rmsnorm.add_rms_norm)
    rotate_and_write = staticmethod(rotary.rotate_and_write)
    rotate_and_write_latent = staticmethod(latent.rotate_and_write_latent)
    paged_attention = staticmethod(attention.paged_attention)
    delta_attention = staticmethod(delta.delta_attention)
    act_and_mul = staticmethod(activation.act_and_mul)
    make_lora = staticmethod(lora.make_plain_lora)
    add_lora = staticmethod(lora.add_lora)
    gather_blocks = staticmethod(blocks.gather_blocks)
    scatter_blocks = staticmethod(blocks.scatter_blocks)
    block_checksums = staticmethod(blocks.block_checksums)
    block_key_sums = staticmethod(blocks.block_key_sums)
    sample_tokens = staticmethod(sampling.sample_tokens)
    penalize = staticmethod(history.penalize)
    count_tokens = staticmethod(history.count_tokens)
    mask_tokens = staticmethod(sampling.mask_tokens)
    greedy_tokens = staticmethod(sampling.greedy_tokens)
