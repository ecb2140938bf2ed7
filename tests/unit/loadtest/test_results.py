"""A run's requests in its folder: what is written is read again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loadtest.metrics import is_good, request_metrics
from loadtest.records import Failure, FailureCause, Reply, RequestRecord, TtftSplit
from loadtest.run_folder import read_requests, write_requests
from loadtest.slo import Slo
from tests.examples import examples

SECONDS = st.integers(0, 10**9).map(lambda micros: micros / 1e6)
"""Files have microseconds."""
MILLIS = st.integers(0, 10**6).map(lambda micros: micros / 1e3)
COUNTS = st.none() | st.integers(0, 10_000)
TEXTS = st.text(max_size=20)
SPLITS = st.builds(TtftSplit, *[MILLIS] * len(TtftSplit.__slots__))
FAILURES = st.builds(Failure, st.sampled_from(FailureCause), TEXTS, TEXTS)
MESSAGES = st.lists(st.tuples(SECONDS, st.integers(1, 9)), max_size=6)
REPLIES = st.builds(
    lambda messages, **fields: Reply(
        token_times_s=[at_s for at_s, _ in messages], token_counts=[count for _, count in messages], **fields
    ),
    MESSAGES,
    sent_s=st.none() | SECONDS, closed_s=st.none() | SECONDS, num_prompt_tokens=COUNTS, num_output_tokens=COUNTS,
    num_cached_tokens=COUNTS, counts_exact=st.booleans(), split=st.none() | SPLITS, finish_reason=TEXTS,
    prefill_worker=TEXTS, decode_worker=TEXTS,
)  # fmt: skip
RECORDS = st.builds(
    RequestRecord,
    index=st.integers(0, 99), request_id=TEXTS, num_prompt_tokens=st.integers(1, 9999), max_tokens=st.integers(1, 999),
    due_s=st.none() | SECONDS, conversation=st.integers(0, 9), turn=st.integers(0, 9), model=TEXTS, reply=REPLIES,
    failure=st.none() | FAILURES,
)  # fmt: skip


@given(st.lists(RECORDS, max_size=3))
@examples(30)
def test_requests_are_read_as_they_were_written(tmp_path_factory, records):
    path = tmp_path_factory.mktemp("run") / "requests.jsonl"
    write_requests(path, records)
    found = read_requests(path)
    assert found == records
    slo = Slo(1.0, 0.1)
    assert [request_metrics(one) for one in found] == [request_metrics(one) for one in records]
    assert [is_good(one, slo) for one in found] == [is_good(one, slo) for one in records]
