"""A request that was at two deaths meets no third worker; one that went on in between may outlive any number."""

from __future__ import annotations

import pytest

from services.router.dispatch.quarantine import SAME_PLACE_TOKENS, Deaths, Quarantine
from shared.errors import Quarantined


def test_the_second_death_at_one_place_quarantines_and_names_all():
    deaths = Deaths()
    deaths.note("r1", "prefill-0", 0)
    deaths.all_known()
    with pytest.raises(Quarantined) as caught:
        deaths.note("r1", "decode-1", 0)
    assert caught.value.details == {"request_id": "r1", "workers": "prefill-0,decode-1"}
    assert "prefill-0 and then worker decode-1" in str(caught.value)
    assert not caught.value.retryable


def test_a_few_new_tokens_do_not_clear_a_request():
    deaths = Deaths()
    deaths.note("r1", "decode-0", 100)
    deaths.all_known()
    with pytest.raises(Quarantined):
        deaths.note("r1", "decode-1", 100 + SAME_PLACE_TOKENS - 1)


def test_a_long_answer_outlives_any_number_of_workers():
    deaths = Deaths()
    for turn in range(10):
        deaths.note("r1", f"decode-{turn % 2}", turn * SAME_PLACE_TOKENS)
        deaths.all_known()


def test_workers_that_die_together_are_one_death():
    """The request held something on both: it did not go on from one to the other."""
    deaths = Deaths()
    deaths.note("r1", "prefill-1", 3)
    deaths.note("r1", "decode-1", 3)
    deaths.all_known()
    with pytest.raises(Quarantined, match=r"prefill-1 and then worker decode-0 died"):
        deaths.note("r1", "decode-0", 3)


def test_an_id_stays_refused_until_newer_ones_push_it_out():
    quarantine = Quarantine(limit=2)
    for name in ("a", "b", "c"):
        quarantine.add("t", name, Quarantined(name, request_id=name))
    quarantine.check("t", "a")
    quarantine.check("t", "unknown")
    for name in ("b", "c"):
        with pytest.raises(Quarantined, match=name) as caught:
            quarantine.check("t", name)
        assert caught.value.details == {"request_id": name}
