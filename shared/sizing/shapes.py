"""Models and GPUs as plain numbers: what arithmetic over memory and time needs of them."""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import ConfigError

BYTES_PER_VALUE = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
"""By the names that `--weights` and `--kv-dtype` take; scales of quantized tensors are not counted."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder."""

    num_params: float
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int = 0
    """Longest context that the model was trained for, tokens; 0 = not known."""

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of all layers, 16 bit."""
        return round(self.kv_bytes(self.num_kv_heads, "bf16"))

    @property
    def weight_bytes(self) -> float:
        """All parameters, 16 bit."""
        return 2 * self.num_params

    @property
    def attention_flops(self) -> float:
        """Operations for one token attending to one earlier token: scores and values, all layers."""
        return 4.0 * self.num_layers * self.num_heads * self.head_dim

    def kv_bytes(self, num_kv_heads: int, dtype: str) -> float:
        """K and V of one token in all layers, for that many KV heads."""
        return 2 * self.num_layers * num_kv_heads * self.head_dim * BYTES_PER_VALUE[dtype]

    def kv_bytes_per_gpu(self, tensor: int, dtype: str) -> float:
        """The same on one of `tensor` GPUs: each has its share of the KV heads, at least one. Where there are more GPUs
        than KV heads, several hold the same one."""
        return self.kv_bytes(-(-self.num_kv_heads // tensor), dtype)


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


def decoder(
    *, layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, vocabulary: int, positions: int,
    head_dim: int = 0, tied: bool = False,
) -> ModelShape:  # fmt: skip
    """A decoder of Llama's kind, its parameters counted: embeddings, attention, gated MLP, norms."""
    head_dim = head_dim or hidden // heads
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    a_layer = attention + 3 * hidden * intermediate + 2 * hidden
    embeddings = vocabulary * hidden * (1 if tied else 2)
    return ModelShape(layers * a_layer + embeddings + hidden, layers, heads, kv_heads, head_dim, positions)


LLAMA_3_8B = decoder(
    layers=32, hidden=4096, intermediate=14_336, heads=32, kv_heads=8, vocabulary=128_256, positions=131_072
)
LLAMA_3_70B = decoder(
    layers=80, hidden=8192, intermediate=28_672, heads=64, kv_heads=8, vocabulary=128_256, positions=131_072
)
LLAMA_3_405B = decoder(
    layers=126, hidden=16_384, intermediate=53_248, heads=128, kv_heads=8, vocabulary=128_256, positions=131_072
)
NAMED_MODELS = {"8b": LLAMA_3_8B, "70b": LLAMA_3_70B, "405b": LLAMA_3_405B}
"""Llama 3.1's three sizes."""

H200 = GpuShape(flops=790e12, bandwidth=4.3e12, memory_bytes=141e9, link=50e9)
"""Measured rates: a large bf16 product, a device copy; one 400 Gb/s network card for each GPU."""
GPUS = {
    "A100-40GB": GpuShape(flops=312e12, bandwidth=1.56e12, memory_bytes=40e9, link=25e9),
    "A100": GpuShape(flops=312e12, bandwidth=2.04e12, memory_bytes=80e9, link=25e9),
    "L40S": GpuShape(flops=362e12, bandwidth=0.86e12, memory_bytes=48e9, link=25e9),
    "H100": GpuShape(flops=790e12, bandwidth=3.35e12, memory_bytes=80e9, link=50e9),
    "H200": H200,
    "B200": GpuShape(flops=2250e12, bandwidth=8.0e12, memory_bytes=180e9, link=50e9),
    "MI300X": GpuShape(flops=1307e12, bandwidth=5.3e12, memory_bytes=192e9, link=50e9),
}
"""H200's rates (and H100's compute) are measured, all others are the data sheets': real ones are lower."""


def gpu_of(name: str, option: str) -> GpuShape:
    """The GPU of that name, in any case. Raises ConfigError (`option`)."""
    for known, shape in GPUS.items():
        if known.lower() == name.strip().lower():
            return shape
    raise ConfigError(f"--{option}: no GPU {name!r}; known: {', '.join(GPUS)}", field=option, value=name)
