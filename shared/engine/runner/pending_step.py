"""A step that was handed to the device: its result, once it is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
        targets: PendingTargets | None = None,
    ) -> None:
        """Queues the copies. `source(row)` says where a row's numbers broke; asked only for rows without a token."""
        self._specs = specs
        self._targets = targets
        self._source = source
        self._tokens = link.fetch(tokens)
        self._logprobs = logprobs and TopLogprobs(*(link.fetch(part) for part in vars(logprobs).values()))
        self._wait = link.mark()

    def result(self) -> StepResult:
        """Waits until the step is done."""
        self._wait()
        sampled = describe(self._tokens.tolist(), self._logprobs, self._specs, self._source)
        return StepResult(sampled, self._targets.result() if self._targets is not None else ())
