"""Sharing cores is exact: disjoint and complete while there are enough, balanced where there are not."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from shared.cores.core_choice import share_cores

core_sets = st.lists(st.integers(0, 255), min_size=1, max_size=64, unique=True).map(sorted)


@given(cores=core_sets, data=st.data())
def test_enough_cores_are_split_into_runs_that_cover_them_in_order(cores: list[int], data: st.DataObject) -> None:
    num_workers = data.draw(st.integers(1, len(cores)))
    runs = share_cores(cores, num_workers)
    assert [core for run in runs for core in run] == cores
    lengths = [len(run) for run in runs]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] >= 1
    assert lengths[0] - lengths[-1] <= 1


@given(cores=core_sets, extra=st.integers(1, 200))
def test_too_few_cores_are_shared_evenly_one_to_each_worker(cores: list[int], extra: int) -> None:
    runs = share_cores(cores, len(cores) + extra)
    assert len(runs) == len(cores) + extra
    assert all(len(run) == 1 for run in runs)
    load = Counter(run[0] for run in runs)
    assert set(load) == set(cores)
    assert max(load.values()) - min(load.values()) <= 1
    assert [run[0] for run in runs] == sorted(run[0] for run in runs)
