"""The masks of a step's structured answers: computed beside the model's step, applied before its tokens are chosen."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from shared.engine.plan import PlannedSequence
from shared.engine.runner.device_link import DeviceLink
from shared.engine.runner.sampler import RowMasks
from shared.structure.compiler import StructureCompiler
from shared.structure.matchers import Masks, SequenceMatchers, StructuredRow

MAX_MASK_THREADS = 8


class StepMasks:
    """The masks of one step, once it is asked for them."""

    def __init__(self, rows: Sequence[int], masks: Callable[[], Masks], link: DeviceLink) -> None:
        self._rows = rows
        self._masks = masks
        self._link = link

    def row_masks(self) -> RowMasks:
        """Called when the model's part of the step was begun; waits for the tokens of the step before."""
        words, faults = self._masks()
        named = {self._rows[at]: reason for at, reason in faults.items()}
        return RowMasks(self._rows, self._link.send(torch.from_numpy(words)), named)


class StructureMasks:
    """One runner's masks.

    On the CPU, where a launch returns when the step is done, a thread computes them while the model runs. On a GPU the
    calling thread does, when the model's part is queued: it then waits for the token of the step before, which every
    mask follows from, and the device computes the model meanwhile.
    """

    def __init__(self, compiler: StructureCompiler, link: DeviceLink) -> None:
        self._link = link
        num_threads = min(MAX_MASK_THREADS, os.cpu_count() or 1) if link.is_async else 1
        self._matchers = SequenceMatchers(compiler, num_threads)
        self._thread = None if link.is_async else ThreadPoolExecutor(1, "masks")  # begun by the first mask

    def begin(self, items: Sequence[PlannedSequence], sampled_before: Callable[[], Sequence[int]]) -> StepMasks | None:
        """The masks of a plan's sequences; None where none is structured. Called once for every plan launched.

        `sampled_before()`: the tokens of the step before, -1 where there is none.
        """
        self._matchers.begin_step()
        sampling = [item for item in items if item.sample is not None]
        rows = [at for at, item in enumerate(sampling) if item.sample and item.sample.params.structured_output]
        if not rows:
            return None
        structured = [sampling[at] for at in rows]
        if self._thread is None:
            return StepMasks(rows, lambda: self._fill(structured, sampled_before), self._link)
        future: Future[Masks] = self._thread.submit(self._fill, structured, sampled_before)
        return StepMasks(rows, future.result, self._link)

    def _fill(self, items: Sequence[PlannedSequence], sampled_before: Callable[[], Sequence[int]]) -> Masks:
        before = sampled_before() if any(item.pending is not None for item in items) else ()
        return self._matchers.fill([_row(item, before) for item in items])


def _row(item: PlannedSequence, before: Sequence[int]) -> StructuredRow:
    sample = item.sample
    assert sample is not None
    assert sample.params.structured_output is not None
    num_output_tokens = sample.position - item.num_prompt_tokens
    newest = before[item.pending] if item.pending is not None else item.token_ids[-1]
    return StructuredRow(
        item.sequence_id,
        sample.params.structured_output,
        num_output_tokens,
        newest if num_output_tokens else None,
        sample.output_token_ids,
        sample.banned_token_ids,
        sample.params.bad_sequences,
    )
