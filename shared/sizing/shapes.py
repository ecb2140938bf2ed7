"""Models and GPUs as plain numbers: what arithmetic over memory and time needs of them."""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import ConfigError

BYTES_PER_VALUE = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
"""By the names that `--weights` and `--kv-dtype` take; scales of quantized tensors are not counted."""


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Feed-forward blocks of which a token passes a few."""

    layers: int
    """Layers that have experts."""
    num_experts: int
    """In each of them."""
    top_k: int
    """Experts of a token."""
    size: int
    """Intermediate size of an expert."""
    shared_size: int = 0
    """Of what every token passes besides."""


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Latent attention: what the cache keeps is the latent and one rotated key for all heads."""

    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    q_rank: int = 0
    """0: queries are projected at once."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder, dense or with experts, its cache of heads' keys and values or of latents."""

    num_params: float
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int = 0
    """Longest context that the model was trained for, tokens; 0 = not known."""
    expert_params: float = 0.0
    """Of `num_params`, those of all experts that a router chooses among."""
    experts: ExpertShape | None = None
    latent: LatentShape | None = None

    @property
    def active_params(self) -> float:
        """Parameters that one token passes."""
        if self.experts is None:
            return self.num_params
        return self.num_params - self.expert_params * (1 - self.experts.top_k / self.experts.num_experts)

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
        return 2.0 * self.num_layers * self.num_heads * self.head_values

    @property
    def head_values(self) -> int:
        """Elements of a head's key and value."""
        return 2 * self.head_dim if self.latent is None else self.head_dim + self.latent.value_dim

    def kv_bytes(self, num_kv_heads: int, dtype: str) -> float:
        """K and V of one token in all layers, for that many KV heads; of a model's own one head, its latent."""
        values = num_kv_heads * self.head_values
        if self.latent is not None and num_kv_heads == self.num_kv_heads:
            values = self.latent.kv_rank + self.latent.rope_dim
        return self.num_layers * values * BYTES_PER_VALUE[dtype]

    def kv_bytes_per_gpu(self, tensor: int, dtype: str) -> float:
        """The same on one of `tensor` GPUs: each has its share of the KV heads, at least one. Where there are more GPUs
        than KV heads, several hold the same one; latents are one head."""
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
    head_dim: int = 0, tied: bool = False, experts: ExpertShape | None = None, latent: LatentShape | None = None,
) -> ModelShape:  # fmt: skip
    """A decoder of Llama's kind, its parameters counted: embeddings, attention, gated MLP or experts, norms. With
    latents `kv_heads` is 1 and `head_dim` that of a query."""
    head_dim = head_dim or hidden // heads
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads) if latent is None else _attention(hidden, heads, latent)
    num_params = layers * (attention + 2 * hidden) + vocabulary * hidden * (1 if tied else 2) + hidden
    sparse = 0 if experts is None else experts.layers
    num_params += (layers - sparse) * 3 * hidden * intermediate
    expert_params = 0.0
    if experts is not None:
        expert_params = experts.layers * experts.num_experts * 3 * hidden * experts.size
        num_params += int(expert_params) + experts.layers * hidden * (experts.num_experts + 3 * experts.shared_size)
    return ModelShape(
        num_params, layers, heads, kv_heads, head_dim, positions, expert_params=expert_params, experts=experts,
        latent=latent,
    )  # fmt: skip


def _attention(hidden: int, heads: int, latent: LatentShape) -> int:
    """Parameters of a layer's latent attention, its latents' norms included."""
    query_size = heads * (latent.nope_dim + latent.rope_dim)
    query = hidden * query_size if not latent.q_rank else latent.q_rank * (hidden + 1 + query_size)
    latents = hidden * (latent.kv_rank + latent.rope_dim) + latent.kv_rank
    expand = latent.kv_rank * heads * (latent.nope_dim + latent.value_dim)
    return query + latents + expand + heads * latent.value_dim * hidden


LLAMA_3_8B = decoder(
    layers=32, hidden=4096, intermediate=14_336, heads=32, kv_heads=8, vocabulary=128_256, positions=131_072
)
LLAMA_3_70B = decoder(
    layers=80, hidden=8192, intermediate=28_672, heads=64, kv_heads=8, vocabulary=128_256, positions=131_072
)
LLAMA_3_405B = decoder(
    layers=126, hidden=16_384, intermediate=53_248, heads=128, kv_heads=8, vocabulary=128_256, positions=131_072
)
MIXTRAL_8X7B = decoder(
    layers=32, hidden=4096, intermediate=14_336, heads=32, kv_heads=8, vocabulary=32_000, positions=32_768,
    experts=ExpertShape(layers=32, num_experts=8, top_k=2, size=14_336),
)  # fmt: skip
DEEPSEEK_V3 = decoder(
    layers=61, hidden=7168, intermediate=18_432, heads=128, kv_heads=1, vocabulary=129_280, positions=163_840,
    head_dim=192, experts=ExpertShape(layers=58, num_experts=256, top_k=8, size=2048, shared_size=2048),
    latent=LatentShape(kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128, q_rank=1536),
)  # fmt: skip
SPARSE_MODELS = {"mixtral-8x7b": MIXTRAL_8X7B, "deepseek-v3": DEEPSEEK_V3}
"""Published shapes with experts."""
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
