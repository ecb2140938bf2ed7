"""Predicted time to first token: the queue ahead of the prompt, the prompt itself, and the hand-off's messages.

The transfer of blocks to the decode worker is not included: the first token goes to the client without waiting for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.router.placement.cost_model import CostModel
from services.router.placement.views import PlacementRequest, Pool, WorkerView
from services.router.placement.work import NO_WORK, Work

_SMOOTHING = 0.05


class TtftPredictor:
    """Learns what prefill costs in both pools. Predicts None until it has seen enough prompts."""

    def __init__(self) -> None:
        self.prefill = CostModel()
        self._here = CostModel()
        self.hand_off_s = 0.0
        """Running mean of reserve, submit and the first token's return. Seconds."""

    @property
    def here(self) -> CostModel:
        """Cost of prefill on a decode worker; until enough was observed, the cost on a prefill worker."""
        return self._here if self._here.token_s is not None else self.prefill

    def observe_prefill(self, ahead: Work, own: Work, seconds: float) -> None:
        """A prefill worker computed a prompt behind others, wait and computation in one."""
        self.prefill.observe(ahead, own, seconds)

    def observe_here(self, ahead: Work, own: Work, seconds: float) -> None:
        """A decode worker computed a prompt together with its batch."""
        self._here.observe(ahead, own, seconds)

    def observe_hand_off(self, seconds: float) -> None:
        """Time from the choice of workers to the first token, less queue and compute."""
        self.hand_off_s += _SMOOTHING * (seconds - self.hand_off_s) if self.hand_off_s else seconds

    def pool_s(self, view: WorkerView, request: PlacementRequest) -> float | None:
        """Seconds to the first token through this prefill worker."""
        own_s = _own_s(self.prefill, view, request)
        return None if own_s is None else own_s + self.hand_off_s

    def here_s(self, view: WorkerView, request: PlacementRequest) -> float | None:
        """Seconds to the first token if this decode worker computes the prompt itself."""
        return _own_s(self.here, view, request)

    def idle_s(self, own: Work) -> float | None:
        """Seconds to the first token on an idle worker."""
        own_s = self._prompts.predict_s(NO_WORK, own)
        return None if own_s is None else own_s + self.hand_off_s

    def wait_s(self, num_tokens_ahead: int, pool: Pool) -> float | None:
        """Seconds until some worker of `pool` has computed its queue and its share of `num_tokens_ahead`.

        Waiting tokens fill up the shortest queues first. 0 with an idle worker and nothing ahead.
        """
        token_s = self._prompts.token_s
        if token_s is None:
            return None
        queues = [view.num_queued_tokens for view in pool if view.accepting]
        return _filled_level(num_tokens_ahead, queues) * token_s if queues else 0.0

    @property
    def _prompts(self) -> CostModel:
        """The model of the workers that compute most prompts; in collocated mode those are decode workers."""
        return self.prefill if self.prefill.num_observations else self._here


def _own_s(model: CostModel, view: WorkerView, request: PlacementRequest) -> float | None:
    return model.predict_s(view.queued, request.work(view.name))


def _filled_level(num_tokens: int, queues: Sequence[int]) -> float:
    """Length of the shortest queue after `num_tokens` were distributed, always to the shortest queue."""
    lowest = min(queues)
    if not num_tokens:
        return lowest
    below = queues
    while True:
        level = (num_tokens + sum(below)) / len(below)
        kept = [queue for queue in below if queue <= level]
        if len(kept) == len(below):
            return level
        below = kept
