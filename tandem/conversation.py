"""One answer over any number of calls: what each call asks for, and what a failure leads to. No I/O.

All state that is needed to continue is here, at the client: the tokens and the text so far, the seed and the limit from
the answer's start. A router has nothing of it once it is lost.
"""

from __future__ import annotations

import math
import random
from typing import NamedTuple

from shared.errors import DeadlineExceeded, Draining, Overloaded, QuotaExceeded, TandemError
from shared.rpc.pb.tandem.v1 import inference_pb2
from tandem.answer import Answer, Delta
from tandem.failures import RouterLost, no_router
from tandem.router_choice import Targets, pause_s


class Call(NamedTuple):
    """The next call to make."""

    target: str
    request: inference_pb2.GenerateRequest
    timeout_s: float | None


class Conversation:
    """The calls for one answer, one after another. Times are of one steady clock, in seconds."""

    def __init__(
        self,
        request: inference_pb2.GenerateRequest,
        targets: Targets,
        rng: random.Random,
        *,
        timeout_s: float | None,
        retry_for_s: float,
        index: int = 0,
        resume: Answer | None = None,
    ) -> None:
        """`timeout_s`: the answer's deadline, from the first call on; `retry_for_s`: it is given up after this time
        without a new token from the first failure on. `resume`: what is there of the answer already."""
        self.answer = Answer(request_id=request.request_id) if resume is None else resume.begun()
        self._request = request
        self._targets = targets
        self._rng = rng
        self._timeout_s = timeout_s
        self._begun, self._due = 0.0, math.inf  # the first call's
        self._retry_for_s = retry_for_s
        self._index = index
        self._target = ""
        self._num_failures = 0  # since the last token
        self._failing_since = 0.0
        self._num_had = len(self.answer.token_ids)
        self._first_at = 0.0  # the first token of these calls
        self._answered = False  # the present call brought something

    @property
    def done(self) -> bool:
        """The answer is complete."""
        return bool(self.answer.finish_reason)

    @property
    def answered(self) -> bool:
        """The present call has brought a message."""
        return self._answered

    def call(self, now: float) -> Call:
        """The next call, for what is missing; raises DeadlineExceeded."""
        if not self._target:
            self._begun, self._due = now, math.inf if self._timeout_s is None else now + self._timeout_s
        left = self._due - now
        if left <= 0:
            raise DeadlineExceeded(f"not done within {self._timeout_s:g} s", limit=self._timeout_s)
        request, answer = self._request, self.answer
        if answer.num_calls:  # the router that is lost may have it still: `resume` takes it over
            request = inference_pb2.GenerateRequest()
            request.CopyFrom(self._request)
            request.resume.token_ids.extend(answer.token_ids)
            request.resume.num_chars = len(answer.text)
            request.resume.sampler_version = answer.sampler_version
            if answer.seed is not None and answer.max_tokens is not None:
                request.sampling.seed, request.sampling.max_tokens = answer.seed, answer.max_tokens
        answer.num_calls += 1
        self._answered = False
        self._target = self._targets.choose()
        return Call(self._target, request, None if math.isinf(left) else left)

    def take(self, response: inference_pb2.GenerateResponse, now: float) -> Delta:
        """A message of the present call."""
        answer = self.answer
        if not self._answered:
            self._answered = True
            self._targets.answered()
        if response.token_ids:
            self._num_failures = 0
            if len(answer.token_ids) == self._num_had:
                self._first_at = now
            if not answer.token_ids:
                answer.ttft_ms = (now - self._begun) * 1e3
        delta = answer.add(response, self._index)
        num_gaps = len(answer.token_ids) - self._num_had - 1
        if self.done and num_gaps > 0:
            answer.tpot_ms = (now - self._first_at) * 1e3 / num_gaps
        return delta

    def failed(self, error: TandemError, now: float) -> float:
        """The present call ended before the answer did. Seconds to wait before the next one; raises where there is
        none to be made: the error itself, DeadlineExceeded where the pause would outlast the deadline."""
        if not self._may_go_on(error):
            raise error
        if not self._num_failures:
            self._failing_since = now
        self._num_failures += 1
        if not isinstance(error, RouterLost):
            self._targets.answered()
        pause = pause_s(self._num_failures, self._rng)
        if not _is_refusal(error):
            self._targets.failed(self._target)
            all_failed = not self._targets.has_answered and self._num_failures >= len(self._targets.all)
            if isinstance(error, RouterLost) and all_failed:
                raise no_router(self._targets.all, error)
        elif isinstance(retry_after_s := error.details.get("retry_after_s"), float):
            pause = max(pause, retry_after_s)
        if now + pause - self._failing_since > self._retry_for_s:
            raise error
        if now + pause >= self._due:
            raise DeadlineExceeded(f"not done within {self._timeout_s:g} s: {error}", limit=self._timeout_s)
        return pause

    def _may_go_on(self, error: TandemError) -> bool:
        """A refusal is an answer to a request that has not begun; one that has comes back."""
        return bool(self.answer.token_ids) if _is_refusal(error) else error.retryable


def _is_refusal(error: TandemError) -> bool:
    """The router is well, and has no room for the request."""
    return isinstance(error, Overloaded | QuotaExceeded) and not isinstance(error, Draining)
