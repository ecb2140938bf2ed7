"""Settings of attribution, a part of the router's."""

from __future__ import annotations

from pydantic import Field

from shared.settings.group import SettingGroup


class TargetSettings(SettingGroup):
    """The targets that requests are judged by in the status. Nothing is refused for `ttft_s` (see `admission`)."""

    ttft_s: float = Field(default=0.0, ge=0.0, le=86400.0)
    """Target for the time to first token, seconds; 0 = `admission.ttft_target_s`. A client's own takes precedence."""
    tpot_s: float = Field(default=0.0, ge=0.0, le=3600.0)
    """Target for the time per output token after the first, seconds; 0 = none. Workers whose own tpot_target_ms is -1
    bound their batches and chunks by it."""
