"""A step that was handed to the device: its result, once it is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from torch import Tensor

from shared.engine.plan import SampleSpec, StepResult
from shared.engine.runner.device_link import DeviceLink
from shared.engine.runner.prompt_logprobs import PendingTargets
from shared.engine.runner.sampler import TopLogprobs, describe


class PendingStep:
    """Holds host copies of what the step chose; they are on their way while the device computes."""

    def __init__(
        self,
        tokens: Tensor,  # [num_rows] int64 on the device
        logprobs: TopLogprobs | None,
        specs: Sequence[SampleSpec],
        link: DeviceLink,
        source: Callable[[int], str | None],
        faults: Mapping[int, str] = MappingProxyType({}),
        targets: PendingTargets | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Queues the copies. `source(row)` names the part of the model that gave a row its first NaN or infinity;
        called only for rows without a token. `faults`: the rows whose structure failed, and why; their tokens mean
        nothing. `check` is called when the step is done, and raises where its numbers may mean nothing."""
        self._specs = specs
        self._targets = targets
        self._source = source
        self._faults = faults
        self._tokens = link.fetch(tokens)
        self._logprobs = logprobs and TopLogprobs(*(link.fetch(part) for part in vars(logprobs).values()))
        self._wait = link.mark()
        self._check = check
        self._values: list[int] | None = None

    def result(self) -> StepResult:
        """Waits until the step is done."""
        sampled = describe(self.tokens(), self._logprobs, self._specs, self._source, self._faults)
        return StepResult(sampled, self._targets.result() if self._targets is not None else ())

    def tokens(self) -> list[int]:
        """The chosen tokens, -1 where there is none; waits until the step is done."""
        if self._values is None:
            try:
                self._wait()
            finally:
                self._check()  # raises with the cause, where the device reports an error
            self._values = self._tokens.tolist()
        return self._values
