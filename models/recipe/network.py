"""The Llama architecture in plain PyTorch, with Hugging Face's parameter names.

Sources: Touvron et al. 2023 (Llama), Ainslie et al. 2023 (GQA), Su et al. 2021 (RoPE), Zhang & Sennrich 2019
(RMSNorm).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (the field's usual name)
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of the network; the defaults are the demo model (3.7 M parameters, 7.4 MB in 16 bit)."""

    vocab_size: int = 3072
    hidden_size: int = 256
    intermediate_size: int = 688
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 32
    max_position: int = 2048
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        q_dim, kv_dim = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, q_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_dim, bias=False)
        self.o_proj = nn.Linear(q_dim, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [batch, seq, hidden]; cos, sin: [seq, head_dim]."""
        batch, seq, _ = x.shape
        q, k, v = (
            proj(x).view(batch, seq, -1, self.shape.head_dim).transpose(1, 2)  # [batch, heads, seq, head_dim]
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        groups = self.shape.num_heads // self.shape.num_kv_heads
        k, v = rotate(k, cos, sin).repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        out = F.scaled_dot_product_attention(rotate(q, cos, sin), k, v, is_causal=True)
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, seq, -1))
        return projected


class MLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, seq, hidden]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Pre-norm attention and feed-forward, each with a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [batch, seq, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Embedding, layers and final norm; the head is the embedding (tied)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, shape.norm_eps)


class Llama(nn.Module):
    """A causal language model; ``state_dict()`` equals a Hugging Face checkpoint with tied embeddings."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                is_residual_out = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * shape.num_layers) ** 0.5 if is_residual_out else 0.02)
        inverse = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = torch.outer(torch.arange(shape.max_position), inverse).repeat(1, 2)  # [max_position, head_dim]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [batch, seq] → logits: [batch, seq, vocab_size]."""
        cos, sin = self.get_buffer("cos")[: ids.shape[1]], self.get_buffer("sin")[: ids.shape[1]]
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)

    def loss(self, rows: Tensor, reduction: str = "mean") -> Tensor:
        """Cross-entropy in nats of each row's next tokens. rows: [batch, seq + 1]."""
        logits = self(rows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction=reduction)

    @torch.inference_mode()
    def generate(self, ids: list[int], max_new: int, eos: int, temperature: float = 0.0, seed: int = 0) -> list[int]:
        """Continue ``ids`` until ``eos`` or ``max_new`` tokens; greedy at temperature 0; no KV cache."""
        draw = torch.Generator().manual_seed(seed)
        out: list[int] = []
        while len(out) < max_new and eos not in out:
            logits = self(torch.tensor([ids + out]))[0, -1]
            if temperature:
                out.append(int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=draw)))
            else:
                out.append(int(logits.argmax()))
        return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, halves convention (not interleaved). x: [batch, heads, seq, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
