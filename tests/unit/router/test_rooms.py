"""Which rooms of the router know which: the core knows neither its edge nor what is shown of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROUTER = Path(__file__).parents[3] / "services" / "router"


@pytest.mark.parametrize("room", ["admission", "placement", "workers", "dispatch"])
def test_the_core_loads_neither_the_edge_nor_the_views(room: str) -> None:
    names = [f"services.router.{room}.{file.stem}" for file in sorted((ROUTER / room).glob("*.py"))]
    assert names
    program = (
        f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\n"
        "print([name for name in sys.modules if name.startswith(('services.router.views', 'services.router.edge'))])"
    )
    found = subprocess.run((sys.executable, "-c", program), capture_output=True, text=True, check=True).stdout
    assert found.strip() == "[]"
