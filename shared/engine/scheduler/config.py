"""What a scheduler is told, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one engine."""

    max_num_seqs: int = 64
    """Most sequences that hold blocks at once."""
    max_num_batched_tokens: int = 512
    """Budget of tokens computed in one step; a longer prompt is computed in chunks."""
    output_quantile: float = 0.0
    """Answers are expected to become as long as this quantile of those that ended; 0 = one block is kept free for each
    running sequence instead."""
    first_output_guess: int = 128
    """Expected tokens of an answer before enough have ended."""
    num_host_blocks: int = 0
    """Blocks of host memory for preempted sequences; 0 = they are computed again."""
    tpot_target_s: float = 0.0
    """A batch grows while a step is predicted to take no longer; 0 = up to max_num_seqs."""
    max_overtaken_s: float = 0.0
    """Shorter prompts go first, but none overtakes one that has waited so long; 0 = in order of arrival."""
    max_unsent_share: float = 1.0
    """Prompts for a receiver wait while more than this share of the pool holds blocks that it has not taken."""


@dataclass(slots=True)
class SchedulerCounters:
    """Sums since start."""

    num_prompt_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_preemptions: int = 0
    num_swapped_out: int = 0  # of these, moved to host memory
    num_swapped_in: int = 0  # of these, back without being computed again
