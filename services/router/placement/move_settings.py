"""Settings of moves, a part of the router's."""

from __future__ import annotations

from shared.settings.group import SettingGroup


class MoveSettings(SettingGroup):
    """When running answers move to other decode workers. They are the same answers, token for token, in fp32 and in
    deterministic mode."""

    drain: bool = True
    """The answers of a worker that drains or is removed continue on others; else it finishes them itself."""
    rescue: bool = True
    """An answer leaves a worker that misses `targets.tpot_s` where another one is predicted to hold it."""
