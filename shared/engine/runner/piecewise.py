"""Prompts and mixed steps at fixed numbers of tokens, over tensors that never move; attention is eager in between."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor

from shared.engine.runner.cuda_graphs import CudaGraphs, Replayable, padded_size, token_sizes
from shared.engine.runner.eager_steps import StepInputs
from shared.engine.runner.heads import HeadInputs
from shared.kernels.pool_view import PoolView
from shared.model.decoder import Decoder

Piece = Callable[[Tensor | None], Tensor | None]
"""From the residual stream of the piece before to its own, [size, hidden_size]; a captured one passes on the last
alone."""
logger = logging.getLogger(__name__)


class PiecewiseSteps:
    """Runs steps of any mix of chunks and decodes, up to a number of tokens.

    What lies between attention calls depends on the number of tokens alone. So it is captured for a ladder of such
    numbers; attention, which depends on the sequences, is launched as ever, for the step's own tokens. Rows of padding
    hold what earlier steps and layers left there, and write to a block of the pool that no sequence uses.
    """

    def __init__(
        self,
        decoder: Decoder,
        pool: PoolView,  # its last block is for padding
        most_tokens: int,
        graphs: CudaGraphs | None,
        num_groups: int | None = None,
    ) -> None:
        """Allocates buffers of `most_tokens` rows. `graphs`: None = the pieces run eagerly. `num_groups`: of KV, but
        those of states; None: blocks are of no groups."""
        self._decoder = decoder
        self._pieces = decoder.pieces
        self._pool = pool
        self._graphs = graphs
        self._wanted = token_sizes(most_tokens)
        self._sizes: tuple[int, ...] = ()  # those that can be run, rising
        self._by_size: dict[int, tuple[Piece, ...]] = {}
        self._has_said = False
        config, block_size = decoder.config, pool.block_size
        whole, real = _zeros(decoder.device, torch.int64), _zeros(decoder.device, decoder.dtype)
        self._token_ids = whole(most_tokens)
        self._positions = whole(most_tokens)
        self._rope_lengths = whole(most_tokens) + 1 if decoder.rotary.needs_lengths else None
        offsets = torch.arange(most_tokens, dtype=torch.int64, device=decoder.device) % block_size
        self._nowhere = (pool.num_blocks - 1) * block_size + offsets
        self._slots = self._nowhere.clone() if num_groups is None else self._nowhere.repeat(num_groups, 1)
        self._cos = real(decoder.rotary.num_encodings, most_tokens, config.rotary_dim)
        self._sin = torch.zeros_like(self._cos)
        queries, attended = zip(*self._pieces.attention_shapes, strict=True)
        # One layer's is used up before the next one's: all lie in the same memory.
        self._query = real(most_tokens * max(map(prod, queries)))
        self._attended = real(most_tokens * max(map(prod, attended)))
        head = decoder.head
        self._behind = () if head is None else head.behind
        self._kept = None if head is None else head.empty_states(most_tokens)
        self._queries = _views(self._query, most_tokens, queries)
        self._results = _views(self._attended, most_tokens, attended)

    def start(self) -> None:
        """Captures what can be captured, where there are graphs; steps of other sizes are left to the caller. The
        largest first, so that the others fit into its memory."""
        first_error: RuntimeError | None = None
        for size in reversed(self._wanted):
            try:
                self._by_size[size] = self._plain(size) if self._graphs is None else self._captured(size, self._graphs)
            except RuntimeError as error:  # torch's errors of CUDA, memory's among them, are of this class
                first_error = first_error or error
        self._sizes = tuple(sorted(self._by_size))
        if first_error is not None:
            left_out = ", ".join(str(size) for size in self._wanted if size not in self._by_size)
            logger.warning("pieces of %s tokens cannot be captured and are not used: %s", left_out, first_error)

    def takes(self, num_tokens: int) -> bool:
        """Whether `run` can run a step of `num_tokens`; logs once that a step was too long."""
        if not self._sizes or num_tokens < 1:
            return False
        if num_tokens > self._sizes[-1]:
            if not self._has_said:
                self._has_said = True
                logger.info("steps of more than %d tokens, such as one of %d, run eagerly", self._sizes[-1], num_tokens)
            return False
        return True

    def run(self, inputs: StepInputs) -> tuple[Tensor, HeadInputs | None]:
        """[num_sampling, vocab_size] fp32 logits, as `Decoder.forward` gives, and what a head reads."""
        count, batch, layers = inputs.batch.num_tokens, inputs.batch, self._pieces.num_layers
        size = padded_size(self._sizes, count)
        self._fill(inputs, count, size)
        residual: Tensor | None = None
        for layer, piece in enumerate(self._by_size[size]):
            residual = piece(residual)
            attended = self._pieces.attend(layer, self._queries[layer][:count], self._pool, batch)
            if layer < layers - 1:
                self._results[layer][:count].copy_(attended)
        assert residual is not None
        return self._ended(residual[:count], attended, inputs)

    def _ended(self, residual: Tensor, attended: Tensor, inputs: StepInputs) -> tuple[Tensor, HeadInputs | None]:
        head, rows, count = self._decoder.head, inputs.logit_rows, residual.shape[0]
        if head is None or self._kept is not None:
            hidden = of_logits = self._pieces.last(residual, attended, rows)
        else:
            hidden = self._pieces.last(residual, attended, torch.arange(count, device=residual.device))
            of_logits = hidden.index_select(0, rows)
        logits = self._decoder.logits(of_logits)
        if head is None:
            return logits, None
        read = hidden if self._kept is None else head.joined(self._kept[:count])
        return logits, HeadInputs(inputs.positions, inputs.batch, read)

    def _fill(self, inputs: StepInputs, count: int, size: int) -> None:
        self._token_ids[:count].copy_(inputs.token_ids)
        self._positions[:count].copy_(inputs.positions)
        self._slots[..., :count].copy_(inputs.batch.group_slots)
        self._slots[..., count:size].copy_(self._nowhere[count:size])
        if self._rope_lengths is not None:
            assert inputs.rope_lengths is not None
            self._rope_lengths[:count].copy_(inputs.rope_lengths)

    def _plain(self, size: int) -> tuple[Piece, ...]:
        """The pieces of a step of exactly `size` rows, as many as layers: each ends where attention comes."""
        later = [partial(self._between, size, layer) for layer in range(self._pieces.num_layers - 1)]
        return (lambda _: self._first(size), *later)

    def _captured(self, size: int, graphs: CudaGraphs) -> tuple[Piece, ...]:
        """The pieces as graphs. Each is captured on the residual stream of the one before, whose memory is then free
        for the one after the next."""
        captured, residual = [], None
        for piece in self._plain(size):
            graph, residual = graphs.capture(partial(piece, residual))
            captured.append(graph)
        *earlier, last = captured
        return (*(partial(_replay, graph, None) for graph in earlier), partial(_replay, last, residual))

    def _first(self, size: int) -> Tensor:
        lengths = None if self._rope_lengths is None else self._rope_lengths[:size]
        residual, cos, sin = self._decoder.embed(self._token_ids[:size], self._positions[:size], lengths)
        self._cos[:, :size].copy_(cos)
        self._sin[:, :size].copy_(sin)
        self._queries[0][:size].copy_(self._pieces.first(residual, cos, sin, self._pool, self._slots[..., :size]))
        return residual

    def _between(self, size: int, layer: int, residual: Tensor | None) -> Tensor:
        assert residual is not None
        query, residual = self._pieces.between(
            layer, residual, self._results[layer][:size], self._cos[:, :size], self._sin[:, :size], self._pool,
            self._slots[..., :size],
        )  # fmt: skip
        self._queries[layer + 1][:size].copy_(query)
        if self._kept is not None:
            for place, count in enumerate(self._behind):
                if count == layer + 1:
                    self._kept[:size, place].copy_(residual)
        return residual


def _replay(graph: Replayable, output: Tensor | None, _residual: Tensor | None) -> Tensor | None:
    graph.replay()
    return output


def _views(memory: Tensor, num_rows: int, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """[num_rows, *shape] for each shape, all at the begin of `memory`."""
    return [memory[: num_rows * prod(shape)].view(num_rows, *shape) for shape in shapes]


def _zeros(device: torch.device, dtype: torch.dtype) -> Callable[..., Tensor]:
    return partial(torch.zeros, dtype=dtype, device=device)
