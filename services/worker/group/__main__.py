"""`python -m services.worker.group SPEC`: a rank beside a leader, which starts it and ends it."""

from __future__ import annotations

import signal
import sys

from shared.garbage import uncollected

if __name__ == "__main__":
    # The leader drains first: a signal to the whole process group must not end its ranks before that.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with uncollected():
        from services.worker.group.follower import main
        from services.worker.group.rank_spec import RankSpec
    sys.exit(main(RankSpec.parse(sys.argv[1])))
