"""The gated delta rule, by tokens and by chunks: what the formula gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shared.kernels.delta.reference import CHUNK, convolve, delta_chunk, delta_step, gated_norm, normalised


class Case:
    """Some tokens of one sequence, and a state before them."""

    def __init__(
        self, num_tokens: int, heads: int = 3, key_dim: int = 5, value_dim: int = 7, *, by_channel: bool = False
    ) -> None:
        generator = torch.Generator().manual_seed(num_tokens)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.query = normalised(draw(num_tokens, heads, key_dim), key_dim**-0.5)
        self.key = normalised(draw(num_tokens, heads, key_dim))
        self.value = draw(num_tokens, heads, value_dim)
        self.log_decay = -draw(num_tokens, heads, key_dim if by_channel else 1).exp()
        self.rate = draw(num_tokens, heads).sigmoid()
        self.state = draw(heads, key_dim, value_dim)

    @property
    def tokens(self) -> tuple[Tensor, ...]:
        return self.query, self.key, self.value, self.log_decay, self.rate

    def expected(self) -> tuple[Tensor, Tensor]:
        """By the formula, in fp64, a head and a token at a time."""
        state, found = self.state.double(), torch.empty(self.value.shape, dtype=torch.float64)
        for token, (query, key, value, decay, rate) in enumerate(zip(*(x.double() for x in self.tokens), strict=True)):
            for head in range(len(query)):
                kept = state[head] * decay[head].exp()[:, None]
                state[head] = kept + rate[head] * torch.outer(key[head], value[head] - key[head] @ kept)
                found[token, head] = query[head] @ state[head]
        return found, state


@pytest.mark.parametrize("num_tokens", [1, 2, 13, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
@pytest.mark.parametrize("by_channel", [False, True])
def test_chunks_follow_the_formula(num_tokens: int, by_channel: bool) -> None:
    case = Case(num_tokens, by_channel=by_channel)
    before = case.state.clone()
    for found, expected in zip(delta_chunk(*case.tokens, case.state), case.expected(), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    assert case.state.equal(before)


@pytest.mark.parametrize("by_channel", [False, True])
def test_steps_of_several_sequences_follow_the_formula(by_channel: bool) -> None:
    cases = [Case(count, 2, by_channel=by_channel) for count in (1, 2, 3)]
    first = [torch.stack([case.tokens[part][0] for case in cases]) for part in range(5)]
    found, states = delta_step(*first, torch.stack([case.state for case in cases]))
    for case, out, state in zip(cases, found, states, strict=True):
        alone = Case.__new__(Case)
        alone.query, alone.key, alone.value, alone.log_decay, alone.rate = (part[:1] for part in case.tokens)
        alone.state = case.state
        expected, behind = alone.expected()
        torch.testing.assert_close(out.double(), expected[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(state.double(), behind, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("by_channel", [False, True])
def test_a_prompt_cut_anywhere_goes_on_as_if_whole(by_channel: bool) -> None:
    case = Case(150, by_channel=by_channel)
    whole, last = delta_chunk(*case.tokens, case.state)
    state, parts = case.state, []
    for begin, end in ((0, 64), (64, 65), (65, 100), (100, 150)):
        out, state = delta_chunk(*(part[begin:end] for part in case.tokens), state)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernel_size", [1, 2, 4])
@pytest.mark.parametrize("num_tokens", [1, 6])
def test_a_convolution_sees_the_newest_tokens_alone(num_tokens: int, kernel_size: int) -> None:
    inputs, weight = torch.randn(2, kernel_size - 1 + num_tokens, 5), torch.randn(kernel_size, 5)
    expected = torch.stack([(inputs[:, token : token + kernel_size] * weight).sum(1) for token in range(num_tokens)], 1)
    torch.testing.assert_close(convolve(inputs, weight), expected)


def test_a_gated_norm_rounds_before_its_weight() -> None:
    x, gate = torch.randn(4, 3, 8).bfloat16(), torch.randn(4, 3, 8).bfloat16()
    weight = torch.randn(8).bfloat16()
    normed = (x.float() / (x.float().square().mean(-1, keepdim=True) + 1e-6).sqrt()).bfloat16()
    expected = (normed * weight).float() * gate.float() * gate.float().sigmoid()
    torch.testing.assert_close(gated_norm(x, weight, gate, 1e-6), expected.bfloat16())


def test_a_norm_before_a_sigmoid_rounds_once() -> None:
    x, gate = torch.randn(4, 3, 8).bfloat16(), torch.randn(4, 3, 8).bfloat16()
    weight = torch.randn(8).bfloat16()
    normed = x.float() / (x.float().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    expected = (normed * weight.float() * gate.float().sigmoid()).bfloat16()
    torch.testing.assert_close(gated_norm(x, weight, gate, 1e-6, is_sigmoid=True), expected)
