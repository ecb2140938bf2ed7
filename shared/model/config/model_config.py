"""A model's configuration: `config.json`, read once, validated, frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shared.kv.layout import BlockLayout, KVFormat
from shared.model.config.folder import CONFIG_FILE, check_model_folder
from shared.model.config.json_fields import JsonFields, read_json_object
from shared.model.config.latent_config import LatentConfig
from shared.model.config.moe_config import MoeConfig
from shared.model.config.quantization import QuantizationConfig
from shared.model.config.rope_config import RopeConfig

__all__ = ["SUPPORTED_ARCHITECTURES", "ModelConfig", "RopeConfig"]

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
)
SUPPORTED_DTYPES = ("float32", "bfloat16", "float16")

_MISTRAL_DEFAULT_WINDOW = 4096  # the first Mistral checkpoints omit the field and mean this
_QWEN3_DEFAULT_HEAD_DIM = 128


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer of one of the supported families.

    The families differ only in these fields: which projections have a bias, whether query and key are normalised per
    head, which layers use a sliding window, which have experts, and whether the cache keeps latents. With latents there
    is one KV head, and `head_dim` is that of a query.
    """

    architecture: str  # one of SUPPORTED_ARCHITECTURES
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int  # tokens
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]  # [num_layers] tokens that each layer sees, None for all
    rope: RopeConfig
    eos_token_ids: tuple[int, ...]
    dtype: str  # one of SUPPORTED_DTYPES, as published
    moe: MoeConfig | None = None  # None: every layer is dense
    latent: LatentConfig | None = None  # None: attention over the keys and values of heads
    num_unused_layers: int = 0  # layers of a checkpoint behind the decoder's own, such as those that predict further
    quantization: QuantizationConfig | None = None  # None: the checkpoint's weights are plain numbers

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that positions rotate."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def value_dim(self) -> int:
        """Elements of a head's value, and of what it attends to."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def attention_scale(self) -> float:
        """Factor on query · key."""
        return self.head_dim**-0.5 if self.latent is None else self.latent.scale

    @property
    def has_dense(self) -> bool:
        """Whether any layer has a dense feed-forward block."""
        return self.moe is None or not all(self.moe.layers)

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's feed-forward block is made of experts."""
        return self.moe is not None and self.moe.layers[layer]

    def window_of(self, layer: int) -> int | None:
        """Sliding window of a layer in tokens, None if it attends to the whole context."""
        return self.windows[layer]

    @classmethod
    def load(cls, folder: Path) -> ModelConfig:
        """Read `config.json` and, if present, `generation_config.json`.

        Raises:
            ModelLoadError: `check_model_folder`'s, or content that `parse` refuses.
        """
        check_model_folder(folder)
        config = read_json_object(folder / CONFIG_FILE)
        generation_file = folder / "generation_config.json"
        generation = read_json_object(generation_file) if generation_file.is_file() else {}
        return cls.parse(config, generation)

    def block_layout(self, block_size: int, kv_dtype: str) -> BlockLayout:
        """Blocks of `block_size` tokens of this model's KV, kept in `kv_dtype`, a key of `BYTES_PER_ELEMENT`."""
        kv_format = (
            KVFormat(kv_dtype, self.num_kv_heads, self.head_dim)
            if self.latent is None
            else KVFormat(kv_dtype, 1, self.latent.cached_dim, num_planes=1)
        )
        return BlockLayout(self.num_layers, block_size, kv_format)

    @classmethod
    def parse(cls, config: Mapping[str, object], generation: Mapping[str, object] | None = None) -> ModelConfig:
        """Read the content of `config.json` and of `generation_config.json`.

        Raises:
            ModelLoadError: unsupported architecture, quantization or activation, or a missing or wrong field;
                `field` names it.
        """
        fields = JsonFields(config, "config.json")
        generation_fields = JsonFields(generation or {}, "generation_config.json")
        architecture = _architecture(fields)
        _refuse_unsupported(fields)

        hidden_size = fields.integer("hidden_size")
        num_layers = fields.integer("num_hidden_layers")
        num_heads = fields.integer("num_attention_heads")
        max_positions = fields.integer("max_position_embeddings")
        llama, qwen2 = (architecture == f"{family}ForCausalLM" for family in ("Llama", "Qwen2"))
        qwen3 = architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
        rope = RopeConfig.parse(fields, max_positions)
        latent = LatentConfig.parse(fields, architecture, rope)
        moe = MoeConfig.parse(fields, architecture, num_layers)
        attention_bias = (llama or qwen3 or latent is not None) and fields.boolean("attention_bias", default=False)
        eos_token_ids = (*generation_fields.token_ids("eos_token_id"), *fields.token_ids("eos_token_id"))
        return cls(
            architecture=architecture,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_num_kv_heads(fields, num_heads, llama) if latent is None else 1,
            head_dim=_head_dim(fields, hidden_size, num_heads, qwen3) if latent is None else latent.query_dim,
            rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
            max_position_embeddings=max_positions,
            tie_word_embeddings=fields.boolean("tie_word_embeddings", default=False),
            qkv_bias=qwen2 or attention_bias,
            o_bias=attention_bias,
            mlp_bias=(llama or architecture == "DeepseekV2ForCausalLM") and fields.boolean("mlp_bias", default=False),
            qk_norm=qwen3,
            windows=_windows(fields, architecture, num_layers),
            rope=rope,
            eos_token_ids=tuple(dict.fromkeys(eos_token_ids)),
            dtype=_dtype(fields),
            moe=moe,
            latent=latent,
            num_unused_layers=_num_unused_layers(fields, architecture),
            quantization=QuantizationConfig.parse(fields),
        )


def _num_unused_layers(fields: JsonFields, architecture: str) -> int:
    is_v3 = architecture == "DeepseekV3ForCausalLM"
    return fields.integer("num_nextn_predict_layers", default=1, minimum=0) if is_v3 else 0


def _architecture(fields: JsonFields) -> str:
    architectures = fields.optional_text_list("architectures") or []
    for architecture in architectures:
        if architecture in SUPPORTED_ARCHITECTURES:
            return architecture
    found = ", ".join(architectures) or "none"
    raise fields.fault("architectures", f"{found} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}")


def _refuse_unsupported(fields: JsonFields) -> None:
    activation = fields.text("hidden_act", default="silu")
    if activation != "silu":
        raise fields.fault("hidden_act", f"{activation!r} is not supported; supported: silu")


def _num_kv_heads(fields: JsonFields, num_heads: int, llama: bool) -> int:
    # Llama 1 and 2 predate grouped-query attention and omit the field.
    num_kv_heads = fields.integer("num_key_value_heads", default=num_heads if llama else None)
    if num_heads % num_kv_heads:
        raise fields.fault("num_key_value_heads", f"must divide {num_heads} heads, found {num_kv_heads}")
    return num_kv_heads


def _head_dim(fields: JsonFields, hidden_size: int, num_heads: int, qwen3: bool) -> int:
    if not qwen3 and not fields.has("head_dim") and hidden_size % num_heads:
        raise fields.fault("hidden_size", f"{hidden_size} is not a multiple of {num_heads} heads")
    implied = _QWEN3_DEFAULT_HEAD_DIM if qwen3 else hidden_size // num_heads
    head_dim = fields.integer("head_dim", default=implied)
    if head_dim % 2:
        raise fields.fault("head_dim", f"must be even for rotary positions, found {head_dim}")
    return head_dim


def _windows(fields: JsonFields, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer: Llama and DeepSeek have none, Mistral, Mixtral and Qwen's MoE one for all layers, the
    other Qwen one from a given layer on."""
    if architecture in ("LlamaForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"):
        return (None,) * num_layers
    if architecture == "MixtralForCausalLM":
        return (fields.optional_integer("sliding_window"),) * num_layers
    if architecture == "Qwen3MoeForCausalLM":
        is_windowed = fields.boolean("use_sliding_window", default=False)
        return (fields.integer("sliding_window", default=4096) if is_windowed else None,) * num_layers
    layer_types = fields.optional_text_list("layer_types")
    if layer_types is not None:
        if len(layer_types) != num_layers:
            raise fields.fault("layer_types", f"must name {num_layers} layers, found {len(layer_types)}")
        unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
        if unknown:
            raise fields.fault("layer_types", f"{', '.join(unknown)} is not supported")
    if architecture == "MistralForCausalLM":
        if layer_types is not None and len(set(layer_types)) > 1:
            raise fields.fault("layer_types", "mixing kinds of attention is not supported for this architecture")
        absent = "sliding_window" not in fields
        return (_MISTRAL_DEFAULT_WINDOW if absent else fields.optional_integer("sliding_window"),) * num_layers

    window = fields.optional_integer("sliding_window") if fields.boolean("use_sliding_window", False) else None
    if layer_types is None:
        full_layers = num_layers if window is None else fields.integer("max_window_layers", 28, minimum=0)
        return tuple(None if layer < full_layers else window for layer in range(num_layers))
    if window is None and "sliding_attention" in layer_types:
        raise fields.fault("sliding_window", "is missing though layer_types names sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _dtype(fields: JsonFields) -> str:
    name = fields.text("dtype", default=fields.text("torch_dtype", default="float32")).removeprefix("torch.")
    if name not in SUPPORTED_DTYPES:
        raise fields.fault("dtype", f"{name!r} is not supported; supported: {', '.join(SUPPORTED_DTYPES)}")
    return name
