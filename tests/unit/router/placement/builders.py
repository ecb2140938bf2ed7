"""Views, pools and needs in few words."""

from __future__ import annotations

from services.router.placement.views import PlacementRequest, Pool, PrefixHits, WorkerView
from shared.kv.groups import KVGroups


def view(name: str = "w", **changes) -> WorkerView:
    """An idle worker with 100 blocks and 8 places."""
    fields = {
        "num_free_blocks": 100,
        "num_total_blocks": 100,
        "num_requests": 0,
        "max_num_seqs": 8,
        "num_queued_tokens": 0,
    }
    return WorkerView(name, **{**fields, **changes})


def pool(*views: WorkerView) -> Pool:
    """Connected workers."""
    made = Pool()
    for one in views:
        made.add(one)
    return made


def prompt(num_tokens: int = 64, session: str = "", store: int = 0, **local: int) -> PlacementRequest:
    """A prompt with `local` hit tokens by worker."""
    return PlacementRequest(num_tokens, KVGroups(16), PrefixHits.of(local, store), session)
