"""The inputs of a step of any mix of chunks and decodes, planned once for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.engine.plan import PlannedSequence
from shared.engine.runner.device_link import DeviceLink
from shared.engine.runner.logprobs import logit_rows
from shared.kernels.batch import FEW_TOKENS, AttentionBatch, step_positions
from shared.kv.groups import KVGroups


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
