"""What a run is made of: named workloads, arrivals, prompts' blocks in the index, noise."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest

from loadtest.simulator.cli import main
from loadtest.simulator.engine import Noise
from loadtest.simulator.load import WORKLOADS, at_rate, mean_rate, poisson
from loadtest.simulator.prefix_index import PrefixIndex
from loadtest.simulator.residuals import lognormal_residuals, read_residuals
from loadtest.workloads.spec import TraceOptions, parse_workload
from loadtest.workloads.trace import TraceRequest
from loadtest.workloads.trace_files import read_trace
from shared.errors import ConfigError
from shared.kv.pool import PoolEvents
from tests.unit.loadtest.simulator.setups import head


def test_named_workloads_have_their_lengths_in_the_mean():
    for name, prompt_len, output_len in (
        ("prefill-heavy", 4096, 64),
        ("balanced", 1024, 300),
        ("short", 200, 300),
        ("decode-heavy", 128, 1024),
    ):
        requests = WORKLOADS[name].requests(3000, seed=1)
        assert fmean(one.num_prompt_tokens for one in requests) == pytest.approx(prompt_len, rel=0.05)
        assert fmean(one.num_output_tokens for one in requests) == pytest.approx(output_len, rel=0.05)


def test_poisson_arrivals_keep_order_lengths_and_mean_rate():
    trace = head()
    changed = poisson(trace, seed=1)
    assert [one.num_prompt_tokens for one in changed] == [one.num_prompt_tokens for one in trace]
    assert mean_rate(changed) == pytest.approx(mean_rate(trace), rel=0.15)
    gaps = [after.at_s - before.at_s for before, after in pairwise(changed)]
    assert stdev(gaps) == pytest.approx(fmean(gaps), rel=0.2)


def test_a_trace_that_begins_again_shares_nothing_with_its_first_turn():
    trace = [TraceRequest(0.0, 600, 5, (3, 4)), TraceRequest(1.0, 600, 5, (3, 9))]
    longer = at_rate(trace, rate=2.0, for_s=3.0)
    assert [one.at_s for one in longer] == pytest.approx([0.0, 0.5, 1.0, 1.5, 2.0, 2.5])
    assert longer[1].hash_ids[0] == longer[0].hash_ids[0]
    assert not set(longer[2].hash_ids) & {3, 4, 9}


def test_the_index_counts_a_run_while_its_last_block_is_held():
    index = PrefixIndex(64, 16)
    first, other = index.hashes((7, 8), 100), index.hashes((7, 9), 128)
    assert len(first) == 6
    assert len(other) == 8
    assert first[:4] == other[:4]
    assert not set(first[4:]) & set(other)
    index.update("a", PoolEvents(first, []))
    index.update("b", PoolEvents(first[:4], []))
    assert dict(index.match((7, 8), 100).local) == {"a": 96, "b": 64}
    assert dict(index.match((7, 9), 128).local) == {"a": 64, "b": 64}
    index.update("a", PoolEvents([], [first[3]]))
    assert index.match((7, 8), 100).local.get("a", 0) == 0
    assert not set(index.own_hashes(1, 64)) & set(index.own_hashes(2, 64))
    assert index.match((), 10).local == {}


def test_noise_has_the_spread_that_is_asked_for_and_repeats():
    residuals = lognormal_residuals(0.1)
    assert fmean(residuals) == pytest.approx(1.0, rel=0.01)
    assert stdev(residuals) == pytest.approx(0.1, rel=0.1)
    assert lognormal_residuals(0.0) == ()
    noise = Noise(residuals, "seed", count=8)
    assert noise.of_many(3, 8).tolist() == [noise.of(3 + number) for number in range(8)]
    assert Noise(residuals, "seed", 8).of(2) == noise.of(2)
    assert Noise((), "seed").of(5) == 1.0


def test_residuals_of_a_file_are_positive_numbers(tmp_path):
    path = tmp_path / "residuals.json"
    path.write_text("[1.0, 1.2]")
    assert read_residuals(path) == (1.0, 1.2)
    for text in ("[]", "[0.0]", "{", '["x"]'):
        path.write_text(text)
        with pytest.raises(ConfigError):
            read_residuals(path)


LINE = '{"timestamp": 0, "input_length": 5, "output_length": 2, "hash_ids": [1]}\n'
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST_GPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


@pytest.mark.parametrize(
    ("name", "text", "line", "words"),
    [
        ("a.jsonl", LINE + LINE.replace("0", "1" + "0" * 400, 1), 2, "timestamp must be a number from 0"),
        ("a.jsonl", LINE + "[" * 100_000, 2, "not JSON"),
        ("a.jsonl", LINE + LINE.replace("5", "1" * 5000, 1), 2, "not JSON"),
        ("a.jsonl", LINE + LINE[:-20], 2, "not JSON"),
        (
            "a.jsonl",
            LINE.replace("[1]", f"[{10**40}]"),
            1,
            "hash_ids must be a list of whole numbers of at most 64 bits",
        ),
        ("a.jsonl", LINE + LINE.replace(', "hash_ids": [1]', ""), 2, "hash_ids must be in all lines or in none"),
        ("a.jsonl", LINE.replace("{", '{"chat_id": 1, ') + LINE, 2, "a block has 512 tokens, in the lines before 16"),
        (
            "a.jsonl",
            LINE.replace("{", '{"chat_id": 1, ').replace("0", "2e12", 1),
            1,
            "timestamp must be a number from 0",
        ),
        ("a.csv", BURST_GPT + "5,GPT-4,1,2,3,API log\n4,GPT-4,1,2,3,API log\n", 3, "Timestamp 4 goes back in time"),
        ("a.csv", BURST_GPT + "nan,GPT-4,1,2,3,API log\n", 2, "Timestamp must be seconds from 0 to 1e.12, got 'nan'"),
        ("a.csv", BURST_GPT + "5,GPT-4,0,2,2,API log\n", 2, "Request tokens must be a whole number of at least 1"),
        ("a.csv", "ContextTokens,TIMESTAMP\n", 1, "expected a header with .*; got 'ContextTokens,TIMESTAMP'"),
        ("a.csv", HEADER.strip() + ",ContextTokens\n", 1, "the header has the column ContextTokens twice"),
        ("a.jsonl", '{"prompt": "Why?", "output_tokens": 3}\n', 1, "no timestamp, .*, found 'prompt', 'output_tokens'"),
        ("a.jsonl", LINE + LINE.replace("timestamp", "delay"), 2, "no timestamp: .*, found 'delay'"),
        ("a.json", "[" + LINE + "]", 1, "not JSON: .*; a trace that is not .csv has a JSON object on each line"),
        ("a.csv", HEADER + "2024-05-10 18:17:01Z,4,1\n2024-05-10 18:17:02,4,1\n", 3, "TIMESTAMP .* time zone"),
        ("a.csv", HEADER + f"2023-11-16 18:17:01,{'1' * 5000},20\n", 2, "ContextTokens must be a whole number"),
        ("a.csv", HEADER + "2023-11-16 18:17:01,4,-1\n", 2, "GeneratedTokens must be a whole number"),
    ],
)
def test_a_broken_line_is_named_by_its_number(tmp_path, name, text, line, words):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"line {line}: {words}"):
        list(read_trace(path))


def test_a_trace_is_told_by_its_content(tmp_path):
    """Qwen-Bailian's times are seconds and its blocks have 16 tokens; BurstGPT's failed requests have no answer;
    columns are found by their names."""
    of_bailian = {"chat_id": 7, "parent_chat_id": -1, "type": "text", "turn": 1, "input_length": 17, "output_length": 2}
    lines = [of_bailian | {"timestamp": at, "hash_ids": [3, last]} for last, at in ((4, 1.5), (9, 4))]
    cases = {
        "bailian.jsonl": "".join(json.dumps(line) + "\n" for line in lines),
        "plain.jsonl": '{"timestamp": 1500, "input_length": 17, "output_length": 2}\n'
        '{"timestamp": 4000.0, "input_length": 17, "output_length": 2}\n',
        "burst.csv": BURST_GPT + "1.5,ChatGPT,17,2,19,API log\n2,GPT-4,300,0,300,API log\n4,ChatGPT,17,2,19,API log\n",
        "azure.csv": HEADER + "2024-05-10 18:17:01.5,17,2\n2024-05-10 18:17:04,17,2\n",
        "azure otherwise ordered.CSV": "ContextTokens,Model,TIMESTAMP,GeneratedTokens\n"
        "17,m,2024-05-10 18:17:01.5,2\n17,m,2024-05-10 18:17:04,2\n",
        "splitwise.csv": "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size\n"
        "0,2,0,1.5,1,17,2\n1,2,0,4.0,1,17,2\n",
    }
    for name, text in cases.items():
        (tmp_path / name).write_text(text)
        found = list(read_trace(tmp_path / name))
        assert [(one.at_s, one.num_prompt_tokens, one.num_output_tokens) for one in found] == [(0, 17, 2), (2.5, 17, 2)]
        ids = [(3, 4), (3, 9)] if name == "bailian.jsonl" else [(), ()]
        assert [one.hash_ids for one in found] == ids
        for kind in ("trace", "mooncake", "azure"):
            replay = parse_workload(f"{kind}:{tmp_path / name}", TraceOptions(scale=4))
            assert [
                turn.num_new_tokens for each in replay.conversations(np.random.default_rng(0)) for turn in each.turns
            ] == [5, 5]


def test_times_of_several_zones_are_compared_as_the_moments_that_they_are(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(HEADER + "2024-10-27 02:59:59+02:00,4,1\n2024-10-27 02:00:01+01:00,4,1\n2024-10-27 01:00:03Z,4,1\n")
    assert [one.at_s for one in read_trace(path)] == [0.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.jsonl", LINE * 2), ("a.csv", HEADER + "2024-05-10 18:17:01.5,4,1\n\n2024-05-10 18:17:02,4,1\n")],
)
def test_a_trace_may_be_packed_and_begin_with_a_mark_of_its_encoding(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    plain = list(read_trace(tmp_path / name))
    assert len(plain) == 2
    marked = text.encode("utf-8-sig")
    (tmp_path / name).write_bytes(marked)
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(marked))
    assert list(read_trace(tmp_path / name)) == list(read_trace(tmp_path / f"{name}.gz")) == plain
    for broken in (marked, gzip.compress(marked)[:-9], gzip.compress(marked)[:12] + b"\xff" * 40):
        (tmp_path / f"{name}.gz").write_bytes(broken)
        with pytest.raises(ConfigError, match=r"the trace .*\.gz"):
            list(read_trace(tmp_path / f"{name}.gz"))


def test_requests_that_come_all_at_once_have_no_rate_to_be_played_at(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(LINE * 2)
    with pytest.raises(ConfigError, match="have the same time: it has no rate") as caught:
        main(["--trace", str(path), "--policy", "auto", "--model", "llama-3-8b", "--rate", "3"])
    assert caught.value.field == "slice"


def test_a_prompt_beyond_any_worker_is_refused_before_its_blocks_are_counted(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(HEADER + f"2024-05-10 18:17:01,4,1\n2024-05-10 18:17:02,{'9' * 15},1\n")
    with pytest.raises(ConfigError, match="the longest request takes 1000000000000000 tokens"):
        main(["--trace", str(path), "--policy", "auto", "--model", "llama-3-8b"])


@pytest.mark.parametrize(
    "flags",
    [
        ["--chunk", "-5"],
        ["--gpus", "0"],
        ["--tpot", "0"],
        ["--routers", "0"],
        ["--requests", "0"],
        ["--seed", "-1"],
        ["--slow-share", "nan"],
        ["--rate", "nan"],
        ["--speedup", "inf"],
    ],
)
def test_numbers_that_no_fleet_has_are_refused_by_their_option(flags):
    with pytest.raises(ConfigError, match=flags[0].removeprefix("--")):
        main(["--workload", "short", "--policy", "auto", "--model", "llama-3-8b", *flags])


def _trace_of(path: Path, times: Iterable[float]) -> Path:
    path.write_text("".join(LINE.replace("0", f"{time:g}", 1) for time in times))
    return path


def test_a_trace_in_seconds_is_read_as_such_where_that_is_said_and_never_taken_for_milliseconds(tmp_path):
    seconds = _trace_of(tmp_path / "seconds.jsonl", (0.25 * number for number in range(300)))
    with pytest.raises(ConfigError, match=r"seconds.jsonl.*256.*256 requests in 0.06375 s.*say the timestamps' unit"):
        list(read_trace(seconds))
    assert list(read_trace(seconds, "s"))[-1].at_s == 0.25 * 299
    assert list(read_trace(seconds, "ms"))[-1].at_s == pytest.approx(0.25e-3 * 299)
    assert parse_workload(f"mooncake:path={seconds},unit=s").requests[-1].at_s == 0.25 * 299
    with pytest.raises(ConfigError, match="unit=min: expected one of ms, s") as refused:
        list(read_trace(seconds, "min"))
    assert refused.value.field == "unit"
    with pytest.raises(ConfigError, match="a trace in CSV have no unit"):
        read_trace(tmp_path / "a.csv", "s")


@pytest.mark.parametrize("times", [range(0, 300 * 250, 250), [0] * 300, range(200)])
def test_a_trace_in_milliseconds_needs_no_unit_however_few_its_requests_or_all_at_once(times, tmp_path):
    assert list(read_trace(_trace_of(tmp_path / "a.jsonl", times)))[-1].at_s == times[-1] / 1000
