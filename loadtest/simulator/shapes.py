"""Models and machines: the figures from which step times are computed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder in 16 bit."""

    num_params: float
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * 2

    @property
    def weight_bytes(self) -> float:
        """All parameters."""
        return 2 * self.num_params

    @property
    def attention_flops(self) -> float:
        """Operations for one token attending to one earlier token: scores and values, all layers."""
        return 4.0 * self.num_layers * self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class GpuShape:
    """One GPU; the efficiencies are the shares of its limits that a good engine reaches."""

    flops: float  # dense 16 bit, 1/s
    bandwidth: float  # bytes/s
    memory_bytes: float
    link: float  # network, bytes/s
    flops_efficiency: float = 0.6
    bandwidth_efficiency: float = 0.8
    link_efficiency: float = 0.8


LLAMA_3_70B = ModelShape(70.6e9, 80, 64, 8, 128)
LLAMA_3_8B = ModelShape(8.0e9, 32, 32, 8, 128)
MODELS = {"llama-3-70b": LLAMA_3_70B, "llama-3-8b": LLAMA_3_8B}

H200 = GpuShape(flops=790e12, bandwidth=4.3e12, memory_bytes=141e9, link=50e9)
"""Measured rates: a large bf16 product, a device copy; one 400 Gb/s network card for each GPU."""
