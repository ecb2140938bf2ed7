"""`python -m loadtest.simulator --trace FILE …`"""

from __future__ import annotations

from loadtest.rig.command_line import run
from loadtest.simulator.cli import simulate_trace

if __name__ == "__main__":
    run(simulate_trace, name="python -m loadtest.simulator")
