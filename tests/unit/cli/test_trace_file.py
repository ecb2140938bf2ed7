"""A recorded trace is in the order of arrival, readable as Mooncake's, and complete or not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.simulator.prediction import read_served
from loadtest.workloads.trace_json import read_json_trace
from shared.errors import ConfigError
from shared.rpc.pb.tandem.v1 import fleet_pb2
from tandem_cli.record.command import _Run, _Settings
from tandem_cli.record.trace_file import TraceFile


def recorded(at_s: float, num_prompt: int, num_output: int, **fields: object) -> fleet_pb2.RecordedRequest:
    size = fields.pop("size", 16)
    return fleet_pb2.RecordedRequest(
        arrived_unix_s=1.7e9 + at_s,
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        block_ids=range(-(-num_prompt // size)),  # type: ignore[operator]
        **{"outcome": "finished", "max_tokens": 50, "ttft_ms": 12.5, "tpot_ms": 3.0, **fields},  # type: ignore[arg-type]
    )


def test_lines_are_in_the_order_of_arrival_whatever_ended_first(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with TraceFile(path, 16) as trace:
        for one in (recorded(2.0, 40, 4), recorded(0.0, 16, 8), recorded(1.0, 17, 6, num_cached_tokens=16)):
            trace.add(one)
        assert not path.exists()
        assert "3 requests over 2 s" in trace.finish()
    assert [each.name for each in tmp_path.iterdir()] == ["trace.jsonl"]
    found = list(read_json_trace(path))
    assert [(one.at_s, one.num_prompt_tokens, one.num_output_tokens) for one in found] == [
        (0, 16, 8),
        (1, 17, 6),
        (2, 40, 4),
    ]
    assert [len(one.hash_ids) for one in found] == [1, 2, 3]
    assert {one.block_len for one in found} == {16}
    served = read_served(path)
    assert served is not None
    assert [(one.ttft_s, one.tpot_s, one.num_cached_tokens) for one in served] == [
        (0.0125, 0.003, n) for n in (0, 16, 0)
    ]


def test_what_got_no_token_is_offered_with_the_mean_answer_at_most_what_it_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    refused = {"outcome": "refused", "ttft_ms": 0.0, "tpot_ms": 0.0}
    with TraceFile(path, 512) as trace:
        trace.add(recorded(0.0, 600, 10, size=512))
        trace.add(recorded(1.0, 600, 30, size=512))
        trace.add(recorded(2.0, 600, 0, size=512, **refused))
        trace.add(recorded(3.0, 600, 0, size=512, **{**refused, "max_tokens": 5}))
        assert "2 refused" in trace.finish()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["output_length"] for line in lines] == [10, 30, 20, 5]
    assert "block_size" not in lines[0]
    assert "ttft_ms" not in lines[2]


def test_nothing_is_written_over_and_nothing_is_left_of_an_empty_recording(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with pytest.raises(ConfigError, match="no request ended") as refused, TraceFile(path, 16) as trace:
        trace.finish()
    assert refused.value.field == "duration"
    assert not list(tmp_path.iterdir())
    path.write_text("mine")
    with pytest.raises(ConfigError, match="already") as refused, TraceFile(path, 16):
        pass
    assert (refused.value.field, path.read_text()) == ("out", "mine")
    for name in ("t.csv", "t.jsonl.gz"):
        with pytest.raises(ConfigError, match="the trace is JSON lines"), TraceFile(tmp_path / name, 16):
            pass
    for path in (tmp_path / "none" / "t", tmp_path / ("x" * 300)):
        with pytest.raises(ConfigError, match="cannot write"), TraceFile(path, 16):
            pass


def test_a_recording_ends_at_its_last_request_and_tells_what_it_left_out(tmp_path: Path) -> None:
    with TraceFile(tmp_path / "trace.jsonl", 16) as trace:
        run = _Run(trace, _Settings(None, 60.0, 2, 16, ""), 1)
        run._take("a:1", fleet_pb2.RecordedRequests(requests=[recorded(0.0, 16, 8)]))
        assert not run._leave.is_set()
        two = [recorded(1.0, 16, 8), recorded(2.0, 16, 8)]
        run._take("a:1", fleet_pb2.RecordedRequests(requests=two, num_dropped=5, num_running=3))
        assert run._leave.is_set()
        summary = trace.finish()
    for part in ("2 requests over 1 s", "3 that still ran are left out", "5 were dropped"):
        assert part in summary
