"""A layer that mixes tokens by a state: projections, short convolution, gated delta rule, gated norm.

A sequence's states, of all such layers behind each other, lie in a block of each group of states (`KVGroups.is_state`):
a layer's may begin in one and end in another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from shared.kernels.batch import AttentionBatch
from shared.kernels.cpu.torch_threads import in_this_thread
from shared.kernels.delta.reference import convolve, delta_chunk, delta_step, gated_norm, normalised
from shared.kernels.lora.step import StepLoras
from shared.kernels.pool_view import PoolView
from shared.kv.groups import KVGroups
from shared.model.config.model_config import ModelConfig
from shared.model.layers.modules import LayerModules

_FEW_PARTS = 8
"""Blocks of a layer's state that are read one after another; of more, all with what else they hold."""


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
class _StateSteps:
    """What a step does with states; `num_states` as `KVGroups` has it."""

    ones: _Ones | None
    chunks: tuple[_Chunk, ...]

    @classmethod
    def of(cls, batch: AttentionBatch) -> _StateSteps:
        """Nothing here meets the device: block ids stay on it."""
        assert batch.state_tables is not None, "states lie in KV groups"
        groups, tables = KVGroups(batch.block_size), batch.state_tables.long()
        size, counts = groups.block_size, batch.query_lens
        num_ones = next((seq for seq, count in enumerate(counts) if count > 1), len(counts))
        row, chunks = num_ones, list[_Chunk]()
        for seq in range(num_ones, len(counts)):
            end = batch.kv_lens[seq]
            start = end - counts[seq]
            written = groups.written_states(start, end)
            chunks.append(
                _Chunk(
                    row,
                    (*((block + 1) * size - start for block in written[:-1]), counts[seq]),
                    tables[:, seq, (start - 1) // size, None] if start else None,
                    tuple(tables[:, seq, block, None] for block in written),
                )
            )
            row += counts[seq]
        if not num_ones:
            return cls(None, tuple(chunks))
        lengths, tables = batch.seq_lens[:num_ones].long(), tables[:, :num_ones]
        has_first = 1 in batch.kv_lens[:num_ones]
        found = _Ones(
            _at(tables, torch.div((lengths - 2).clamp(min=0), size, rounding_mode="floor")),
            _at(tables, torch.div(lengths - 1, size, rounding_mode="floor")),
            (lengths == 1)[:, None] if has_first else None,
        )
        return cls(found, tuple(chunks))


class _States:
    """One layer's part of the states in a pool."""

    def __init__(self, pool: PoolView, begin: int, count: int) -> None:
        """`begin`: the layer's first number among those of all layers with a state; `count`: how many it has."""
        self._words = words = pool.memory.view(pool.num_blocks, -1).view(torch.float32)
        size = words.shape[1]
        self._first, self._end = begin // size, -(-(begin + count) // size)
        self._offset, self._count = begin - self._first * size, count
        # Of each group of states with a part: (its number, the first and the last number in its block, one behind).
        self._parts = [
            (group, max(0, begin - group * size), min(size, begin + count - group * size))
            for group in range(self._first, self._end)
        ]

    def read(self, blocks: Tensor) -> Tensor:
        """Blocks [num_states, num_seqs] to a copy of the states [num_seqs, state_elements]."""
        if len(self._parts) <= _FEW_PARTS:
            found = [self._words[:, a:b].index_select(0, blocks[group]) for group, a, b in self._parts]
            return torch.cat(found, -1) if len(found) > 1 else found[0]
        whole = self._words.index_select(0, blocks[self._first : self._end].flatten())
        by_sequence = whole.view(len(self._parts), -1, whole.shape[1]).transpose(0, 1).flatten(1)
        return by_sequence[:, self._offset : self._offset + self._count].contiguous()

    def write(self, blocks: Tensor, states: Tensor) -> None:
        """The inverse of `read`."""
        parts, size, at = self._parts, self._words.shape[1], 0
        if len(parts) > _FEW_PARTS:
            first, last = parts[0], parts[-1]
            begin, end = first[2] - first[1], self._count - (last[2] - last[1])
            middle = states[:, begin:end].reshape(len(states), -1, size).transpose(0, 1).flatten(0, 1)
            self._words.index_copy_(0, blocks[first[0] + 1 : last[0]].flatten(), middle)
            self._words[:, first[1] : first[2]].index_copy_(0, blocks[first[0]], states[:, :begin])
            self._words[:, last[1] : last[2]].index_copy_(0, blocks[last[0]], states[:, end:])
            return
        for group, begin, end in parts:
            self._words[:, begin:end].index_copy_(0, blocks[group], states[:, at : at + end - begin])
            at += end - begin


class DeltaBlock:
    """Linear attention by the gated delta rule, in place of an attention block."""

    def __init__(self, config: ModelConfig, layer: LayerModules, place: tuple[int, int]) -> None:
        """Keeps references to its arguments; `place` is one of `layer_places`."""
        assert config.delta is not None
        assert layer.delta is not None
        self._delta = config.delta
        self._modules = layer.delta
        self._layer = layer
        self._eps = config.rms_norm_eps
        self._number = place[1]  # among the layers with a state
        self._sizes = [config.delta.mixed_size, config.delta.value_size]
        matrix = config.delta.matrix_elements
        self._state_sizes = [matrix, config.delta.state_elements - matrix]

    def place(
        self,
        x: Tensor,
        cos: Tensor,  # noqa: ARG002  # positions are not encoded
        sin: Tensor,  # noqa: ARG002
        pool: PoolView,  # noqa: ARG002
        slots: Tensor,  # noqa: ARG002
        loras: StepLoras | None = None,
    ) -> Tensor:
        """[num_tokens, hidden_size], normalised, to the projections [num_tokens, mixed_size + value_size +
        2 * num_value_heads]: queries, keys, values, gates, rates, decays. The other arguments as for
        `AttentionBlock.place`; adapters add to no such layer."""
        assert loras is None, "adapters of layers with a state"
        wide, narrow = self._layer.qkv.forward(x), self._modules.rates.forward(x)
        with in_this_thread(x, wide.numel()):
            return torch.cat((wide, narrow), -1)

    def attend(self, query: Tensor, pool: PoolView, batch: AttentionBatch) -> Tensor:
        """What `place` gave to [num_tokens, value_size], gated and normed. Reads and writes the sequences' states."""
        delta = self._delta
        steps = batch.remember("states", lambda: _StateSteps.of(batch))
        states = _States(pool, self._number * delta.state_elements, delta.state_elements)
        mixed, gates, rates = torch.split(query, [*self._sizes, 2 * delta.num_value_heads], -1)
        found = query.new_empty(query.shape[0], delta.num_value_heads, delta.value_dim)
        if steps.ones is not None:
            num_ones = steps.ones.reads.shape[1]
            with in_this_thread(query, num_ones * delta.state_elements):
                found[:num_ones] = self._one_each(mixed[:num_ones], rates[:num_ones], states, steps.ones)
        for chunk in steps.chunks:
            part = slice(chunk.begin, chunk.begin + chunk.ends[-1])
            with in_this_thread(query, chunk.ends[-1] * delta.mixed_size):
                found[part] = self._several(mixed[part], rates[part], states, chunk)
        with in_this_thread(query, found.numel()):
            return gated_norm(found, self._modules.norm, gates.reshape(found.shape), self._eps).flatten(1)

    def project(self, attended: Tensor, loras: StepLoras | None = None) -> Tensor:
        """[num_tokens, value_size] to [num_tokens, hidden_size]."""
        assert loras is None, "adapters of layers with a state"
        return self._layer.o.forward(attended)

    def _one_each(self, mixed: Tensor, rates: Tensor, states: _States, ones: _Ones) -> Tensor:
        """[num_ones, num_value_heads, value_dim] of the model's dtype."""
        delta = self._delta
        before = states.read(ones.reads)
        if ones.is_first is not None:
            before.masked_fill_(ones.is_first, 0.0)
        matrices, tails = torch.split(before, self._state_sizes, -1)
        inputs = torch.cat(
            (tails.view(mixed.shape[0], delta.mixed_size, delta.kernel_size - 1), mixed.float()[..., None]), -1
        )
        query, key, value = self._parts(convolve(inputs, self._modules.conv)[..., 0], mixed.dtype)
        matrices = matrices.view(-1, delta.num_value_heads, delta.key_dim, delta.value_dim)
        found, matrices = delta_step(query, key, value, *self._gates(rates), matrices)
        states.write(ones.writes, torch.cat((matrices.flatten(1), inputs[..., 1:].flatten(1)), -1))
        return found.to(mixed.dtype)

    def _several(self, mixed: Tensor, rates: Tensor, states: _States, chunk: _Chunk) -> Tensor:
        """[num_tokens, num_value_heads, value_dim] of the model's dtype, of one sequence."""
        delta = self._delta
        before = (
            mixed.new_zeros((1, delta.state_elements), dtype=torch.float32)
            if chunk.read is None
            else states.read(chunk.read)
        )
        matrix, tail = torch.split(before, self._state_sizes, -1)
        num_before = delta.kernel_size - 1
        inputs = torch.cat((tail.view(delta.mixed_size, num_before), mixed.float().T), -1)  # [channels, tokens]
        parts = (*self._parts(convolve(inputs[None], self._modules.conv)[0].T, mixed.dtype), *self._gates(rates))
        matrix = matrix.view(delta.num_value_heads, delta.key_dim, delta.value_dim)
        found, begin = [], 0
        for end, blocks in zip(chunk.ends, chunk.writes, strict=True):
            query, key, value, log_decay, rate = (part[begin:end] for part in parts)
            out, matrix = delta_chunk(query, key, value, log_decay, rate, matrix)
            found.append(out)
            last = inputs[:, end : end + num_before]  # of the tokens up to `end`
            states.write(blocks, torch.cat((matrix.flatten(), last.flatten()))[None])
            begin = end
        return torch.cat(found).to(mixed.dtype)

    def _parts(self, convolved: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """[num_tokens, mixed_size] fp32, rounded to the model's dtype before and behind its activation, to query, key
        and value [num_tokens, num_value_heads, dim] fp32; queries and keys normalised."""
        delta = self._delta
        active = functional.silu(convolved.to(dtype)).float()
        query, key, value = torch.split(active, [delta.key_size, delta.key_size, delta.value_size], -1)
        query, key = (part.view(-1, delta.num_key_heads, delta.key_dim) for part in (query, key))
        query, key = normalised(query, delta.key_dim**-0.5), normalised(key)
        times = delta.num_value_heads // delta.num_key_heads
        if times > 1:
            query, key = query.repeat_interleave(times, dim=1), key.repeat_interleave(times, dim=1)
        return query, key, value.view(-1, delta.num_value_heads, delta.value_dim)

    def _gates(self, rates: Tensor) -> tuple[Tensor, Tensor]:
        """[num_tokens, 2 * num_value_heads] to (log decay, rate), [num_tokens, num_value_heads] fp32 each."""
        rate, decay = rates.chunk(2, -1)
        log_decay = self._modules.decay * functional.softplus(decay.float() + self._modules.decay_bias)
        return log_decay, rate.sigmoid().float()


def _at(tables: Tensor, columns: Tensor) -> Tensor:
    """Of each sequence's tables [num_states, num_seqs, max_blocks] the blocks in its column: [num_states, num_seqs]."""
    return tables.gather(2, columns[None, :, None].expand(tables.shape[0], -1, 1))[..., 0]
