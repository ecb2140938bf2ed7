"""Settings of moves, a part of the router's."""

from __future__ import annotations

from pydantic import Field

from services.router.placement.moves import MoveLimits
from shared.settings.group import SettingGroup


class MoveSettings(SettingGroup):
    """When running answers move to other decode workers. They are the same answers, token for token, in fp32 and in
    deterministic mode."""

    drain: bool = True
    """The answers of a worker that drains or is removed continue on others; else it finishes them itself."""
    rescue: bool = True
    """An answer leaves a worker that misses `targets.tpot_s` where another one is predicted to hold it."""
    per_worker: int = Field(default=2, ge=1, le=64)
    """Moves at once from a worker and to it."""
    per_router: int = Field(default=8, ge=1, le=1024)
    """Moves at once."""

    @property
    def limits(self) -> MoveLimits:
        """What `MovePolicy` takes."""
        return MoveLimits(self.per_worker, self.per_router)
