"""The benchmark of the host's time runs an engine whose steps are those that it speaks of."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from loadtest.bench.engine.host_time import HostBench, main
from shared.engine.sequence import Goal


def test_sequences_decode_together_and_every_part_of_a_step_takes_time() -> None:
    with torch.inference_mode():
        steps = HostBench(3, 60, 64).steps([[1 + i] * 20 for i in range(3)], Goal.COMPLETION, 5)
    assert [num_tokens for num_tokens, _ in steps if num_tokens] == [3] * 5
    assert all(0 < times.launch + times.result < times.total for _, times in steps)


def test_a_prompt_is_computed_in_chunks_whose_mean_is_given() -> None:
    bench = HostBench(1, 64, 16)
    with torch.inference_mode():
        (began, _), (ended, others) = bench.steps([[1] * 64], Goal.FIRST_TOKEN, 1)
    assert (began, ended) == (0, 1)
    assert 0 < others.launch + others.result < others.total


def test_the_report_has_each_batch_and_the_chunk(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        main(batch="2", context=32, chunk=64, repeats=4, out=tmp_path / "host.json")
    finally:
        torch.set_num_threads(threads)
    names = [row["name"] for row in json.loads((tmp_path / "host.json").read_text())["results"]]
    assert [name for name in names if ":" not in name] == ["decode 2 at 32", "prefill 64"]
