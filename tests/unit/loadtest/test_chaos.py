"""What a trial's verdict is made of."""

from __future__ import annotations

from itertools import pairwise

import pytest

from loadtest.chaos.report import Row, RowFile, summary
from loadtest.chaos.soak import Growth, at_equal_age, growth, second_half
from loadtest.chaos.streams import Stream, prompts
from loadtest.chaos.trial import CONTROL, GROUPS, LASTING_CUT, LINKS, PHASES, VICTIMS, Outcome, Trial, judge, trials
from loadtest.chaos.victims import PARTS, cut_pairs, may_be, merged, parts_of
from shared.errors import ConfigError
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


def test_a_line_has_the_form_that_scripts_read() -> None:
    assert str(Outcome(TRIAL, 1, 2, 3, 0.456)) == "decode SIGKILL decoding: 1|2|3|0.46 s"
    assert str(Outcome(TRIAL, 0, 0, 0, 1.0, "late")) == "decode SIGKILL decoding: 0|0|0|1.00 s"
    assert not Outcome(TRIAL, 0, 0, 0, 1.0, "late").good


def test_deadly_trials_of_one_part_are_far_apart() -> None:
    """The supervisor gives a part up at its third death within a minute; a trial takes 7 s or more."""
    deadly = [may_be(trial.victim) if trial.fault in ("SIGKILL", "drain") else set() for trial in trials()]
    windows = [deadly[place : place + 6] for place in range(len(deadly))]
    crowded = sum(any(sum(part in each for each in window) > 3 for part in PARTS) for window in windows)
    assert crowded < 0.1 * len(windows)


def test_engines_hang_in_workers_alone_and_no_victim_comes_twice_in_a_row() -> None:
    every = trials()
    assert every[0] == CONTROL
    assert len(every) == len(set(every)) == 1 + (6 * len(VICTIMS) + 3 + len(GROUPS) + 2 * len(LINKS) + 1) * len(PHASES)
    assert {trial.victim for trial in every if trial.fault == "hung-engine"} == {"prefill", "decode", "peer"}
    assert all(a.victim != b.victim for a, b in pairwise(every) if b.fault != LASTING_CUT)
    networked = [trial.needs_network for trial in every]
    assert networked == sorted(networked)  # two clusters, not one after the other in turn


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


def test_the_table_marks_rows_of_other_commits_than_most() -> None:
    faults = ("SIGKILL", "drain", "SIGSTOP-3s", "SIGSTOP-20s")
    outcomes = [Outcome(Trial("decode", fault, "decoding"), 0, 0, 0, 1.0) for fault in faults]
    rows = [Row(*each) for each in zip(outcomes, ("aaa", "bbb", "aaa", ""), (7.0, 30.0, 9.0, 0.0), strict=True)]
    text = summary(rows)
    cells = [line.split("|")[6].strip() for line in text.splitlines() if line.startswith("| decode")]
    assert [cell.removeprefix("0 / 0 / 0 / 1.0 s").strip() for cell in cells] == ["", "(a)", "", "(b)"]
    assert "- aaa: 2 trials\n- (a) bbb: 1 trials\n- (b) commit not recorded: 1 trials" in text
    assert "SIGKILL 7, drain 30, SIGSTOP-3s 9." in text


def test_rows_are_read_back_with_note_and_commit_as_they_were_written(tmp_path) -> None:
    file = RowFile(tmp_path / "new" / "lines.txt")
    file.clear()
    rows = [Row(Outcome(TRIAL, 1, 0, 0, 2.5, "late"), "abc", 7.1), Row(Outcome(CONTROL, 0, 0, 0, 0.25), "abd+", 6.0)]
    for row in rows:
        file.add(row)
    assert RowFile(tmp_path / "new" / "lines.txt").rows() == rows
    assert (tmp_path / "new" / "lines.txt").read_text().splitlines() == [str(row.outcome) for row in rows]


def test_a_line_without_a_record_is_kept_and_the_last_one_of_a_trial_counts(tmp_path) -> None:
    lines = tmp_path / "lines.txt"
    lines.write_text("decode SIGKILL decoding: 0|0|8|9.63 s\n")
    file = RowFile(lines)
    assert file.rows() == [Row(Outcome(TRIAL, 0, 0, 8, 9.63))]
    again = Row(Outcome(TRIAL, 0, 0, 0, 1.5), "abc", 7.0)
    file.add(again)
    assert file.rows() == [again]
    lines.write_text("decode SIGKILL decoding: 0|0|1|1.50 s\n")  # edited: the record is not of this line
    assert file.rows() == [Row(Outcome(TRIAL, 0, 0, 1, 1.5))]


def test_a_line_that_is_none_is_refused_by_name(tmp_path) -> None:
    (tmp_path / "lines.txt").write_text("| a | table |\n")
    with pytest.raises(ConfigError, match="is no trial's line") as refused:
        RowFile(tmp_path / "lines.txt").rows()
    assert refused.value.field == "out"


def test_prompts_share_no_block() -> None:
    first_blocks = {tuple(prompt[:16]) for prompt in prompts(24)}
    assert len(first_blocks) == 24


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


def test_what_is_touched_in_the_first_half_is_no_growth() -> None:
    samples = [(float(second), min(100.0, float(second))) for second in range(240)]
    assert growth(second_half(samples)) == Growth(0.0, 0.0)


def test_lives_are_compared_at_the_oldest_age_that_all_but_the_last_reached() -> None:
    def life(base: float, end: int) -> list[tuple[float, float]]:
        return [(float(age), base + age) for age in range(1, end)]

    assert at_equal_age([life(100.0, 34), life(200.0, 40), life(300.0, 5)]) == (30.0, [130.0, 230.0])
    assert at_equal_age([life(100.0, 24)]) == (20.0, [120.0])
    assert at_equal_age([life(100.0, 3), life(100.0, 30)]) == (0.0, [101.0, 101.0])


def status(queue_len: int = 0, *, ready: bool = True, degraded: tuple[str, ...] = (), **requests: int):
    """Of one router; the workers' names with _ for -, each with as many requests and half as many free blocks."""
    told = inference_pb2.ClusterStatus(queue_len=queue_len, ready=ready, degraded=degraded)
    for name, count in requests.items():
        worker = told.workers.add(worker=types_pb2.WorkerId(name=name.replace("_", "-")), num_requests=count)
        worker.connected = count < 100
        worker.load.num_free_blocks = 50 - count // 2
    return told


BUSY = status(prefill_0=1, prefill_1=5, decode_0=8, decode_1=2)


def test_routers_are_added_up_and_all_must_answer() -> None:
    told = merged([status(2, decode_0=4), status(3, ready=False, degraded=("gone",), decode_0=100)])
    assert told is not None
    assert (told.queue_len, told.ready, list(told.degraded)) == (5, False, ["gone"])
    (worker,) = told.workers
    assert (worker.num_requests, worker.connected, worker.load.num_free_blocks) == (104, False, 0)
    assert merged([status(), None]) is None


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
