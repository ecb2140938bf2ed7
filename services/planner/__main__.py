"""`python -m services.planner --release NAME`: sizes the pools of a release in Kubernetes; see shared/process.py."""

from __future__ import annotations

import sys

from services.planner.service import PlannerService
from services.planner.settings import PlannerSettings
from shared.process import run_service


async def _start(settings: PlannerSettings) -> PlannerService:
    service = PlannerService(settings)
    await service.start()
    return service


if __name__ == "__main__":
    sys.exit(run_service("tandem-planner", PlannerSettings, _start))
