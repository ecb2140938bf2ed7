"""Steps of any mix of chunks and decodes: inputs, planned once for all layers, and what the model makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.engine.plan import PlannedSequence
from shared.engine.runner.adapter_slots import AdapterSlots
from shared.engine.runner.device_link import DeviceLink
from shared.engine.runner.logprobs import logit_rows
from shared.engine.runner.sampler import ALL_CANDIDATES, num_candidates
from shared.kernels.batch import FEW_TOKENS, AttentionBatch, step_positions
from shared.kernels.pool_view import PoolView
from shared.kv.groups import KVGroups
from shared.model.decoder import Decoder
from shared.model.ranks.rank_decoder import MicroBatch, RankDecoder


@dataclass(frozen=True, eq=False, slots=True)
class StepInputs:
    """A step's tensors, on the device."""

    token_ids: Tensor  # [num_tokens] int64, 0 where a token is pending
    positions: Tensor  # [num_tokens] int64
    batch: AttentionBatch
    logit_rows: Tensor  # [num_logits] int64, those before targets and those before tokens to be chosen, rising
    rope_lengths: Tensor | None  # [num_tokens] int64, where asked for
    pending: tuple[Tensor, Tensor] | None  # (rows of token_ids, rows of the tokens sampled before), int64


class EagerInputs:
    """Builds the inputs. It keeps the block tables of the step before as arrays: most sequences keep theirs."""

    def __init__(
        self, block_size: int, link: DeviceLink, *, needs_lengths: bool, groups: KVGroups | None = None
    ) -> None:
        """`needs_lengths`: the model's rotary positions depend on the sequences' lengths. `groups`: of KV, whose
        blocks take turns in a sequence's table; None: one."""
        self._block_size = block_size
        self._groups = groups
        self._num_groups = 1 if groups is None else groups.size
        self._num_states = 0 if groups is None else groups.num_states
        self._link = link
        self._needs_lengths = needs_lengths
        self._tables: dict[str, tuple[tuple[int, ...], NDArray[np.int32]]] = {}

    def of(self, items: Sequence[PlannedSequence]) -> StepInputs:
        """Queues the copies of a step's inputs."""
        query_lens = [len(item.token_ids) for item in items]
        kv_lens = [item.start + len(item.token_ids) for item in items]
        ends = list(accumulate(query_lens))
        tables = self._arrays(items)
        batches = [
            AttentionBatch.from_lists(
                query_lens, kv_lens, [table[group :: self._num_groups] for table in tables], self._block_size
            )
            for group in range(self._num_groups - self._num_states)
        ]
        if any(len(item.samples) > 1 for item in items):
            batches = [replace(batch, has_guesses=True) for batch in batches]
        batch = batches[0]
        positions = step_positions(query_lens, kv_lens)
        rows = logit_rows(items)
        arrays = {
            "token_ids": _joined(items, batch.num_tokens),
            "positions": positions,
            "rows": np.array(rows, dtype=np.int64),
        }
        if self._needs_lengths:
            arrays["rope_lengths"] = _rope_lengths(items, positions, query_lens)
        pending = [(end - 1, item.pending) for end, item in zip(ends, items, strict=True) if item.pending is not None]
        if pending:
            arrays["places"], arrays["sampled_rows"] = np.ascontiguousarray(np.array(pending, dtype=np.int64).T)
        if self._link.is_async:
            arrays |= {f"slots{group}": part.slots.numpy() for group, part in enumerate(batches)}
            arrays |= {name: getattr(batch, name).numpy() for name in ("query_start", "seq_lens")}
        tensors = dict(zip(arrays, self._link.send_all(list(arrays.values())), strict=True))
        return StepInputs(
            tensors["token_ids"],
            tensors["positions"],
            self._with_states(self._on_device(batches, tensors), items),
            tensors["rows"],
            tensors.get("rope_lengths"),
            (tensors["places"], tensors["sampled_rows"]) if pending else None,
        )

    def _on_device(self, batches: Sequence[AttentionBatch], tensors: dict[str, Tensor]) -> AttentionBatch:
        """The step's batch, of the batches of all groups."""
        if self._link.is_async:
            batches = [
                replace(
                    batch,
                    query_start=tensors["query_start"],
                    seq_lens=tensors["seq_lens"],
                    block_tables=self._link.send(batch.block_tables),
                    slots=tensors[f"slots{group}"],
                )
                for group, batch in enumerate(batches)
            ]
        first, *later = batches
        return first.with_groups(later) if self._num_groups > 1 else first

    def _with_states(self, batch: AttentionBatch, items: Sequence[PlannedSequence]) -> AttentionBatch:
        """The batch with the blocks of the groups of states, if there are any."""
        if not self._num_states:
            return batch
        assert self._groups is not None
        if any(item.guess_states for item in items):
            of_tokens = [
                blocks
                for item in items
                for blocks in self._groups.guess_state_blocks(item.block_ids, item.start, item.guess_states)
            ]
            return replace(batch, token_states=self._link.send(torch.from_numpy(np.array(of_tokens, dtype=np.int32))))
        found = [
            self._groups.state_blocks(item.block_ids, item.start, item.start + len(item.token_ids)) for item in items
        ]
        return replace(batch, state_blocks=self._link.send(torch.from_numpy(np.array(found, dtype=np.int32))))

    def _arrays(self, items: Sequence[PlannedSequence]) -> list[NDArray[np.int32]]:
        """Block tables; those that a step before had are not converted again."""
        before, self._tables = self._tables, {}
        for item in items:
            known = before.get(item.sequence_id)
            if known is None or known[0] is not item.block_ids:
                known = item.block_ids, np.asarray(item.block_ids, dtype=np.int32)
            self._tables[item.sequence_id] = known
        return [table for _, table in self._tables.values()]


class EagerSteps:
    """Runs steps of any mix of chunks and decodes, op by op. Called by the engine thread alone."""

    def __init__(
        self, decoder: Decoder, pool: PoolView, link: DeviceLink, groups: KVGroups | None = None, *, leads: bool = False
    ) -> None:
        """`groups`: of KV; None: one. `leads`: the decoder is that of a group's leader, which samples."""
        self._decoder = decoder
        self._pool = pool
        self._link = link
        self._leads = leads
        self._inputs = EagerInputs(pool.block_size, link, needs_lengths=decoder.rotary.needs_lengths, groups=groups)
        self.adapters = AdapterSlots(decoder.kernels, decoder.device)
        """What steps compute with beside the model."""
        self.sampled: Tensor | None = None
        """[num_rows] int64, the tokens of the step before, for `pending` ones."""

    def inputs(self, items: tuple[PlannedSequence, ...]) -> StepInputs:
        """A step's inputs, with the tokens in place that the step before sampled."""
        inputs = self._inputs.of(items)
        if inputs.pending is not None:
            places, rows = inputs.pending
            inputs.token_ids.index_copy_(0, places, self._sampled_at(rows))
        return inputs

    def logits(self, items: tuple[PlannedSequence, ...]) -> Tensor:
        """[num_logits, vocab_size] fp32: those of `logit_rows`. In a group, every rank calls it for the same sequences,
        and the leader gets the logits."""
        if self._decoder.num_stages > 1:
            return self._staged_logits(items)
        inputs = self.inputs(items)
        return self._decoder.forward(
            inputs.token_ids,
            inputs.positions,
            self._pool,
            inputs.batch,
            inputs.logit_rows,
            inputs.rope_lengths,
            num_candidates(items) if self._decoder.is_split else ALL_CANDIDATES,
            self.adapters.loras(items),
        )

    def hidden(self, items: tuple[PlannedSequence, ...], inputs: StepInputs) -> tuple[Tensor, Tensor, Tensor | None]:
        """What a head reads [num_tokens, hidden_size], or without one some rows behind the final norm; the logits as
        `logits` gives them; and [num_pooling, hidden_size] fp32: for each sequence that has any, the sum of its last
        `num_pooled` tokens' hidden states. Never in a group."""
        assert self._decoder.num_stages == 1, "a group pools nothing"
        assert not self._decoder.is_split, "a group pools nothing"
        wanted = list[range]()
        end = 0
        for item in items:
            end += len(item.token_ids)
            if item.num_pooled:
                wanted.append(range(end - item.num_pooled, end))
        for_logits = logit_rows(items)
        head = self._decoder.head
        rows: Sequence[int] = range(end)
        kept = None if head is None else head.empty_states(end)
        if head is None or kept is not None:
            rows = sorted({*for_logits, *(row for part in wanted for row in part)})
        place = {row: i for i, row in enumerate(rows)}
        send = self._link.send
        hidden = self._decoder.hidden(
            inputs.token_ids,
            inputs.positions,
            self._pool,
            inputs.batch,
            send(torch.tensor(rows, dtype=torch.int64)),
            inputs.rope_lengths,
            self.adapters.loras(items),
            kept,
        )
        sums = [
            hidden.index_select(0, send(torch.tensor([place[row] for row in part]))).float().sum(dim=0)
            for part in wanted
        ]
        of_logits = hidden.index_select(0, send(torch.tensor([place[row] for row in for_logits], dtype=torch.int64)))
        if head is not None and kept is not None:
            hidden = head.joined(kept)
        return hidden, self._decoder.logits(of_logits), torch.stack(sums) if sums else None

    def _staged_logits(self, items: tuple[PlannedSequence, ...]) -> Tensor:
        assert isinstance(self._decoder, RankDecoder)
        split_items = micro_batches(items, self._decoder.num_stages)
        filled = [(self.inputs(part), self.adapters.loras(part)) for part in split_items]
        parts = [
            MicroBatch(x.token_ids, x.positions, x.batch, x.logit_rows, x.rope_lengths, loras) for x, loras in filled
        ]
        return self._decoder.forward_parts(parts, self._pool, num_candidates(items))

    def _sampled_at(self, rows: Tensor) -> Tensor:
        """[len(rows)] int64, the tokens that the step before sampled there. A group's leader has them, and sends them
        to the ranks that embed them: on the device, before the host knows them."""
        if self.sampled is None:
            assert self._decoder.is_split
            assert not self._leads, "nothing was sampled before"
            tokens = torch.zeros_like(rows)
        else:
            # A row without a token is -1; it computes from token 0 instead, and the result is dropped.
            tokens = self.sampled.index_select(0, rows).clamp(min=0)
        if isinstance(self._decoder, RankDecoder):
            self._decoder.spread(tokens)
        return tokens


def _joined(items: Sequence[PlannedSequence], num_tokens: int) -> NDArray[np.int64]:
    """[num_tokens]"""
    if num_tokens <= FEW_TOKENS:
        return np.array(list(chain.from_iterable(item.token_ids for item in items)), dtype=np.int64)
    tokens = np.empty(num_tokens, dtype=np.int64)
    begin = 0
    for item in items:
        end = begin + len(item.token_ids)
        tokens[begin:end] = item.token_ids
        begin = end
    return tokens


def _rope_lengths(
    items: Sequence[PlannedSequence], positions: NDArray[np.int64], query_lens: Sequence[int]
) -> NDArray[np.int64]:
    """For dynamic rope scaling, the sequence length that each token's frequencies are for: [num_tokens].

    A prompt token takes its prompt's length, an output token its own position + 1, so that the rotation of a token
    depends on neither chunking nor the worker.
    """
    prompt_lens = np.array([item.num_prompt_tokens for item in items], dtype=np.int64)
    lengths: NDArray[np.int64] = np.maximum(np.repeat(prompt_lens, query_lens), positions + 1)
    return lengths


def micro_batches(items: Sequence[PlannedSequence], count: int) -> list[tuple[PlannedSequence, ...]]:
    """The sequences in their order, in at most `count` parts of about as many tokens; none is empty."""
    share = -(-sum(len(item.token_ids) for item in items) // count)
    parts: list[tuple[PlannedSequence, ...]] = []
    part: list[PlannedSequence] = []
    num_tokens = 0
    for item in items:
        part.append(item)
        num_tokens += len(item.token_ids)
        if num_tokens >= share and len(parts) < count - 1:
            parts.append(tuple(part))
            part, num_tokens = [], 0
    return [*parts, tuple(part)] if part else parts
