"""Which cores each worker of a local cluster gets."""

from __future__ import annotations

from collections.abc import Sequence


def share_cores(cores: Sequence[int], num_workers: int) -> list[tuple[int, ...]]:
    """Splits `cores` into one run for each worker, in order.

    With C cores and W ≤ C workers the runs are disjoint, cover all cores, and their lengths differ by at most one;
    the longer ones come first (prefill workers are listed first, and prefill is what more cores speed up most).
    With W > C every worker gets one core, and neighbours share: the cores' numbers of workers differ by at most one.
    Router, KV store and index stay unpinned: they are idle while a step runs.
    """
    assert cores, "no cores"
    assert num_workers >= 1, num_workers
    num_cores = len(cores)
    if num_workers > num_cores:
        return [(cores[i * num_cores // num_workers],) for i in range(num_workers)]
    shortest, num_longer = divmod(num_cores, num_workers)
    runs: list[tuple[int, ...]] = []
    start = 0
    for i in range(num_workers):
        end = start + shortest + (1 if i < num_longer else 0)
        runs.append(tuple(cores[start:end]))
        start = end
    return runs
