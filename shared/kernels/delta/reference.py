"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464) and the convolution before it, in torch.

A head keeps a matrix S of keys by values. A token with query q, key k, value v, decay a and rate b makes of it
S' = a · S + b · k ⊗ (v - a · S k), and reads S' q. In Kimi delta attention (Kimi Team 2025, arXiv:2510.26692) each
channel of k, a row of S, has an a of its own. Everything here is in fp32, and nothing waits for a device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from shared.kernels.batch import AttentionBatch
from shared.kernels.delta_layer import DeltaLayer, check_delta_attention, state_words
from shared.kernels.pool_view import PoolView
from shared.kv.groups import KVGroups

CHUNK = 64
"""Tokens whose updates are solved for together: more cost products, fewer cost passes over the states."""
CHANNEL_CHUNK = 16
"""Likewise, where channels have decays of their own: these differ for each pair of tokens and channel."""
_NORM_EPS = 1e-6


def convolve(inputs: Tensor, weight: Tensor) -> Tensor:
    """A causal convolution of each channel by itself, without bias.

    Args:
        inputs: [batch, kernel_size - 1 + num_tokens, channels] fp32, those before the first token included.
        weight: [kernel_size, channels] fp32, that of the newest token last.

    Returns:
        [batch, num_tokens, channels].
    """
    num_tokens = inputs.shape[1] - weight.shape[0] + 1
    found = inputs[:, :num_tokens] * weight[0]
    for tap in range(1, weight.shape[0]):
        found.addcmul_(inputs[:, tap : tap + num_tokens], weight[tap])
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
        log_decay: [batch, heads, 1 or key_dim] fp32, at most 0.
        rate: [batch, heads] fp32.
        state: [batch, heads, key_dim, value_dim] fp32; changed in place.

    Returns:
        ([batch, heads, value_dim], the state behind the token).
    """
    state *= log_decay.exp()[..., None]
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
        log_decay: [num_tokens, heads, 1 or key_dim] fp32, at most 0.
        rate: [num_tokens, heads] fp32.
        state: [heads, key_dim, value_dim] fp32; not changed.

    Returns:
        ([num_tokens, heads, value_dim], the state behind the last token).
    """
    if log_decay.shape[-1] > 1:
        return _channel_chunks(query, key, value, log_decay, rate, state)
    log_decay = log_decay.squeeze(-1)
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


def _channel_chunks(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, rate: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """As `delta_chunk`, with decays [num_tokens, heads, key_dim], CHANNEL_CHUNK tokens at a time."""
    found = []
    for begin in range(0, len(query), CHANNEL_CHUNK):
        part = (x[begin : begin + CHANNEL_CHUNK].transpose(0, 1) for x in (query, key, value, log_decay, rate))
        q, k, v, decays, b = part  # [heads, size, …]
        since = decays.cumsum(1)
        later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).triu(1)[..., None]
        between = (
            (since[:, :, None] - since[:, None]).masked_fill(later, -torch.inf).exp()
        )  # [heads, size, size, key_dim]
        weighted, grown = k * b[..., None], since.exp()
        system = (weighted[:, :, None] * k[:, None] * between).sum(-1)
        known = (v - (k * grown) @ state) * b[..., None]
        update = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
        found.append((q * grown) @ state + (q[:, :, None] * k[:, None] * between).sum(-1) @ update)
        state = state * grown[:, -1, :, None] + (k * (since[:, -1:] - since).exp()).mT @ update
    return torch.cat(found, 1).transpose(0, 1), state


def gated_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float, *, is_sigmoid: bool = False) -> Tensor:
    """RMS norm of each head, times the activated gate.

    Args:
        x: [num_tokens, heads, value_dim], of the model's dtype.
        weight: [value_dim], x's dtype.
        gate: as x.
        eps: added to the mean square.
        is_sigmoid: whether the gate passes a sigmoid, not a SiLU.

    Returns:
        As x; before a SiLU the quotient is rounded to x's dtype before and behind the weight, as checkpoints were
        trained.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if is_sigmoid:
        return (normed * weight.float() * gate.float().sigmoid()).to(x.dtype)
    return ((normed.to(x.dtype) * weight) * functional.silu(gate.float())).to(x.dtype)


def delta_attention(projected: Tensor, layer: DeltaLayer, pool: PoolView, batch: AttentionBatch) -> Tensor:
    """`DecoderOps.delta_attention`."""
    check_delta_attention(projected, layer, pool, batch)
    if batch.token_states is not None:
        found = projected.new_empty(projected.shape[0], layer.value_size)
        for rows, tokens in batch.remember("tokens", lambda: _by_token(batch)):
            found.index_copy_(0, rows, delta_attention(projected.index_select(0, rows), layer, pool, tokens))
        return found
    steps = batch.remember("states", lambda: StateSteps.of(batch))
    mixed, gates, rates = torch.split(
        projected, [layer.mixed_size, layer.value_size, layer.num_value_heads + layer.decay_size], -1
    )
    found = projected.new_empty(projected.shape[0], layer.num_value_heads, layer.value_dim)
    states = _States(pool, layer)
    if steps.ones is not None:
        num_ones = steps.ones.reads.shape[1]
        found[:num_ones] = _one_each(mixed[:num_ones], rates[:num_ones], layer, states, steps.ones)
    for chunk in steps.chunks:
        part = slice(chunk.begin, chunk.begin + chunk.ends[-1])
        found[part] = _several(mixed[part], rates[part], layer, states, chunk)
    gates = gates.reshape(found.shape)
    return gated_norm(found, layer.norm, gates, layer.eps, is_sigmoid=layer.is_by_channel).flatten(1)


def _by_token(batch: AttentionBatch) -> list[tuple[Tensor, AttentionBatch]]:
    """Splits a step with `token_states`: the first tokens of all sequences as a step of their own, then the second
    ones, and so on, each with its rows [num_rows] int64 of that step."""
    assert batch.token_states is not None
    rounds, device = [], batch.slots.device
    begins = [0, *accumulate(batch.query_lens)]
    for place in range(max(batch.query_lens)):
        seqs = [seq for seq, count in enumerate(batch.query_lens) if place < count]
        rows = torch.tensor([begins[seq] + place for seq in seqs], device=device)
        kv_lens = tuple(batch.kv_lens[seq] - batch.query_lens[seq] + place + 1 for seq in seqs)
        tokens = replace(
            batch,
            query_start=torch.arange(len(seqs) + 1, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(kv_lens, dtype=torch.int32, device=device),
            block_tables=batch.block_tables[seqs],
            slots=batch.slots[rows],
            query_lens=(1,) * len(seqs),
            kv_lens=kv_lens,
            groups=(),
            state_blocks=batch.token_states[rows],
            token_states=None,
        )
        rounds.append((rows, tokens))
    return rounds


@dataclass(frozen=True, slots=True)
class _Ones:
    """The first sequences of a step, which compute one token each: all at once."""

    reads: Tensor  # [num_states, num_ones] int64, blocks of the state before the token
    writes: Tensor  # [num_states, num_ones] int64, and behind it
    is_first: Tensor | None  # [num_ones, 1] bool, where there is no state before; None: nowhere


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Another sequence."""

    begin: int  # its first token in the step
    ends: tuple[int, ...]  # of its tokens, counted from `begin`, behind which the state is written; the last is all
    read: Tensor | None  # [num_states, 1] int64, blocks of the state before; None: there is none
    writes: tuple[Tensor, ...]  # [num_states, 1] int64 each, blocks for each of `ends`


@dataclass(frozen=True, slots=True)
class StateSteps:
    """What a step does with states; `num_states` as `KVGroups` has it."""

    ones: _Ones | None
    chunks: tuple[_Chunk, ...]

    @classmethod
    def of(cls, batch: AttentionBatch) -> StateSteps:
        """Nothing here meets the device: block ids stay on it."""
        assert batch.state_blocks is not None
        groups, blocks = KVGroups(batch.block_size), batch.state_blocks.long().permute(1, 2, 0)
        num_ones, chunks = count_ones(batch), list[_Chunk]()
        row = num_ones
        for seq in range(num_ones, batch.num_seqs):
            count, end = batch.query_lens[seq], batch.kv_lens[seq]
            start = end - count
            written = groups.written_states(start, end)
            read, filled, last = (blocks[place, :, seq, None] for place in range(3))
            writes = (filled, last) if len(written) > 1 else (last,)
            ends = (*((block + 1) * batch.block_size - start for block in written[:-1]), count)
            chunks.append(_Chunk(row, ends, read if start else None, writes))
            row += count
        if not num_ones:
            return cls(None, tuple(chunks))
        reads, _, writes_of_ones = blocks[:, :, :num_ones]
        has_first = 1 in batch.kv_lens[:num_ones]
        ones = _Ones(reads.clamp(min=0), writes_of_ones, (reads[0] < 0)[:, None] if has_first else None)
        return cls(ones, tuple(chunks))


def count_ones(batch: AttentionBatch) -> int:
    """The step's first sequences that compute one token each."""
    return next((seq for seq, count in enumerate(batch.query_lens) if count > 1), batch.num_seqs)


class _States:
    """One layer's states in a pool."""

    def __init__(self, pool: PoolView, layer: DeltaLayer) -> None:
        self._layer = layer
        self._words = words = state_words(pool, layer.num_parts, layer.places)
        _, num_runs, _, run_words = words.shape
        begin, self._count = layer.number * layer.part_elements, layer.part_elements
        first = begin // run_words
        self._offset = begin - first * run_words
        runs = torch.arange(first, -(-(begin + self._count) // run_words), device=words.device)
        self._groups = torch.div(runs, num_runs, rounding_mode="floor")  # of states, of each run
        self._runs = runs % num_runs  # their numbers in a block

    def _rows(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """What `_words` is indexed with for [num_seqs, runs with a part of the state, num_parts, run_words]."""
        return blocks[self._groups].T, self._runs

    def read(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks [num_states, num_seqs] to copies of the matrices [num_seqs, num_value_heads, key_dim, value_dim], and
        of the convolution's inputs [num_seqs, kernel_size - 1, mixed_size]."""
        layer, num_seqs = self._layer, blocks.shape[1]
        parts = self._words[self._rows(blocks)].transpose(1, 2).flatten(2)
        parts = parts[:, :, self._offset : self._offset + self._count]
        of_heads = layer.matrix_elements // layer.num_parts
        matrices = parts[:, :, :of_heads].reshape(num_seqs, layer.num_value_heads, layer.key_dim, layer.value_dim)
        channels = layer.mixed_size // layer.num_parts
        tails = parts[:, :, of_heads:].reshape(num_seqs, layer.num_parts, layer.kernel_size - 1, channels)
        sizes = [size // layer.num_parts for size in (layer.key_size, layer.key_size, layer.value_size)]
        return matrices, torch.cat([x.transpose(1, 2).flatten(2) for x in torch.split(tails, sizes, -1)], -1)

    def write(self, blocks: Tensor, matrices: Tensor, tails: Tensor) -> None:
        """The inverse of `read`."""
        layer, num_seqs, num_parts = self._layer, blocks.shape[1], self._layer.num_parts
        channels = torch.split(tails, [layer.key_size, layer.key_size, layer.value_size], -1)
        by_part = torch.cat([torch.stack(x.chunk(num_parts, -1), 1) for x in channels], -1)
        rows = self._words[self._rows(blocks)].transpose(1, 2)  # with what else they hold
        parts = rows.flatten(2)
        found = (matrices.reshape(num_seqs, num_parts, -1), by_part.flatten(2))
        parts[:, :, self._offset : self._offset + self._count] = torch.cat(found, -1)
        self._words[self._rows(blocks)] = parts.view(rows.shape).transpose(1, 2)


def _one_each(mixed: Tensor, rates: Tensor, layer: DeltaLayer, states: _States, ones: _Ones) -> Tensor:
    """[num_ones, num_value_heads, value_dim] of the model's dtype."""
    matrices, tails = states.read(ones.reads)
    if ones.is_first is not None:
        matrices.masked_fill_(ones.is_first[:, None, None], 0.0)
        tails.masked_fill_(ones.is_first[:, None], 0.0)
    inputs = torch.cat((tails, mixed.float()[:, None]), 1)
    query, key, value = _parts(convolve(inputs, layer.conv)[:, 0], layer, mixed.dtype)
    found, matrices = delta_step(query, key, value, *_gates(rates, layer), matrices)
    states.write(ones.writes, matrices, inputs[:, 1:])
    return found.to(mixed.dtype)


def _several(mixed: Tensor, rates: Tensor, layer: DeltaLayer, states: _States, chunk: _Chunk) -> Tensor:
    """[num_tokens, num_value_heads, value_dim] of the model's dtype, of one sequence."""
    num_before = layer.kernel_size - 1
    if chunk.read is None:
        matrix = mixed.new_zeros((layer.num_value_heads, layer.key_dim, layer.value_dim), dtype=torch.float32)
        tail = matrix.new_zeros((num_before, layer.mixed_size))
    else:
        matrix, tail = (found[0] for found in states.read(chunk.read))
    inputs = torch.cat((tail, mixed.float()))  # [tokens, channels]
    parts = (*_parts(convolve(inputs[None], layer.conv)[0], layer, mixed.dtype), *_gates(rates, layer))
    found, begin = [], 0
    for end, blocks in zip(chunk.ends, chunk.writes, strict=True):
        query, key, value, log_decay, rate = (part[begin:end] for part in parts)
        out, matrix = delta_chunk(query, key, value, log_decay, rate, matrix)
        found.append(out)
        states.write(blocks, matrix[None], inputs[None, end : end + num_before])  # of the tokens up to `end`
        begin = end
    return torch.cat(found).to(mixed.dtype)


def _parts(convolved: Tensor, layer: DeltaLayer, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """[num_tokens, mixed_size] fp32, rounded to the model's dtype before and behind its activation, to query, key and
    value [num_tokens, num_value_heads, dim] fp32; queries and keys normalised."""
    active = functional.silu(convolved.to(dtype)).float()
    query, key, value = torch.split(active, [layer.key_size, layer.key_size, layer.value_size], -1)
    query, key = (part.view(-1, layer.num_key_heads, layer.key_dim) for part in (query, key))
    query, key = normalised(query, layer.key_dim**-0.5), normalised(key)
    times = layer.num_value_heads // layer.num_key_heads
    if times > 1:
        query, key = query.repeat_interleave(times, dim=1), key.repeat_interleave(times, dim=1)
    return query, key, value.view(-1, layer.num_value_heads, layer.value_dim)


def _gates(rates: Tensor, layer: DeltaLayer) -> tuple[Tensor, Tensor]:
    """[num_tokens, num_value_heads + decay_size] to (log decay [num_tokens, num_value_heads, 1 or key_dim], rate
    [num_tokens, num_value_heads]), fp32."""
    rate, decay = torch.split(rates, [layer.num_value_heads, layer.decay_size], -1)
    of_each = layer.decay_size // layer.num_value_heads
    grown = functional.softplus(decay.float() + layer.decay_bias).view(-1, layer.num_value_heads, of_each)
    return layer.decay[:, None] * grown, rate.sigmoid().float()
