"""Which projections of a checkpoint are fused into one product, and how many rows each has.

Numbers alone: the command line counts a model by them without torch, which takes longer to load than all the rest.
"""

from __future__ import annotations

from shared.model.config.delta_config import DeltaConfig
from shared.model.config.model_config import ModelConfig


def qkv_rows(config: ModelConfig, layer: int | None = None) -> dict[str, int]:
    """Checkpoint name → rows, of the projections that are fused as `qkv` in a layer; None: in one with attention."""
    latent = config.latent
    if layer is not None and config.layers[layer].has_state:
        assert config.delta is not None
        return delta_rows(config.delta)
    if latent is None:
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        if config.is_gated:
            return {"self_attn.q_proj": 2 * q_size, "self_attn.k_proj": kv_size, "self_attn.v_proj": kv_size}
        if config.names.qkv is not None:
            return {config.names.qkv: q_size + 2 * kv_size}
        return {"self_attn.q_proj": q_size, "self_attn.k_proj": kv_size, "self_attn.v_proj": kv_size}
    if latent.q_rank is None:
        return {
            "self_attn.q_proj": config.num_heads * latent.query_dim,
            "self_attn.kv_a_proj_with_mqa": latent.cached_dim,
        }
    return {"self_attn.q_a_proj": latent.q_rank, "self_attn.kv_a_proj_with_mqa": latent.cached_dim}


def gate_up_rows(config: ModelConfig, mlp: str, inner: int) -> dict[str, int]:
    """As `qkv_rows`, of a dense block of that name."""
    if config.names.gate_up is not None:
        return {f"{mlp}.{config.names.gate_up}": 2 * inner}
    return {f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner}


def delta_out(delta: DeltaConfig) -> str:
    """Checkpoint name of the projection back."""
    return "self_attn.o_proj" if delta.is_by_channel else "linear_attn.out_proj"


def delta_rows(delta: DeltaConfig) -> dict[str, int]:
    """Checkpoint name → rows, of the projections that are fused as `qkv`: queries, keys, values and their gates, where
    these have no lower rank. By head the rows are the query, the key, the values and their gates of one key head, then
    those of the next one."""
    if delta.is_by_channel:
        sizes = {"q": delta.key_size, "k": delta.key_size, "v": delta.value_size}
        return {f"self_attn.{part}_proj": size for part, size in sizes.items()}
    if delta.is_by_head:
        return {"linear_attn.in_proj_qkvz": delta.mixed_size + delta.value_size}
    return {"linear_attn.in_proj_qkv": delta.mixed_size, "linear_attn.in_proj_z": delta.value_size}


def rate_rows(delta: DeltaConfig) -> dict[str, int]:
    """Rows of the rates and decays, which are a projection of their own; by channel, of the lower ranks of decays and
    gates."""
    heads = delta.num_value_heads
    if delta.is_by_channel:
        return {"self_attn.b_proj": heads, "self_attn.f_a_proj": delta.low_rank, "self_attn.g_a_proj": delta.low_rank}
    if delta.is_by_head:
        return {"linear_attn.in_proj_ba": 2 * heads}
    return {"linear_attn.in_proj_b": heads, "linear_attn.in_proj_a": heads}
