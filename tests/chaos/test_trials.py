"""A few trials of `make chaos`: faults that cost a client no more than a pause."""

from __future__ import annotations

import pytest

from loadtest.chaos.run import Chaos
from loadtest.chaos.trial import Outcome, Trial
from tests.e2e.running import DEMO

pytestmark = pytest.mark.slow

TRIALS = [
    Trial("decode", "SIGKILL", "decoding"),
    Trial("prefill", "SIGKILL", "prefilling"),
    Trial("prefill", "drain", "shipping"),  # a decode worker that died twice within a minute would be waited for
    Trial("decode-pool", "SIGKILL", "decoding"),
]
STORE_TRIALS = [
    Trial("kvstore", "SIGKILL", "queued"),
    Trial("redis", "SIGKILL", "shipping"),
    Trial("store", "SIGKILL", "decoding"),
]
"""Deaths of what no stream needs; test_parts.py and test_store_faults.py have one of each."""


@pytest.mark.parametrize(
    ("todo", "resuming"),
    [
        pytest.param(TRIALS, False, id="workers"),
        pytest.param(STORE_TRIALS, False, id="store", marks=pytest.mark.slow),
        pytest.param([Trial("router", "SIGKILL", "decoding")], True, id="router"),
    ],
)
async def test_faults_that_cost_a_pause(tmp_path, todo, resuming):
    outcomes: list[Outcome] = []
    await Chaos(DEMO, tmp_path, resuming=resuming, num_streams=20).run(
        todo, lambda outcome, _: outcomes.append(outcome)
    )
    assert [outcome.trial for outcome in outcomes] == todo
    assert [f"{outcome} {outcome.note}" for outcome in outcomes if not outcome.good] == []
