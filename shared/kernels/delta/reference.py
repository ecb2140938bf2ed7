"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464) and the convolution before it, in torch.

A head keeps a matrix S of keys by values. A token with query q, key k, value v, decay a and rate b makes of it
S' = a · S + b · k ⊗ (v - a · S k), and reads S' q. Everything here is in fp32, and nothing waits for a device.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 64
"""Tokens whose updates are solved for together: more cost products, fewer cost passes over the states."""
_NORM_EPS = 1e-6


def convolve(inputs: Tensor, weight: Tensor) -> Tensor:
    """A causal convolution of each channel by itself, without bias.

    Args:
        inputs: [batch, channels, kernel_size - 1 + num_tokens] fp32, those before the first token included.
        weight: [channels, kernel_size] fp32.

    Returns:
        [batch, channels, num_tokens].
    """
    num_tokens = inputs.shape[2] - weight.shape[1] + 1
    found = inputs[..., :num_tokens] * weight[:, :1]
    for tap in range(1, weight.shape[1]):
        found.addcmul_(inputs[..., tap : tap + num_tokens], weight[:, tap, None])
    return found


def normalised(x: Tensor, scale: float = 1.0) -> Tensor:
    """[..., dim] fp32, each row over its length, times `scale`."""
    return x * (torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS) * scale)


def delta_step(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, rate: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each of several sequences.

    Args:
        query: [batch, heads, key_dim] fp32, normalised and scaled.
        key: [batch, heads, key_dim] fp32, normalised.
        value: [batch, heads, value_dim] fp32.
        log_decay: [batch, heads] fp32, at most 0.
        rate: [batch, heads] fp32.
        state: [batch, heads, key_dim, value_dim] fp32; changed in place.

    Returns:
        ([batch, heads, value_dim], the state behind the token).
    """
    state *= log_decay.exp()[..., None, None]
    known = (key[..., None, :] @ state).squeeze(-2)
    update = (value - known) * rate[..., None]
    state += key[..., None] * update[..., None, :]
    return (query[..., None, :] @ state).squeeze(-2), state


def delta_chunk(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, rate: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Some tokens of one sequence, CHUNK at a time: within, the updates are the solution of a triangular system, so all
    is products of matrices.

    Args:
        query: [num_tokens, heads, key_dim] fp32, normalised and scaled.
        key: [num_tokens, heads, key_dim] fp32, normalised.
        value: [num_tokens, heads, value_dim] fp32.
        log_decay: [num_tokens, heads] fp32, at most 0.
        rate: [num_tokens, heads] fp32.
        state: [heads, key_dim, value_dim] fp32; not changed.

    Returns:
        ([num_tokens, heads, value_dim], the state behind the last token).
    """
    num_tokens, size = query.shape[0], min(CHUNK, query.shape[0])
    padding = -num_tokens % size

    def cut(x: Tensor) -> Tensor:
        """[num_tokens, heads, …] to [heads, num_chunks, size, …]; what is added decays nothing and writes nothing."""
        padded = functional.pad(x, (0,) * (2 * (x.dim() - 1)) + (0, padding)) if padding else x
        return padded.view(-1, size, *x.shape[1:]).movedim(2, 0)

    query, key, value, log_decay, rate = (cut(x) for x in (query, key, value, log_decay, rate))
    since = log_decay.cumsum(-1)  # [heads, num_chunks, size], from the chunk's begin up to each token
    later = torch.ones(size, size, dtype=torch.bool, device=query.device).triu(1)
    between = (since[..., :, None] - since[..., None, :]).masked_fill(later, -torch.inf).exp()
    weighted = key * rate[..., None]
    # Behind the system's solution an update is `own - reads @ state`, with the state before the chunk.
    system = (weighted @ key.mT) * between
    known = torch.cat((value * rate[..., None], weighted * since.exp()[..., None]), -1)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    own, reads = torch.split(solved, [value.shape[-1], key.shape[-1]], -1)
    within = (query @ key.mT) * between
    asked = query * since.exp()[..., None]
    kept = (key * (since[..., -1:] - since).exp()[..., None]).mT
    decays = since[..., -1].exp()[..., None, None]
    found = torch.empty_like(own)
    for chunk in range(query.shape[1]):
        update = own[:, chunk] - reads[:, chunk] @ state
        found[:, chunk] = asked[:, chunk] @ state + within[:, chunk] @ update
        state = state * decays[:, chunk] + kept[:, chunk] @ update
    return found.flatten(1, 2)[:, :num_tokens].transpose(0, 1), state


def gated_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """RMS norm of each head, times the activated gate.

    Args:
        x: [num_tokens, heads, value_dim], of the model's dtype.
        weight: [value_dim], x's dtype.
        gate: as x.
        eps: added to the mean square.

    Returns:
        As x; the quotient is rounded to x's dtype before the weight, as checkpoints were trained.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return ((normed.to(x.dtype) * weight) * functional.silu(gate.float())).to(x.dtype)
