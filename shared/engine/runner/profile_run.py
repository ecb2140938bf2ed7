"""The largest step that an engine may take, run once to learn what memory it needs."""

from __future__ import annotations

from dataclasses import replace

import torch

from shared.engine.plan import PlannedSequence, SampleSpec, StepPlan
from shared.engine.runner.pool_memory import MemoryBudget, free_bytes, within_share
from shared.engine.runner.runner import Runner, RunnerConfig
from shared.engine.sampling_params import SamplingParams
from shared.kv.groups import KVGroups
from shared.kv.layout import BlockLayout
from shared.model.decoder import Decoder

POOL_SHARE = 0.97
"""The pool's share of the memory that weights, graphs and the largest step leave on a GPU; compiled kernels, the
driver's part of graphs (some 150 MiB beside 850) and fragmentation take of the rest."""
_PARAMS = SamplingParams(temperature=1.0, top_p=0.9, seed=0, max_tokens=1, repetition_penalty=1.1)


def largest_step(max_num_seqs: int, max_num_batched_tokens: int, max_seq_len: int, groups: KVGroups) -> StepPlan:
    """A step at both limits: `max_num_seqs` sequences, each with logits to sample from and penalties, whose memory is
    taken by the first; and all tokens of a step."""
    num_seqs = min(max_num_seqs, max_num_batched_tokens)
    left, items, next_block = max_num_batched_tokens, [], 0
    for index in range(num_seqs):
        count = min(max_seq_len, left - (num_seqs - index - 1))
        num_blocks = -(-count // groups.block_size) * groups.size
        spec = SampleSpec(_PARAMS, count, prompt_token_ids=(0,))
        blocks = tuple(range(next_block, next_block + num_blocks))
        items.append(PlannedSequence(f"profile{index}", (0,) * count, 0, blocks, count, (spec,)))
        next_block += num_blocks
        left -= count
    return StepPlan(tuple(items))


def measure_budget(
    decoder: Decoder,
    layout: BlockLayout,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_seq_len: int,
    memory_share: float = 1.0,
    *,
    follows: bool = False,
    graphs: RunnerConfig | None = None,
) -> MemoryBudget:
    """Memory that a CUDA device has left for the pool, measured by running the largest step over a pool of its own.

    `memory_share`: of the device's whole memory, what this process may take, its weights included. All ranks of a group
    call it together, for `layout`s of their own slices; `follows`: this one is not the leader. `graphs`: of the runner
    to come, whose graphs are captured over this pool first, a few seconds for an 8B; None where it has none.
    Raises RankLost.
    """
    plan = largest_step(max_num_seqs, max_num_batched_tokens, max_seq_len, layout.groups)
    num_blocks = sum(len(item.block_ids) for item in plan.sequences)
    with torch.inference_mode(), torch.cuda.device(decoder.device):
        if graphs is None:
            config = RunnerConfig(max_num_seqs, static_decode=False)
        else:
            config = replace(graphs, max_seq_len=max_seq_len, num_host_blocks=0, warm_up=False)
        torch.cuda.empty_cache()
        held = torch.cuda.memory_reserved()
        runner = Runner(decoder, layout, num_blocks, config)
        runner.start()
        torch.cuda.empty_cache()
        graph_bytes = max(0, torch.cuda.memory_reserved() - held - runner.kv_blocks.nbytes)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        if follows:
            runner.follow(plan)
            torch.cuda.synchronize()
        else:
            runner.execute(plan)
        step_bytes = torch.cuda.max_memory_allocated() - before + graph_bytes
        del runner
        torch.cuda.empty_cache()
    device = decoder.device
    total, used = torch.cuda.get_device_properties(device).total_memory, torch.cuda.memory_allocated(device)
    return MemoryBudget(within_share(free_bytes(device), total, used, memory_share), step_bytes, POOL_SHARE)
