"""A leader's side of a meeting in a process of its own, without an engine: python -m … PORT. Prints its port."""

from __future__ import annotations

import signal
import sys

from services.worker.group.meeting.join_check import GroupShape
from services.worker.group.meeting.leader_port import MeetingPort
from services.worker.group.rank_spec import RankSpec
from shared.address import Address

COMMON = RankSpec("w", 0, 2, 1, 1, "shm", (0, 1), (), "models/demo", "float32", "cpu", "cpu", 1, (), hosts=2)
"""Two ranks, a host each."""


def main() -> None:
    port = MeetingPort(Address("127.0.0.1", int(sys.argv[1])), GroupShape(2, 2, 1), None)
    port.open(COMMON)
    print(port.address.port, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
