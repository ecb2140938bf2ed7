"""The scheduler's limits and counters."""

from __future__ import annotations

from dataclasses import dataclass

MAX_UNSENT_SHARE = 0.5
"""A prefill worker starts no prompt for a decode worker that has yet to take blocks of more than this share of the
pool."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one engine."""

    max_num_seqs: int = 64
    """Most sequences that hold blocks at once."""
    max_num_batched_tokens: int = 512
    """Budget of tokens computed in one step; a longer prompt is computed in chunks."""
    output_quantile: float = 0.0
    """Expected length of an answer: this quantile of the lengths of finished answers. 0 = one block is kept free for
    each running sequence instead."""
    first_output_guess: int = 128
    """Expected tokens of an answer until enough answers have finished."""
    num_host_blocks: int = 0
    """Blocks of host memory for preempted sequences; 0 = they are computed again."""
    tpot_target_s: float = 0.0
    """A batch grows while a step is predicted to take no longer, and chunks beside it are as large as the slack of its
    answers allows; 0 = up to max_num_seqs and max_num_batched_tokens."""
    itl_target_s: float = 0.0
    """Greatest gap between two tokens of an answer that a chunk may cause; 0 = three times tpot_target_s."""
    max_overtaken_s: float = 0.0
    """Shorter prompts go first, but never before one that has waited this long; 0 = in order of arrival."""
    max_unsent_share: float = 1.0
    """Prompts for a decode worker wait while its unsent blocks take more than this share of the pool."""
    recomputes: bool = True
    """Whether tokens whose KV was lost are computed again here. Else their sequence fails and another prefill worker
    computes them: where prompts come converted, what this engine would compute is not what was lost."""
    max_last_chunk: int = 0
    """Most tokens of the last chunk of a prompt whose blocks are sent: its own leave only behind it. 0 = no limit."""


@dataclass(slots=True)
class SchedulerCounters:
    """Sums since start."""

    num_prompt_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_preemptions: int = 0
    num_swapped_out: int = 0  # of these, moved to host memory
    num_swapped_in: int = 0  # of these, back without being computed again
