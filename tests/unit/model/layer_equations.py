"""A decoder layer by its equations, in fp64: the oracle of heads that guess, which transformers does not have."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional


def normed(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm of the last dimension."""
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight


def rotated(x: Tensor, base: float) -> Tensor:
    """[num_tokens, num_heads, head_dim] by the angles of positions 0, 1, …"""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x), dtype=torch.float64)[:, None] * base ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def layer(
    weights: Mapping[str, Tensor], read: Tensor, beside: Tensor, head_dim: int, *, base: float, epsilon: float
) -> Tensor:
    """[num_tokens, hidden_size]: `beside` with what causal attention to `read` adds, then with the MLP's part."""
    q, k, v = ((read @ weights[f"self_attn.{name}_proj.weight"].T).view(len(read), -1, head_dim) for name in "qkv")
    share = q.shape[1] // k.shape[1]
    q, k, v = rotated(q, base), rotated(k, base).repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / head_dim**0.5
    scores = scores.masked_fill(torch.ones(len(read), len(read)).triu(1).bool(), -torch.inf)
    attended = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)
    given = beside + attended @ weights["self_attn.o_proj.weight"].T
    inner = normed(given, weights["post_attention_layernorm.weight"], epsilon)
    gate, up = (inner @ weights[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return given + (functional.silu(gate) * up) @ weights["mlp.down_proj.weight"].T
