"""Each way to choose a token, against small distributions that can be worked out by hand."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
import torch

from shared.engine.plan import NoToken, SampledToken, SampleSpec
from shared.engine.runner.device_link import DeviceLink
from shared.engine.runner.guessed_rows import NO_GUESS
from shared.engine.runner.logprobs import TopLogprobs, likeliest
from shared.engine.runner.sampler import PendingStep, Sampler
from shared.engine.sampling_params import LEAST_REPETITION, SamplingParams
from shared.kernels.backends.registry import AUTO, choose_kernels
from shared.kernels.torch_backend import TorchKernels


def sample(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> tuple[SampledToken | NoToken, ...]:
    """As a step of the runner does it, on the CPU."""
    link = DeviceLink(torch.device("cpu"))
    tokens = Sampler(TorchKernels(), link, len(specs)).sample(logits, [f"s{i}" for i in range(len(specs))], specs)
    logprobs = TopLogprobs.of(logits, tokens, specs, link.send)
    return PendingStep(tokens, logprobs, specs, link, lambda row: f"row {row}").result().sampled


def logits(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities]).log()


def spec(position=0, prompt=(), output=(), banned=(), **params) -> SampleSpec:
    return SampleSpec(SamplingParams(**{"seed": 3, **params}), position, tuple(prompt), tuple(output), tuple(banned))


def drawn(row: torch.Tensor, num: int = 400, **params) -> Counter:
    specs = [spec(position, **params) for position in range(num)]
    return Counter(token.token_id for token in sample(row.repeat(num, 1), specs))


def test_greedy_takes_the_likeliest():
    assert [t.token_id for t in sample(logits(0.1, 0.6, 0.3).repeat(2, 1), [spec(temperature=0)] * 2)] == [1, 1]


def test_greedy_rows_without_a_structure_bring_nothing_to_the_device():
    sent = []

    class Link(DeviceLink):
        def send(self, host: torch.Tensor) -> torch.Tensor:
            sent.append(host)
            return host

    sampling = Sampler(TorchKernels(), Link(torch.device("cpu")), 1)
    assert sampling.sample(logits(0.1, 0.6, 0.3), ["a"], [spec(temperature=0)]).tolist() == [1]
    assert not sent


def test_a_row_depends_on_its_own_seed_and_position_not_on_its_batch():
    torch.manual_seed(0)
    rows = torch.randn(5, 50)
    specs = [spec(position=i, seed=i) for i in range(5)]
    together = [t.token_id for t in sample(rows, specs)]
    alone = [sample(rows[i : i + 1], [specs[i]])[0].token_id for i in range(5)]
    assert together == alone


def test_top_k_keeps_k():
    assert set(drawn(logits(0.4, 0.3, 0.2, 0.1), top_k=2)) == {0, 1}


def test_top_p_keeps_the_token_that_crosses_it():
    assert set(drawn(logits(0.4, 0.3, 0.2, 0.1), top_p=0.5)) == {0, 1}
    assert set(drawn(logits(0.4, 0.3, 0.2, 0.1), top_p=0.01)) == {0}


def test_min_p_keeps_those_near_the_likeliest():
    assert set(drawn(logits(0.5, 0.3, 0.15, 0.05), min_p=0.25)) == {0, 1, 2}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_nothing_can_be_chosen_from_say_so_and_leave_the_others_alone(temperature):
    nan, inf = float("nan"), float("inf")
    rows = torch.tensor([[0.0, nan, 1.0], [0.0, 9.0, -inf], [inf, 0.0, 1.0], [-inf, -inf, -inf]])
    chosen = sample(rows, [spec(temperature=temperature, logprobs=1)] * 4)
    assert [type(token) for token in chosen] == [NoToken, SampledToken, NoToken, NoToken]
    assert [token.source for token in chosen if isinstance(token, NoToken)] == ["row 0", "row 2", "row 3"]
    assert chosen[1].token_id == 1
    assert chosen[1].logprob == pytest.approx(0.0, abs=1e-3)


def test_a_row_with_every_token_banned_has_none():
    assert sample(logits(0.5, 0.5), [spec(temperature=0, banned=(0, 1))]) == (NoToken("row 0"),)


def test_banned_tokens_never_come():
    assert sample(logits(0.1, 0.6, 0.3), [spec(temperature=0, banned=(1,))])[0].token_id == 2
    assert 0 not in drawn(logits(0.9, 0.05, 0.05), banned=(0,))


@pytest.mark.parametrize(
    ("params", "prompt", "output", "expected"),
    [
        ({"presence_penalty": 1.0}, (), (0,), 1),
        ({"presence_penalty": 1.0}, (0,), (), 0),  # the prompt does not count
        ({"frequency_penalty": 0.3}, (), (0, 0, 0), 1),
        ({"frequency_penalty": 0.3}, (), (0,), 0),
        ({"repetition_penalty": 1.5}, (0,), (), 1),
    ],
)
def test_penalties(params, prompt, output, expected):
    row = torch.tensor([[2.0, 1.6, 0.1]])
    assert sample(row, [spec(temperature=0, prompt=prompt, output=output, **params)])[0].token_id == expected


def test_repetition_penalty_pushes_negative_logits_further_down():
    row = torch.tensor([[-1.0, -1.2]])
    assert sample(row, [spec(temperature=0, prompt=(0,), repetition_penalty=1.5)])[0].token_id == 1


def test_the_least_repetition_penalty_leaves_logits_within_fp32():
    asked = spec(prompt=(0, 2), temperature=0, repetition_penalty=LEAST_REPETITION)
    assert sample(torch.tensor([[1e6, 1e3, -1e6]]), [asked]) == (SampledToken(0),)


def test_logprobs_are_of_the_unmodified_logits_and_the_input_is_left_alone():
    row = logits(0.5, 0.3, 0.2)
    before = row.clone()
    token = sample(row, [spec(temperature=0, banned=(0,), logprobs=2)])[0]
    assert token.token_id == 1
    assert token.logprob == pytest.approx(math.log(0.3), abs=1e-6)
    assert [i for i, _ in token.top] == [0, 1]
    assert torch.equal(row, before)
    assert sample(row, [spec(temperature=0)])[0].logprob is None


def test_a_bias_is_added_and_does_not_bring_back_what_is_banned():
    row = logits(0.5, 0.3, 0.2)
    assert drawn(row, 20, logit_bias=((2, 50.0),)) == {2: 20}
    assert drawn(row, 20, logit_bias=((0, -100.0), (1, -100.0))) == {2: 20}
    biased = spec(banned=(2,), temperature=0, logit_bias=((1, 10.0), (2, 100.0)))
    assert sample(row, [biased])[0].token_id == 1


@pytest.mark.parametrize(
    ("bad", "output", "expected"),
    [
        (((0,),), (), 1),  # never
        (((5, 0),), (5,), 1),  # not behind 5
        (((5, 0),), (4,), 0),
        (((4, 5, 0),), (5,), 0),  # only half of what comes before it
        (((4, 5, 0), (1,)), (4, 5), 2),
    ],
)
def test_the_last_token_of_a_bad_sequence_is_not_chosen_behind_the_others(bad, output, expected):
    constrained = spec(output=output, temperature=0, bad_sequences=bad)
    assert sample(logits(0.5, 0.3, 0.2), [constrained])[0].token_id == expected


def as_it_is(whole: SampleSpec) -> SampleSpec:
    """Of a row that is sampled from as it is."""
    params = whole.params
    return SampleSpec(
        SamplingParams(temperature=params.temperature, top_k=params.top_k, seed=params.seed), whole.position
    )


FOLLOWED = [
    {"repetition_penalty": 1.4, "temperature": 0.0},
    {"presence_penalty": 0.8, "frequency_penalty": 0.3},
    {"bad_sequences": ((1, 2), (2, 2, 3), (4,)), "temperature": 0.0},
    {"repetition_penalty": 0.8, "bad_sequences": ((0, 1, 2, 0), (3, 1)), "logit_bias": ((2, 1.0),), "logprobs": 1},
    {"temperature": 0.0},
    {"temperature": 1.2, "top_k": 3},
]


@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_tokens_that_are_followed_count_as_if_they_were_given_anew(seed: int, is_static: bool) -> None:
    """Sequences come, go and sit out steps; each token is what a sampler chooses that is told the whole history."""
    choose, generator = Random(seed), torch.Generator().manual_seed(seed)
    kernels, link = TorchKernels(), DeviceLink(torch.device("cpu"))
    followed, num_made = Sampler(kernels, link, 6), 0
    live: dict[str, tuple[SamplingParams, list[int], list[int]]] = {}
    before: set[str] = set()
    for _ in range(40):
        while len(live) < 6 and choose.random() < 0.7:
            params = SamplingParams(**{"seed": num_made, **choose.choice(FOLLOWED)})
            live[f"s{num_made}"] = params, [choose.randrange(5) for _ in range(3)], []
            num_made += 1
        names = [name for name in live if choose.random() < 0.85]
        rows = torch.randn(len(names), 5, generator=generator)
        told, whole = [], []
        for name in names:
            params, prompt, output = live[name]
            position = len(prompt) + len(output)
            whole.append(SampleSpec(params, position, tuple(prompt), tuple(output)))
            is_known = name in before or not params.has_penalties
            told.append(SampleSpec(params, position) if is_known else whole[-1])
        anew = Sampler(kernels, link, 6).sample(rows.clone(), names, whole)
        if is_static:
            tokens = Sampler(kernels, link, 6).sample(rows.clone(), names, [as_it_is(each) for each in whole])
            followed.resample(tokens, rows, names, told)
        else:
            tokens = followed.sample(rows, names, told)
        assert tokens.tolist() == anew.tolist()
        before = set(names)
        for name, token in zip(names, tokens.tolist(), strict=True):
            live[name][2].append(token)
            if choose.random() < 0.1:
                del live[name]


@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.parametrize("backend", ["torch", AUTO])
@pytest.mark.parametrize("seed", range(4))
def test_rows_behind_guesses_are_as_if_these_had_been_chosen(backend: str, seed: int, is_static: bool) -> None:
    """And of the guesses the right ones alone are counted for the next step."""
    choose, generator = Random(seed), torch.Generator().manual_seed(seed)
    link, kernels = DeviceLink(torch.device("cpu")), choose_kernels("cpu", torch.float32, backend)
    guessing = Sampler(kernels, link, len(FOLLOWED))
    outputs: list[list[int]] = [[] for _ in FOLLOWED]
    for step in range(12):
        rows, names, specs, guesses, expected = [], [], [], [], []
        for at, way in enumerate(FOLLOWED):
            params, prompt, known = SamplingParams(**{"seed": at, **way}), (0, 3), outputs[at].copy()
            num_rows, num_right, guess = choose.randrange(1, 6), 0, NO_GUESS
            for place in range(num_rows):
                rows.append(torch.randn(1, 5, generator=generator))
                whole = SampleSpec(params, len(prompt) + len(known), prompt, tuple(known))
                (token,) = Sampler(kernels, link, 1).sample(rows[-1].clone(), ["alone"], [whole]).tolist()
                is_given = step == place == 0
                specs.append(whole if is_given else SampleSpec(params, whole.position))
                names.append(f"s{at}")
                guesses.append(guess)
                expected.append(token)
                if num_right == place:
                    outputs[at].append(token)
                guess = token if choose.random() < 0.75 else choose.randrange(5)
                num_right += num_right == place and guess == token
                known.append(guess)
        if is_static:
            found = Sampler(kernels, link, 1).sample(torch.cat(rows), names, [as_it_is(each) for each in specs])
            guessing.resample(found, torch.cat(rows), names, specs, None, guesses)
        else:
            found = guessing.sample(torch.cat(rows), names, specs, None, guesses)
        assert found.tolist() == expected


@pytest.mark.parametrize("most", [0, 1, 5, 20])
def test_of_equal_alternatives_the_lower_ids_come_first_whatever_else_is_in_the_batch(most: int) -> None:
    rows = torch.randint(0, 40, (7, 1000), generator=torch.Generator().manual_seed(0)).float()
    expected = [sorted(range(1000), key=lambda token, row=row: (-row[token].item(), token))[:most] for row in rows]
    for first in range(7):
        values, ids = likeliest(rows[first:], most)
        assert ids.tolist() == expected[first:]
        assert torch.equal(values, rows[first:].gather(1, ids))
    assert likeliest(rows[:, :3], 3)[1].tolist() == [
        sorted(range(3), key=lambda token, row=row: (-row[token].item(), token)) for row in rows
    ]
