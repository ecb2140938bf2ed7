"""One request of a trace on its way through the simulated fleet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from loadtest.simulator.prefix_index import PrefixIndex
from loadtest.workloads.trace import TraceRequest
from services.router.placement.views import NO_WORK, Tier, Work
from shared.engine.sampling_params import SamplingParams


@dataclass(slots=True)
class SimRequest:
    """A request's data from the trace, then its results. Times are simulated seconds."""

    number: int
    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    runs: tuple[int, ...]
    """Ids of its prompt's runs of `run_len` tokens, the last one maybe shorter; equal ids are equal prefixes. Empty:
    the prompt shares nothing."""
    session: str
    hashes: Sequence[bytes] = field(repr=False)
    """Hashes of its prompt's full blocks."""
    retain_s: float = 0.0
    """Seconds for which the blocks are retained for the session."""
    adapter: str = ""
    """Empty: the base model."""
    prefill: str = ""
    decode: str = ""
    ahead: Work = NO_WORK
    """Work queued ahead of it, in its router's view."""
    tier: Tier = Tier.FOLDER
    """Where that worker had its adapter, in its router's view."""
    placed_s: float = 0.0
    predicted_ttft_s: float | None = None
    """Predicted seconds from the placement to the first token; None where nothing was predicted."""
    num_cached_tokens: int = 0
    adapter_s: float = 0.0
    """Seconds that the prompt's worker waited for the adapter."""
    refused: bool = False
    refused_s: float = 0.0
    """Time of the refusal; the arrival time if it did not wait."""
    first_token_s: float = 0.0
    finished_s: float = 0.0

    @property
    def name(self) -> str:
        """Unique."""
        return f"r{self.number}"

    @property
    def sampling(self) -> SamplingParams:
        """An answer of exactly its length."""
        return SamplingParams(seed=0, max_tokens=self.num_output_tokens, ignore_eos=True)

    @property
    def prefilled_here(self) -> bool:
        """Whether the decode worker computed the prompt."""
        return not self.prefill

    @property
    def ttft_s(self) -> float:
        """Seconds from arrival to the first token at the client."""
        return self.first_token_s - self.at_s

    @property
    def tpot_s(self) -> float:
        """Mean time of the tokens after the first."""
        return (self.finished_s - self.first_token_s) / max(1, self.num_output_tokens - 1)


def from_trace(trace: Sequence[TraceRequest], speedup: float, index: PrefixIndex) -> list[SimRequest]:
    """The trace's requests with times divided by `speedup`.

    Sessions are derived from the prefixes: a prompt belongs to the conversation of the earlier prompt with which it
    shares the most, if that is more than the first run (a common system prompt); else it starts a new one.
    """
    owner: dict[int, str] = {}
    requests = []
    for number, line in enumerate(trace):
        runs = line.hash_ids
        shared = next((run for run in reversed(runs[1:]) if run in owner), None)
        session = f"s{number}" if shared is None else owner[shared]
        for run in runs[1:]:
            owner.setdefault(run, session)
        at_s, num_prompt_tokens = line.at_s / speedup, line.num_prompt_tokens
        hashes = index.hashes(runs, num_prompt_tokens) if runs else index.own_hashes(number, num_prompt_tokens)
        requests.append(SimRequest(number, at_s, num_prompt_tokens, line.num_output_tokens, runs, session, hashes))
    return requests
