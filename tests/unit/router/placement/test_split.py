"""The split follows the demand and the hardware, and does not move for little."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.placement import headroom
from services.router.placement.demand import Mix
from services.router.placement.headroom import Headroom
from services.router.placement.pairs import MOST_DISPLACED
from services.router.placement.split import GAIN, INTERVAL_S, SETTLED_S, WORTH, SplitController
from services.router.placement.views import Work
from shared.kv.groups import KVGroups
from shared.sizing.step_time import StepTimes
from tests.examples import examples
from tests.unit.router.placement.builders import view

FAST = StepTimes(0.5e-3, 6e-3, 27e-6, 0.0, 50e-9, 1e-9, overlap=0.0)
SLOW = StepTimes(0.5e-3, 7e-3, 200e-6, 0.0, 60e-9, 8e-9, overlap=0.0)
TPOT_S = 0.0125
GROUPS = KVGroups(16)


def fleet(size: int, times: StepTimes = FAST, name: str = "w", **changes):
    return [
        view(
            f"{name}{n:02}",
            **{"times": times, "num_free_blocks": 27_000, "num_total_blocks": 27_000, "max_num_seqs": 256, **changes},
        )
        for n in range(size)
    ]


def told(controller: SplitController, prompt: int, output: int, rate: float, begin_s: float, seconds: float = 30.0):
    """Requests of one kind for a while; returns when they end."""
    count = round(seconds * rate)
    for n in range(count):
        controller.demand.arrived(Work.of(prompt, 0), prompt, begin_s + n / rate)
        controller.demand.begin().ended(output)
    return begin_s + seconds


def decoders(prompt: int, output: int, rate: float = 20.0, views=None, **targets) -> int:
    controller = SplitController(TPOT_S, **targets)
    now_s = told(controller, prompt, output, rate, 0.0)
    return len(controller.decodes(views or fleet(16), GROUPS, now_s))


def test_everyone_does_both_before_anything_is_known():
    controller = SplitController(TPOT_S)
    assert len(controller.decodes(fleet(4), GROUPS, 0.0)) == 4
    assert len(SplitController(math.inf).decodes(fleet(4), GROUPS, 0.0)) == 4


def test_long_answers_take_more_workers_than_long_prompts():
    assert decoders(4000, 64) < decoders(1000, 300) < decoders(128, 1000)


def test_where_reading_hides_behind_products_all_do_both():
    hidden = StepTimes(0.5e-3, 6e-3, 27e-6, 0.0, 50e-9, 1e-9, overlap=1.0)
    assert decoders(1000, 300, views=fleet(16, hidden)) > decoders(1000, 300)


def test_a_tight_target_for_the_first_token_leaves_prompts_to_those_that_only_prefill():
    hidden = StepTimes(0.5e-3, 6e-3, 27e-6, 0.0, 50e-9, 1e-9, overlap=1.0)
    # Alone 4,000 tokens take 0.117 s, beside answers 0.13 s.
    assert decoders(4000, 300, 60.0, fleet(16, hidden), ttft_target_s=0.125) < 16
    assert decoders(4000, 300, 60.0, fleet(16, hidden), ttft_target_s=0.2) == 16


def test_all_do_both_where_a_hand_off_takes_most_of_an_answers_time():
    controller = SplitController(TPOT_S)
    now_s = told(controller, 4000, 64, 20.0, 0.0)
    assert len(controller.decodes(fleet(16), GROUPS, now_s)) < 16
    controller.headroom.gap_s = 0.8 * 64 * TPOT_S
    assert len(controller.decodes(fleet(16), GROUPS, now_s + INTERVAL_S)) == 16


def test_all_do_both_where_a_hand_offs_messages_take_most_of_the_time_to_the_first_token():
    controller = SplitController(TPOT_S, 1.0)
    now_s = told(controller, 4000, 64, 20.0, 0.0)
    assert len(controller.decodes(fleet(16), GROUPS, now_s)) < 16
    controller.headroom.hand_off_s = 0.8
    assert len(controller.decodes(fleet(16), GROUPS, now_s + INTERVAL_S)) == 16


def test_slow_arithmetic_decodes():
    controller = SplitController(TPOT_S)
    now_s = told(controller, 2000, 200, 10.0, 0.0)
    chosen = controller.decodes([*fleet(4, FAST, "fast"), *fleet(4, SLOW, "slow")], GROUPS, now_s)
    assert sum(name.startswith("slow") for name in chosen) >= min(4, len(chosen))


def test_answers_that_blocks_bound_take_no_longer_than_their_own_steps():
    # 90 % of these blocks hold 20 answers of 1,000 + 100 tokens: steps of 7 ms where the target allows 45.
    few = {"num_free_blocks": 1458, "num_total_blocks": 1458}
    controller = SplitController(0.05)
    now_s = told(controller, 1000, 100, 20.0, 0.0)
    [only] = controller.headroom.kinds(fleet(1, **few), controller.demand.mix(now_s), GROUPS, ())
    steps_s = 0.5e-3 + 6e-3 + only.most_answers * (27e-6 + 1050 * 50e-9)
    assert only.most_answers == pytest.approx(20, rel=0.05)
    headroom = controller.headrooms(fleet(4, **few), GROUPS, now_s)
    assert headroom[1] == pytest.approx(only.most_answers / steps_s / (20.0 * 100), rel=0.1)


def test_so_do_those_that_the_number_of_sequences_bounds_with_their_prompts_beside():
    views = fleet(4, max_num_seqs=20)
    controller = SplitController(0.05)
    now_s = told(controller, 200, 300, 20.0, 0.0)
    chunk = 20 * 200 / 300  # of prompts, a step of 20 tokens of answers
    steps_s = 0.5e-3 + 6e-3 + (20 + chunk) * 27e-6 + 20 * 350 * 50e-9 + chunk * 100 * 1e-9
    headroom = controller.headrooms(views, GROUPS, now_s)
    assert headroom[4] == pytest.approx(4 * 20 / steps_s / (20.0 * 300), rel=0.1)


def test_workers_full_of_answers_serve_nothing_where_prompts_beside_them_are_late_for_their_target():
    # 4,000 tokens take 0.136 to 0.138 s beside answers, and 0.129 s without.
    views, headrooms = fleet(4, max_num_seqs=20), {}
    for ttft_s in (0.133, 1.0):
        controller = SplitController(0.05, ttft_s)
        now_s = told(controller, 4000, 64, 20.0, 0.0)
        headrooms[ttft_s] = controller.headrooms(views, GROUPS, now_s)
    assert headrooms[0.133][4] == 0.0 < headrooms[1.0][4]
    assert headrooms[0.133][2] > headrooms[0.133][3] > 0.0, "others compute prompts"


def test_long_prompts_that_are_late_beside_answers_ask_for_workers_that_compute_them_alone_as_many_as_there_are():
    # A prompt of 6,000 tokens takes 0.19 s alone, and beside the answers of this mix 0.21.
    def in_time(share: float, ttft_s: float) -> dict[int, float]:
        controller = SplitController(TPOT_S, ttft_s)
        for number in range(200):
            num_tokens = 6000 if number % 100 < 100 * share else 1000
            controller.demand.arrived(Work.of(num_tokens, 0), num_tokens, number / 40)
            controller.demand.begin().ended(100)
        views, mix = fleet(8), controller.demand.mix(5.0)
        kinds = controller.headroom.kinds(views, mix, GROUPS, ())
        answers = controller.headroom.answers(mix)
        rooms = {count: controller.headroom.room(kinds, count, answers, mix) for count in (8, 4)}
        return {
            count: controller.headroom.in_time(kinds, count, room, 0.2, answers, mix) for count, room in rooms.items()
        }

    assert in_time(0.1, 0.2)[4] > 0.97 > in_time(0.1, 0.2)[8] == pytest.approx(0.9, abs=0.03)
    assert in_time(0.2, 0.2)[4] > 0.97 > in_time(0.2, 0.2)[8] == pytest.approx(0.8, abs=0.03)
    assert in_time(0.1, 0.1)[8] == pytest.approx(1.0, abs=0.03), "late anywhere: these speak for no split"
    assert in_time(0.1, 1.0)[8] == pytest.approx(1.0, abs=0.01)


@given(
    lens=st.lists(st.integers(1, 30_000), min_size=1, max_size=8).map(sorted),
    workers=st.lists(st.tuples(st.floats(100, 50_000), st.integers(1, 8)), min_size=1, max_size=3),
    used=st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)).map(sorted),
    ttft_s=st.tuples(st.floats(0.01, 10), st.floats(0.01, 10)).map(sorted),
)
def test_more_prompts_are_late_where_workers_are_busier_or_the_target_is_tighter(lens, workers, used, ttft_s):
    late = headroom.num_late(lens, workers, used[1], ttft_s[0])
    assert 0 <= headroom.num_late(lens, workers, used[0], ttft_s[0]) <= late + 1e-9 <= len(lens) + 2e-9
    assert headroom.num_late(lens, workers, used[1], ttft_s[1]) <= late + 1e-9
    assert headroom.num_late(lens, workers, 1.0, ttft_s[1]) == len(lens)


def test_a_new_mix_is_followed_within_thirty_seconds():
    controller, views = SplitController(TPOT_S), fleet(16)
    now_s = told(controller, 4000, 64, 20.0, 0.0, 120.0)
    before = controller.decodes(views, GROUPS, now_s)
    now_s = told(controller, 128, 1000, 20.0, now_s, 30.0)
    assert len(controller.decodes(views, GROUPS, now_s)) > 2 * len(before)


def test_those_that_decode_go_on_decoding():
    controller, views = SplitController(TPOT_S), fleet(16)
    now_s = told(controller, 1000, 300, 20.0, 0.0)
    first = controller.decodes(views, GROUPS, now_s)
    now_s = told(controller, 900, 330, 20.0, now_s)
    second = controller.decodes(views[::-1], GROUPS, now_s)
    assert first <= second or second <= first


def test_a_decision_holds_for_its_interval():
    controller, views = SplitController(TPOT_S), fleet(16)
    now_s = told(controller, 4000, 64, 20.0, 0.0)
    first = controller.decodes(views, GROUPS, now_s)
    told(controller, 128, 1000, 200.0, now_s, 0.5)
    assert controller.decodes(views, GROUPS, now_s + 0.9 * INTERVAL_S) == first


def test_flips_count_workers_whose_preference_changed_not_those_that_came_or_went():
    controller, views = SplitController(TPOT_S), fleet(16)
    controller.decodes(views[:8], GROUPS, -INTERVAL_S)
    controller.decodes(views, GROUPS, 0.0)
    assert controller.num_flips == 0  # all do both
    now_s = told(controller, 4000, 64, 20.0, 0.0)
    first = controller.decodes(views, GROUPS, now_s)
    assert controller.num_flips == 16 - len(first)
    now_s = told(controller, 128, 1000, 20.0, now_s, 60.0)
    second = controller.decodes(views, GROUPS, now_s)
    assert controller.num_flips == 16 - len(first) + len(first ^ second)


def test_a_worker_that_is_not_to_decode_any_more_loses_its_answers_once_that_has_lasted():
    controller, views = SplitController(TPOT_S), fleet(16)
    now_s = told(controller, 128, 1000, 20.0, 0.0)
    before = controller.decodes(views, GROUPS, now_s)
    now_s = told(controller, 4000, 64, 20.0, now_s, 60.0)
    after = controller.decodes(views, GROUPS, now_s)
    assert after < before
    assert controller.vacated(now_s) == frozenset()
    controller.displaced = {}
    assert controller.vacated(now_s + INTERVAL_S) == frozenset()
    assert controller.vacated(now_s + SETTLED_S) == before - after
    told(controller, 128, 1000, 20.0, now_s, 60.0)
    again = controller.decodes(views, GROUPS, now_s + 60.0)
    assert not controller.vacated(now_s + 120.0) & again


@given(
    st.lists(st.tuples(st.integers(50, 6000), st.integers(2, 1500), st.floats(1.0, 200.0)), min_size=1, max_size=4),
    st.integers(2, 12),
)
def test_answers_leave_once_two_decisions_say_so_where_each_displaces_more_prompts_than_it_brings(phases, size):
    controller, views, now_s = SplitController(TPOT_S), fleet(size), 0.0
    unwanted: list[frozenset[str]] = [frozenset()] * 100
    for prompt, output, rate in phases:
        for _ in range(5):
            for n in range(10):
                controller.demand.arrived(Work.of(prompt, 0), prompt, now_s + n / rate)
                controller.demand.begin().ended(output)
            now_s += max(INTERVAL_S, math.ceil(640 / rate) / 64)  # sums of 64ths are exact
            decoding = controller.decodes(views, GROUPS, now_s)
            others = frozenset(one.name for one in views) - decoding
            vacated = controller.vacated(now_s)
            assert vacated <= others & unwanted[-1], "one decision alone moves nothing"
            soon = {name for name, cost in controller.displaced.items() if cost > MOST_DISPLACED}
            assert soon & unwanted[-1] <= vacated
            unwanted.append(others)


@pytest.mark.parametrize("size", [3, 60, 1000])
def test_some_workers_always_decode_and_names_are_known(size):
    controller, views = SplitController(TPOT_S), fleet(size)
    now_s = told(controller, 1000, 100, 5.0 * size / 3, 0.0, 3.0)
    chosen = controller.decodes(views, GROUPS, now_s)
    assert 1 <= len(chosen) <= size
    assert chosen <= {one.name for one in views}


@given(
    st.integers(1, 8000), st.integers(1, 2000), st.floats(0.1, 500), st.integers(1, 12), st.floats(0, 1),
    st.floats(0.005, 0.2),
)  # fmt: skip
def test_no_other_split_has_much_more_headroom(prompt, output, rate, size, overlap, tpot_s):
    times = StepTimes(0.5e-3, 6e-3, 27e-6, 0.0, 50e-9, 1e-9, overlap=overlap)
    controller, views = SplitController(tpot_s), fleet(size, times)
    for n in range(20):
        controller.demand.arrived(Work.of(prompt, 0), prompt, n / rate)
        controller.demand.begin().ended(output)
    chosen = controller.decodes(views, GROUPS, 20 / rate)
    if math.isinf(controller.split.headroom):
        return
    mix = controller.demand.mix(20 / rate)
    kinds = controller.headroom.kinds(views, mix, GROUPS, ())
    answers = controller.headroom.answers(mix)
    headroom = [controller.headroom.room(kinds, count, answers, mix) for count in range(1, size + 1)]
    assert headroom[len(chosen) - 1] * max(GAIN, WORTH) * 1.001 >= max(headroom)


def decided(prompt: int, output: int, rate: float, views=None) -> SplitController:
    controller = SplitController(TPOT_S)
    now_s = told(controller, prompt, output, rate, 0.0)
    controller.decodes(views or fleet(16), GROUPS, now_s)
    return controller


def test_an_answer_displaces_prompts_where_it_is_not_to_run_and_more_the_more_the_fleet_is_used():
    little, much = decided(4000, 64, 20.0), decided(4000, 64, 200.0)
    for controller in (little, much):
        names = {view.name for view in fleet(16)}
        assert set(controller.displaced) == names - controller.split.decodes
        assert controller.displaced
    assert 0 < max(little.displaced.values()) < min(much.displaced.values())
    longer = decided(4000, 128, 200.0)
    assert min(longer.displaced.values()) > max(much.displaced.values())


def test_nothing_is_displaced_where_all_do_both():
    hidden = StepTimes(0.5e-3, 6e-3, 27e-6, 0.0, 50e-9, 1e-9, overlap=1.0)
    controller = decided(200, 300, 100.0, fleet(16, hidden))
    assert len(controller.split.decodes) == 16
    assert not controller.displaced
    assert not controller.is_pure


def test_a_prompt_takes_the_place_of_answers_where_sequences_bound_them_and_of_none_where_the_target_does():
    headroom, mix = Headroom(0.05, math.inf), mix_of(200, 300, 20.0)
    [few] = headroom.kinds(fleet(1, max_num_seqs=20), mix, GROUPS, ())
    decode_s = 0.5e-3 + 6e-3 + 20 * (27e-6 + 350 * 50e-9)
    prompt_s = 200 * 27e-6 + 200 * 201 / 2 * 1e-9
    assert headroom.delayed_by_one(few, mix) == pytest.approx(20 * prompt_s / (300 * decode_s), rel=0.02)
    [many] = headroom.kinds(fleet(1, max_num_seqs=4096, num_total_blocks=1_000_000), mix, GROUPS, ())
    assert headroom.delayed_by_one(many, mix) == 0.0


@examples(40)
@given(st.integers(50, 6000), st.integers(2, 1500), st.floats(1.0, 400.0), st.integers(1, 256))
def test_prompts_take_the_place_of_answers_on_workers_that_decode_in_a_split_alone(prompt, output, rate, max_num_seqs):
    views = fleet(4, max_num_seqs=max_num_seqs)
    controller = decided(prompt, output, rate, views)
    decodes = controller.split.decodes
    assert set(controller.delayed) == (set() if len(decodes) == 4 else decodes)
    assert all(number >= 0.0 for number in controller.delayed.values())


def test_workers_that_decode_compute_no_prompts_where_these_would_be_hardly_any():
    busy = [*fleet(4, num_decoding=25, num_context_tokens=25 * 4032), *fleet(12, name="x")]
    assert decided(4000, 64, 200.0, busy).is_pure
    assert not decided(4000, 64, 20.0, busy).is_pure, "few answers leave room"
    assert not decided(4000, 64, 200.0, fleet(16, num_decoding=1)).is_pure, "as long as few have come"


@given(st.integers(50, 6000), st.integers(2, 1500), st.floats(1.0, 400.0), st.lists(st.integers(0, 256), max_size=8))
def test_more_answers_never_let_decoding_workers_begin_to_compute_prompts(prompt, output, rate, counts):
    headroom, mix = Headroom(TPOT_S, math.inf), mix_of(prompt, output, rate)
    shares = [(kind, 4, 4) for kind in headroom.kinds(fleet(8), mix, GROUPS, ())]
    found = [headroom.is_pure(shares, rate, mix, count) for count in sorted(counts)]
    assert found == sorted(found)
    assert headroom.is_pure(shares, rate, mix) >= any(found)


def mix_of(prompt: int, output: int, rate: float) -> Mix:
    return Mix(rate, Work.of(prompt, 0), float(prompt), float(output))


def test_answers_are_judged_by_workers_that_decode_and_prompts_by_the_others():
    """What a worker has not done for long it has no good idea of."""
    views = fleet(16)
    controller = SplitController(TPOT_S)
    now_s = told(controller, 4000, 64, 100.0, 0.0)
    decoding = controller.decodes(views, GROUPS, now_s)
    assert 0 < len(decoding) < 16
    expected = controller.headrooms(views, GROUPS, now_s)
    for one in views:
        one.times = replace(FAST, attention_s=0.0) if one.name in decoding else replace(FAST, kv_s=0.0)
    found = controller.headrooms(views, GROUPS, now_s)
    count = len(decoding)
    assert found[count] == pytest.approx(expected[count], rel=0.05)


def told_mixed(controller: SplitController, requests, rate: float, seconds: float = 30.0) -> float:
    """Requests of several kinds in turn; returns when they end."""
    for n in range(round(seconds * rate)):
        prompt, output = requests[n % len(requests)]
        controller.demand.arrived(Work.of(prompt, 0), prompt, n / rate)
        controller.demand.begin().ended(output)
    return seconds


def test_a_few_prompts_that_nothing_can_serve_beside_the_others_do_not_choose_the_split_for_these():
    """One prompt in twenty has most of the work. Where not all fits, it is these that are refused; the others are as
    those of a demand without them."""
    views, usual = fleet(8), [(1000, 300)] * 19
    without, mixed = SplitController(TPOT_S, 10.0), SplitController(TPOT_S, 10.0)
    expected = without.decodes(views, GROUPS, told_mixed(without, usual, 114.0))
    now_s = told_mixed(mixed, [*usual, (100_000, 300)], 120.0)
    assert len(mixed.decodes(views, GROUPS, now_s)) == len(expected)
    headroom = mixed.headrooms(views, GROUPS, now_s)
    assert max(headroom, key=headroom.__getitem__) < len(expected) - 1, "by the mean the long ones chose it"


def test_a_slow_stream_of_unlike_prompts_keeps_the_workers_that_do_both():
    # 2.5 requests/s, one in eight of 40,000 tokens: by the newest ones alone the mean is 3,000 to 14,000.
    unlike = [2_000, 4_000, 3_000, 40_000, 1_000, 2_000, 5_000, 4_000]
    controllers = [SplitController(0.025, 3.0), SplitController(0.025, 3.0)]
    for number in range(400):
        for controller, prompt in zip(controllers, (unlike[number % 8 - number // 9 % 8], 7_625), strict=True):
            controller.demand.arrived(Work.of(prompt, 0), prompt, number / 2.5)
            controller.demand.begin().ended(300)
            controller.decodes(fleet(8), GROUPS, number / 2.5)
    assert controllers[0].num_flips == 0
    errors = [controller.demand.mix(160.0).prompt_error for controller in controllers]
    assert errors == [pytest.approx(1.6 / math.sqrt(25), rel=0.3), 0.0]


def test_all_do_both_where_many_answers_are_too_short_to_make_up_for_the_gap_of_a_hand_off():
    """In the mean they are long, so in the mean the gap is small."""
    views = fleet(16)
    for gap_s, all_do_both in ((0.0, False), (0.2, True)):
        controller = SplitController(TPOT_S)
        controller.headroom.gap_s = gap_s
        now_s = told_mixed(controller, [(4000, 10), (4000, 10), (4000, 300)], 20.0)
        assert (len(controller.decodes(views, GROUPS, now_s)) == 16) is all_do_both


@given(st.lists(st.floats(1.0, 1.5), min_size=2, max_size=12))
def test_fits_that_differ_by_less_than_hardware_does_are_of_one_kind(noise):
    views = fleet(len(noise))
    for one, factor in zip(views, noise, strict=True):
        one.times = replace(FAST, token_s=factor * FAST.token_s)
    controller = SplitController(TPOT_S)
    mix = Mix(1.0, Work.of(1000, 0), 1000.0, 100.0)
    (kind,) = controller.headroom.kinds(views, mix, GROUPS, ())
    assert sorted(kind.names) == [one.name for one in views]
    both = controller.headroom.kinds([*views, *fleet(3, SLOW, "slow")], mix, GROUPS, ())
    assert sorted(len(kind.names) for kind in both) == sorted([len(noise), 3])


def test_cards_that_seem_to_compute_prompts_as_quickly_are_of_two_kinds_where_they_read_weights_at_other_speeds():
    """What a slow card takes for prompts is badly known at first: its steps hide them behind the weights."""
    slow = replace(FAST, read_s=4 * FAST.read_s, overlap=1.0)
    mix = Mix(1.0, Work.of(1000, 0), 1000.0, 100.0)
    kinds = SplitController(2 * TPOT_S).headroom.kinds([*fleet(4), *fleet(3, slow, "slow")], mix, GROUPS, ())
    assert [len(kind.names) for kind in kinds] == [4, 3]
    assert all(name.startswith("slow") for name in kinds[1].names)
