"""Models as plain numbers: what arithmetic over memory and time needs of them."""

from __future__ import annotations

from dataclasses import dataclass

from shared.sizing.spread import Spread

BYTES_PER_VALUE = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
"""By the names that `--weights` takes; scales of quantized weights are not counted."""
KV_DTYPES = ("fp32", "bf16", "fp16", "fp8", "int8")
"""Dtypes that `--kv-dtype` takes. The last two have a scale in fp32 for each token and head."""
KV_CODES = KV_DTYPES[3:]


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Feed-forward blocks of which a token passes a few."""

    layers: int
    """Layers that have experts."""
    num_experts: int
    """Number of experts in each of these layers."""
    top_k: int
    """Experts of a token."""
    size: int
    """Intermediate size of an expert."""
    shared_size: int = 0
    """Size of the shared expert, which every token passes besides."""


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
class StateShape:
    """Layers that keep a state of a sequence instead of keys and values: the gated delta rule."""

    layers: int
    params: int
    """Parameters of each of these layers, in place of attention's."""
    matrix: int
    """Numbers of a layer that a token reads for its own value and for its query, and updates."""
    values: int
    """Numbers in fp32 that a layer keeps, those of the convolution included."""
    parts: int
    """Ranks that split a layer are a divisor of them."""

    @property
    def nbytes(self) -> int:
        """Bytes of a sequence's state in all of these layers."""
        return 4 * self.layers * self.values


KEPT_STATES = 3
"""Most states of a sequence: the one that a step reads, and two that it writes (`KVGroups.written_states`)."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder, dense or with experts, its cache of heads' keys and values, of latents, or of states besides."""

    num_params: float
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int = 0
    """Longest context that the model was trained for, tokens; 0 = not known."""
    expert_params: float = 0.0
    """Parameters of `num_params` in experts, of which a router chooses some."""
    experts: ExpertShape | None = None
    latent: LatentShape | None = None
    hidden: int = 0
    """Values of a token between two layers."""
    embedding_params: float = 0.0
    """Parameters of `num_params` in one table of the vocabulary."""
    is_tied: bool = False
    """Whether the output projection is the embedding."""
    kv_params: float = 0.0
    """Parameters of `num_params` that project to K and V in all layers; 0 with latents."""
    copied_params: float = 0.0
    """Parameters of `num_params` that ranks which split a layer hold in full: norms, routers, the projections to
    latents."""
    windows: tuple[int, ...] = ()
    """Tokens of each window, of the layers that keep the KV of a window alone."""
    head_params: float = 0.0
    """Beside `num_params`, those of the checkpoint's layer that guesses (multi-token prediction); 0: it has none."""
    states: StateShape | None = None
    """States of the layers that have no KV."""
    adapter_values: int = 0
    """Numbers of a LoRA adapter of rank 1 that adds to every projection; 0 where adapters are not served."""

    @property
    def active_params(self) -> float:
        """Parameters that one token passes."""
        if self.experts is None:
            return self.num_params
        return self.num_params - self.expert_params * (1 - self.experts.top_k / self.experts.num_experts)

    @property
    def kv_layers(self) -> int:
        """Layers that keep keys and values."""
        return self.num_layers - (0 if self.states is None else self.states.layers)

    @property
    def token_flops(self) -> float:
        """Operations for one token, but for those of attention."""
        found = 2.0 * self.active_params
        return found if self.states is None else found + 6.0 * self.states.layers * self.states.matrix

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
        return 2.0 * self.kv_layers * self.num_heads * self.head_values

    @property
    def head_values(self) -> int:
        """Elements of a head's key and value."""
        return 2 * self.head_dim if self.latent is None else self.head_dim + self.latent.value_dim

    def kv_bytes(self, num_kv_heads: int, dtype: str, context: int = 0) -> float:
        """K and V of one token in all layers, for that many KV heads; of a model's own one head, its latent. With a
        `context`, the mean over the tokens of such a sequence, of which layers with windows keep the last alone, and
        those with a state no KV but KEPT_STATES of these."""
        values, scales = num_kv_heads * self.head_values, 2 * num_kv_heads if dtype in KV_CODES else 0
        if self.latent is not None and num_kv_heads == self.num_kv_heads:
            values = self.latent.kv_rank + self.latent.rope_dim
        layers = self.kv_layers - sum(max(0.0, 1 - window / context) for window in self.windows if context)
        found = layers * (values * BYTES_PER_VALUE[dtype] + scales * BYTES_PER_VALUE["fp32"])
        if self.states is not None and context:
            found += KEPT_STATES * self.states.nbytes / context * num_kv_heads / self.num_kv_heads
        return found

    def kv_bytes_per_gpu(self, tensor: int, dtype: str, pipeline: int = 1, context: int = 0) -> float:
        """The same on one GPU of a worker of `tensor` x `pipeline`: each has its share of the KV heads, at least one,
        in its stage's layers. With more GPUs than KV heads several hold the same one; latents are one head. With stages
        layers with windows keep all tokens."""
        kv_bytes = self.kv_bytes(-(-self.num_kv_heads // tensor), dtype, context if pipeline == 1 or self.states else 0)
        return kv_bytes * self.layers_of(pipeline) / self.num_layers

    def layers_of(self, pipeline: int) -> int:
        """The most layers that a stage has."""
        return -(-self.num_layers // pipeline)

    def params_per_gpu(self, spread: Spread) -> float:
        """Parameters on the GPU of a worker that has the most: one of the last stage, which has no fewer layers than
        any other one and the output projection. Layers with and without experts are taken as equal but for them."""
        tensor, layers = spread.tensor, self.layers_of(spread.pipeline)
        tables = 1 if self.is_tied else 2
        split = self.num_params - self.expert_params - self.kv_params - self.copied_params
        split -= tables * self.embedding_params
        kv = self.kv_params * -(-self.num_kv_heads // tensor) / self.num_kv_heads
        found = (split / tensor + kv + self.copied_params) * layers / self.num_layers
        found += self.embedding_params / tensor * (tables if spread.pipeline == 1 else 1)
        if self.experts is not None:
            whole = -(-self.experts.num_experts // spread.expert) / self.experts.num_experts
            of_stage = min(layers, self.experts.layers) / self.experts.layers
            found += self.expert_params * of_stage * whole * spread.expert / tensor
        return found


def decoder(
    *, layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, vocabulary: int, positions: int,
    head_dim: int = 0, tied: bool = False, experts: ExpertShape | None = None, latent: LatentShape | None = None,
    windows: tuple[int, ...] = (), head: bool = False, gated: bool = False, states: StateShape | None = None,
) -> ModelShape:  # fmt: skip
    """A decoder of Llama's kind, its parameters counted: embeddings, attention, gated MLP or experts, norms. With
    latents `kv_heads` is 1 and `head_dim` that of a query. `head`: the checkpoint has a layer that guesses, as the
    last one. `gated`: queries come with gates. `states`: of some of the layers, which do not attend."""
    head_dim = head_dim or hidden // heads
    of_heads = hidden * head_dim * ((3 if gated else 2) * heads + 2 * kv_heads)
    attention = of_heads if latent is None else _attention(hidden, heads, latent)
    attending = layers - (0 if states is None else states.layers)
    num_params = attending * attention + layers * 2 * hidden + vocabulary * hidden * (1 if tied else 2) + hidden
    num_params += 0 if states is None else states.layers * states.params
    sparse = 0 if experts is None else experts.layers
    num_params += (layers - sparse) * 3 * hidden * intermediate
    kv_params = attending * hidden * head_dim * 2 * kv_heads if latent is None else 0
    copied_params = layers * 2 * hidden + hidden
    if latent is not None:
        copied_params += attending * _latent_projections(hidden, latent)
    expert_params = 0.0
    head_params = 0.0
    if head:  # its projection of two inputs, and a norm of each and of what it gives
        block = 3 * intermediate
        if experts is not None:
            block = experts.num_experts * (3 * experts.size + 1) + 3 * experts.shared_size
        head_params = attention + 2 * hidden + hidden * block + 2 * hidden * hidden + 3 * hidden
    if experts is not None:
        copied_params += experts.layers * hidden * experts.num_experts
        expert_params = experts.layers * experts.num_experts * 3 * hidden * experts.size
        num_params += int(expert_params) + experts.layers * hidden * (experts.num_experts + 3 * experts.shared_size)
    mlps = (layers - sparse) * 3 * (hidden + intermediate)
    if experts is not None:
        mlps += sparse * 3 * experts.num_experts * (hidden + experts.size)
        mlps += sparse * 3 * (hidden + experts.shared_size) if experts.shared_size else 0
    adapter_values = layers * (4 * hidden + head_dim * (2 * heads + 2 * kv_heads)) + mlps
    if latent is not None or states is not None:
        adapter_values = 0
    return ModelShape(
        num_params, layers, heads, kv_heads, head_dim, positions, expert_params=expert_params, experts=experts,
        latent=latent, hidden=hidden, embedding_params=vocabulary * hidden, is_tied=tied, kv_params=kv_params,
        copied_params=copied_params, windows=windows, head_params=head_params, states=states,
        adapter_values=adapter_values,
    )  # fmt: skip


def _attention(hidden: int, heads: int, latent: LatentShape) -> int:
    """Parameters of a layer's latent attention, its latents' norms included."""
    query_size = heads * (latent.nope_dim + latent.rope_dim)
    query = (latent.q_rank or hidden) * query_size
    expand = latent.kv_rank * heads * (latent.nope_dim + latent.value_dim)
    return _latent_projections(hidden, latent) + query + expand + heads * latent.value_dim * hidden


def _latent_projections(hidden: int, latent: LatentShape) -> int:
    """Parameters that lead to the latents of queries and of keys, with their norms: the same for all heads."""
    return latent.q_rank * (hidden + 1) + hidden * (latent.kv_rank + latent.rope_dim) + latent.kv_rank


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
    latent=LatentShape(kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128, q_rank=1536), head=True,
)  # fmt: skip
SPARSE_MODELS = {"mixtral-8x7b": MIXTRAL_8X7B, "deepseek-v3": DEEPSEEK_V3}
"""Published shapes with experts."""
NAMED_MODELS = {"8b": LLAMA_3_8B, "70b": LLAMA_3_70B, "405b": LLAMA_3_405B}
"""Llama 3.1's three sizes."""
