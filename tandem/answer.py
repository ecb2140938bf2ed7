"""An answer as far as the client has it, and its deltas."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from shared.rpc.pb.tandem.v1 import inference_pb2, types_pb2

_FINISH_REASONS = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_CANCELLED: "cancelled",
}


class TokenLogprobs(NamedTuple):
    """Log-probability of one output token and of the most likely alternatives."""

    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, log-probability), most likely first


@dataclass(frozen=True, slots=True)
class Delta:
    """New output of one answer. Text is final; it may be empty."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each token id if asked for
    finish_reason: str = ""  # "stop" or "length" on the last delta
    index: int = 0  # of the answer, where several were asked for


@dataclass(slots=True)
class Answer:
    """One answer so far. What stands below `finish_reason` is set once it is complete."""

    request_id: str = ""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    seed: int | None = None  # from the first token on: with it the same answer can be had again
    max_tokens: int | None = None  # likewise: the limit that holds
    sampler_version: int = 0  # likewise: with another one the seed gives another answer
    router: str = ""  # the name of the router that serves it
    num_calls: int = 0  # 1 where nothing broke
    ttft_ms: float = 0.0  # client send → first token at the client
    finish_reason: str = ""  # "stop" or "length" when complete
    tpot_ms: float = 0.0  # (end - first token) / (output tokens - 1); 0 for a single token
    usage: types_pb2.Usage = field(default_factory=types_pb2.Usage)
    split: types_pb2.TtftSplit = field(default_factory=types_pb2.TtftSplit)  # of the latest call
    prefill_worker: str = ""  # of the latest call; empty: the decode worker prefilled
    decode_worker: str = ""

    def begun(self) -> Answer:
        """A copy from which the answer can be continued: the output so far and the fields of `resume`."""
        return Answer(
            request_id=self.request_id,
            text=self.text,
            token_ids=list(self.token_ids),
            logprobs=list(self.logprobs),
            seed=self.seed,
            max_tokens=self.max_tokens,
            sampler_version=self.sampler_version,
            num_calls=max(1, self.num_calls),
        )

    def add(self, response: inference_pb2.GenerateResponse, index: int) -> Delta:
        """Takes a message; what it brought."""
        logprobs = tuple(
            TokenLogprobs(entry.logprob, tuple((top.token_id, top.logprob) for top in entry.top))
            for entry in response.logprobs
        )
        self.text += response.text
        self.token_ids += response.token_ids
        self.logprobs += logprobs
        if response.HasField("start"):
            self.seed, self.max_tokens = response.start.seed, response.start.max_tokens
            self.router, self.sampler_version = response.start.router, response.start.sampler_version
        if response.finish_reason:
            self.finish_reason = _FINISH_REASONS.get(response.finish_reason, "stop")
            self.usage, self.split = response.usage, response.ttft
            self.prefill_worker, self.decode_worker = response.prefill_worker, response.decode_worker
        return Delta(response.text, tuple(response.token_ids), logprobs, self.finish_reason, index)
