"""What a trial's verdict is made of."""

from __future__ import annotations

from itertools import pairwise

import pytest

from loadtest.chaos.report import Row, RowFile, summary
from loadtest.chaos.soak import growth
from loadtest.chaos.streams import Stream
from loadtest.chaos.trial import CONTROL, GROUPS, LASTING_CUT, LINKS, PHASES, VICTIMS, Outcome, Trial, judge, trials
from loadtest.chaos.victims import PARTS, cut_pairs, may_be, parts_of
from shared.rpc.pb.tandem.v1 import inference_pb2, types_pb2

TRIAL = Trial("decode", "SIGKILL", "decoding")
TOKENS = [7, 8, 9, 10]


def stream(tokens: list[int], times: list[float], error: str = "") -> Stream:
    return Stream([1], tokens, started_at=100.0, times=times, error=error)


CALM = stream(TOKENS, [101.0, 101.1, 101.2, 101.3])


def verdict(*streams: Stream, leaked: int = 0) -> tuple[int, int, int, float]:
    outcome = judge(TRIAL, streams, [CALM] * len(streams), leaked, "")
    return outcome.lost, outcome.wrong, outcome.leaked, pytest.approx(outcome.longest_pause_s)


def test_a_pause_is_no_loss() -> None:
    assert verdict(CALM, stream(TOKENS, [101.0, 101.1, 103.1, 103.2])) == (0, 0, 0, 2.0)


def test_a_first_token_counts_by_what_it_came_later() -> None:
    assert verdict(stream(TOKENS, [104.5, 104.6, 104.7, 104.8])) == (0, 0, 0, 3.5)


def test_an_error_an_answer_cut_short_and_an_endless_one_are_lost() -> None:
    cut = stream(TOKENS[:2], [101.0, 101.1])
    failed = stream(TOKENS[:3], [101.0, 101.1, 101.2], error="UNAVAILABLE: gone")
    longer = stream([*TOKENS, 11], CALM.times)
    assert verdict(cut, failed, CALM)[:2] == (2, 0)
    assert verdict(longer)[:2] == (1, 1)


def test_one_other_token_is_wrong_also_in_an_answer_that_was_lost() -> None:
    assert verdict(stream([7, 8, 9, 11], CALM.times), stream([6], [101.0], error="cut"))[:2] == (1, 2)


def test_engines_hang_in_workers_alone_and_no_victim_comes_twice_in_a_row() -> None:
    every = trials()
    assert every[0] == CONTROL
    num_plain = 1 + (6 * len(VICTIMS) + 3 + len(GROUPS) + 2 * len(LINKS) + 1) * len(PHASES)
    assert len(every) == len(set(every)) == num_plain + 2 * 3 * 3  # workers, faults and phases of adapters
    assert {trial.victim for trial in every if trial.fault == "hung-engine"} == {"prefill", "decode", "peer"}
    assert all(a.victim != b.victim for a, b in pairwise(every) if b.fault != LASTING_CUT)
    clusters = [(trial.needs_network, trial.has_adapters) for trial in every]
    assert clusters == sorted(clusters)  # three kinds of them, not one after the other in turn


def test_trials_are_chosen_by_words() -> None:
    assert trials("decode SIGKILL decoding") == [TRIAL]
    assert {(trial.victim, trial.fault) for trial in trials("redis drain, store SIGKILL")} == {
        ("redis", "drain"), ("store", "SIGKILL"),
    }  # fmt: skip
    assert trials("decoder") == []


def test_the_table_shows_what_was_more_than_a_pause() -> None:
    gone = Outcome(Trial("router", "SIGKILL", "queued"), 24, 0, 0, 2.0, "gone")
    text = summary([Row(Outcome(TRIAL, 0, 0, 0, 1.0)), Row(gone)])
    assert "0 / 0 / 0 / 1.0 s |" in text
    assert "**24 / 0 / 0 / 2.0 s**" in text
    assert "1 of 2 trials" in text
    assert "- router SIGKILL queued: gone" in text
    assert "commit" not in text  # none is known


def test_rows_are_read_back_with_note_and_commit_as_they_were_written(tmp_path) -> None:
    file = RowFile(tmp_path / "new" / "lines.txt")
    file.clear()
    rows = [Row(Outcome(TRIAL, 1, 0, 0, 2.5, "late"), "abc", 7.1), Row(Outcome(CONTROL, 0, 0, 0, 0.25), "abd+", 6.0)]
    for row in rows:
        file.add(row)
    assert RowFile(tmp_path / "new" / "lines.txt").rows() == rows
    assert (tmp_path / "new" / "lines.txt").read_text().splitlines() == [str(row.outcome) for row in rows]


def test_growth_has_a_bound_and_what_is_not_certain_is_flat() -> None:
    steady = growth([(float(second), 200.0 + 3.0 * second / 60) for second in range(100)])
    assert steady is not None
    assert (steady.slope, steady.error) == (pytest.approx(3.0), pytest.approx(0.0, abs=1e-6))
    assert not steady.flat
    swinging = growth([(float(second), 200.0 + 20.0 * (second // 10 % 2)) for second in range(100)])
    assert swinging is not None
    assert swinging.flat
    assert abs(swinging.slope) < swinging.error
    assert growth([(0.0, 1.0)] * 19) is None


def status(queue_len: int = 0, *, ready: bool = True, degraded: tuple[str, ...] = (), **requests: int):
    """Of one router; the workers' names with _ for -, each with as many requests and half as many free blocks."""
    told = inference_pb2.ClusterStatus(queue_len=queue_len, ready=ready, degraded=degraded)
    for name, count in requests.items():
        worker = told.workers.add(worker=types_pb2.WorkerId(name=name.replace("_", "-")), num_requests=count)
        worker.connected = count < 100
        worker.load.num_free_blocks = 50 - count // 2
    return told


BUSY = status(prefill_0=1, prefill_1=5, decode_0=8, decode_1=2)


def test_the_busiest_worker_of_a_role_is_the_victim() -> None:
    assert parts_of("prefill", BUSY) == ["prefill-1"]
    assert parts_of("redis+decode", BUSY) == ["redis", "decode-0"]
    assert parts_of("decode-pool", BUSY) == ["decode-0", "decode-1"]
    assert parts_of("peer", BUSY) == ["prefill-0"]
    assert {part for victim in (*VICTIMS, *GROUPS) for part in parts_of(victim, BUSY)} <= set(PARTS)
    assert all(set(parts_of(victim, BUSY)) <= may_be(victim) <= set(PARTS) for victim in (*VICTIMS, *GROUPS))
    assert may_be("kvstore+prefill") == {"kvstore", "prefill-0", "prefill-1"}


def test_a_partition_cuts_a_link_or_a_part_from_all_others() -> None:
    assert cut_pairs("prefill~decode", BUSY) == [("prefill-1", "decode-0"), ("prefill-1", "decode-1")]
    assert cut_pairs("prefill~peer", BUSY) == [("prefill-1", "prefill-0"), ("prefill-1", "decode-0")]
    cut = cut_pairs("redis", BUSY)
    assert {sender for sender, _ in cut} == {"valkey"}
    assert len({receiver for _, receiver in cut} - {"valkey"}) == len(PARTS) - 1
    for victim in LINKS:
        assert all(a != b for a, b in cut_pairs(victim, BUSY))
