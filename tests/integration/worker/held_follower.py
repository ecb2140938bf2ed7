"""A follower that loads its slice when it is let, for tests of what its leader does meanwhile.

It loads once $HELD_FOLLOWER/go is there, and writes $HELD_FOLLOWER/loaded when it has.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from services.worker.group import follower
from services.worker.group.rank_spec import RankSpec
from shared.model.ranks.rank_decoder import RankDecoder

FOLDER_VARIABLE = "HELD_FOLLOWER"


def main() -> int:
    """As the follower's."""
    folder = Path(os.environ[FOLDER_VARIABLE])
    load_rank = RankDecoder.load_rank

    def held(*arguments: Any) -> RankDecoder:
        while not (folder / "go").exists():
            time.sleep(0.01)
        decoder = load_rank(*arguments)
        (folder / "loaded").touch()
        return decoder

    RankDecoder.load_rank = held  # type: ignore[method-assign,assignment]
    return follower.main(RankSpec.parse(sys.argv[1]))


if __name__ == "__main__":
    sys.exit(main())
