"""Every step's plan as one message from the leader to the followers, which compute it in lockstep."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shared.collectives.broadcast import broadcast_bytes
from shared.collectives.interface import Collectives
from shared.engine.plan import StepPlan
from shared.engine.plan_codec import PlanDecoder, PlanEncoder
from shared.engine.runner.runner import Runner

_END = b""


class PlanAnnouncer:
    """The leader's side. Called by one thread, before it computes its own part of the step."""

    def __init__(self, everyone: Collectives, check: Callable[[], None] = lambda: None) -> None:
        """`check`: raises RankLost where a rank is known to be gone."""
        self._everyone = everyone
        self.check = check
        self._encoder = PlanEncoder()

    def __call__(self, plan: StepPlan) -> None:
        """Sends the plan; does not wait until it is read. Raises RankLost."""
        broadcast_bytes(self._everyone, self._encoder.encode(plan))

    def close(self) -> None:
        """Ends the followers: no plan follows. Raises RankLost."""
        broadcast_bytes(self._everyone, _END)


def follow(everyone: Collectives, runner: Runner) -> None:
    """A follower's steps, until the leader ends them. Raises RankLost, and as `PlanDecoder.decode`."""
    decoder = PlanDecoder()
    with torch.inference_mode():
        while (message := broadcast_bytes(everyone)) != _END:
            runner.follow(decoder.decode(message))
