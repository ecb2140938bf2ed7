"""How the ranks of several hosts meet: those of one host through its memory, all others over TCP.

They find each other by a store that the first rank's process opens.
"""

from __future__ import annotations

import ctypes
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import Store

from shared.address import Address
from shared.collectives.cpu_group import CpuGroup, group_bytes, shared_memory
from shared.collectives.distributed import LIMIT_S, DistributedGroup
from shared.collectives.interface import Collectives
from shared.collectives.rank_links import Membership, RankLinks, Ways
from shared.errors import RankLost

MEETING_S = 600.0
"""Seconds for the processes of all ranks to start, once their hosts have met."""
IDLE_S = 10 * 365 * 86400.0
"""A worker may be idle for long: followers wait for plans and commands without a limit. The connection at which their
hosts have met shows which of them is lost."""
CONNECT_S = 10.0
"""Seconds to connect to the store, which listens before any rank starts: where none listens, the leader has ended."""
_LOOK_S = 0.05
_ALL = "all"


@dataclass(frozen=True, slots=True)
class MeetingPlace:
    """The address and token by which a rank finds the others."""

    store: str
    """host:port."""
    token: str
    """Prefix of the group's keys in the store, drawn for each incarnation."""
    address: str
    """Address of the rank's own host, as the others reach it."""


class StoreServer:
    """The store, in the first rank's process: open to all that reach its port, so it listens on one address alone, and
    only until all ranks have joined."""

    def __init__(self, host: str) -> None:
        """Listens on any free port of the address `host`. Raises OSError where it is not this machine's."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listening:
            listening.bind((host, 0))
            listening.listen()
            port = int(listening.getsockname()[1])
            self._store: TCPStore | None = TCPStore(
                host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
            )
        self.address = str(Address(host, port))
        self.token = secrets.token_hex(16)

    def close(self) -> None:
        """Twice is fine."""
        self._store = None


def host_memories(library: ctypes.CDLL, ways: Ways, host: int) -> list[int]:
    """A file descriptor of messages' memory for each of the ways' memberships within one host, which the caller closes;
    that host's ranks inherit them."""
    return [shared_memory(group_bytes(library, len(group.ranks))) for group in _within(ways, host)]


def join(
    library: ctypes.CDLL,
    descriptors: Sequence[int],
    rank: int,
    ways: Ways,
    place: MeetingPlace,
    check: Callable[[], None] = lambda: None,
) -> RankLinks:
    """Joins this rank's groups, one after the other, and waits until all ranks have; the first rank calls `check`
    until the processes of all others run, which raises where one will not come. Raises RankLost."""
    by_name = dict(zip((group.name for group in _within(ways, ways.host_of(rank))), descriptors, strict=True))
    store = _meet(rank, ways.num_ranks, place, check)

    def connect(group: Membership) -> Collectives:
        own, size = group.ranks.index(rank), len(group.ranks)
        if group.name in by_name:
            joined = CpuGroup(library, by_name[group.name], own, size, group.ranks)
            joined.meet(check)
            return joined
        limit_s = IDLE_S if group.name in ("everyone", "blocks", "adapters") else LIMIT_S
        return DistributedGroup(
            own, size, PrefixStore(group.name, store), group.backend, limit_s, address=place.address
        )

    return ways.join(rank, connect)


def _within(ways: Ways, host: int) -> list[Membership]:
    """In the order in which they are joined."""
    ranks = set(ways.ranks_of(host))
    return [group for group in ways.memberships if group.backend == "shm" and ranks.issuperset(group.ranks)]


def _meet(rank: int, size: int, place: MeetingPlace, check: Callable[[], None]) -> Store:
    """The store, when all ranks have come to it: torch's own meetings end after a time in which a host may still be
    starting."""
    address = Address.parse(place.store, "store")
    try:
        connect = timedelta(seconds=CONNECT_S)
        server = TCPStore(address.host, address.port, is_master=False, wait_for_workers=False, timeout=connect)
        server.set_timeout(timedelta(seconds=MEETING_S))
        store = PrefixStore(place.token, server)
        if rank:  # whose process started this one ends it where the others do not come
            store.set(_key(rank), "")
            store.wait([_ALL], timedelta(seconds=IDLE_S))
            return store
        others = [_key(other) for other in range(1, size)]
        end = time.monotonic() + MEETING_S
        while not store.check(others):
            check()
            if time.monotonic() > end:
                raise RankLost(f"not all of the group's {size} ranks had started after {MEETING_S:g} s")
            time.sleep(_LOOK_S)
        store.set(_ALL, "")
        return store
    except RuntimeError as error:  # torch's own errors are of this class
        raise RankLost(f"rank {rank} does not reach its group's store: {error}", rank=rank) from error


def _key(rank: int) -> str:
    return f"rank {rank}"
