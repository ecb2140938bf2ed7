"""Which groups a rank of tensor x pipeline ranks belongs to, whatever connects them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shared.collectives.interface import Collectives
from shared.errors import ConfigError

Backend = Literal["shm", "gloo", "nccl"]
"""What carries sums and hidden states: memory that a host's ranks share, TCP, or what GPUs have between them."""


@dataclass(frozen=True, slots=True)
class RankLinks:
    """A rank's ways to the others; one object may be several of them, since all ranks call in one order. `blocks` and
    `slices` are apart from the others, and so is `adapters`: other threads call them, beside the steps."""

    everyone: Collectives
    """All ranks of the group; the first is its leader."""
    stage: Collectives | None
    """The ranks that split this stage's projections; None where it is alone."""
    head: Collectives | None
    """The leader and the last stage's ranks, or the only stage's; None where this rank is neither."""
    behind: Collectives | None
    """A pair: the same part of the stage before, and this rank."""
    ahead: Collectives | None
    """A pair: this rank, and the same part of the next stage."""
    blocks: Collectives | None = None
    """All ranks, where they have pools of their own: for what the leader asks of those."""
    slices: Collectives | None = None
    """The ranks that send their slices of blocks to the leader; None where this rank is not one, or the only one."""
    adapters: Collectives | None = None
    """All ranks, where they read adapters: for what the leader asks of those."""
    on_device: bool = False
    """Whether sums and hidden states are queued on the ranks' devices, and no call waits on the host."""

    def fail(self, rank: int) -> None:
        """Ends this rank's waits for any other: `rank` is known to be gone. From any thread."""
        for group in self._all:
            group.fail(rank)

    def close(self) -> None:
        """Leaves them all. Twice is fine."""
        for group in self._all:
            group.close()

    @property
    def _all(self) -> Iterator[Collectives]:
        # Those of the host's memory first: to end one of a device's may take long.
        first = (self.everyone, self.blocks, self.slices, self.adapters)
        return (x for x in (*first, self.stage, self.head, self.behind, self.ahead) if x is not None)


class Membership(NamedTuple):
    """A group of some of the ranks."""

    name: str
    """No other membership has it."""
    ranks: tuple[int, ...]
    """Ascending."""
    backend: Backend
    """What connects them; plans and blocks go through the host's memory or between hosts, never between GPUs."""


@dataclass(frozen=True, slots=True)
class Ways:
    """Which groups `tensor` x `pipeline` ranks form."""

    tensor: int
    pipeline: int
    backend: Backend = "shm"
    """What carries sums and hidden states."""
    control: Backend = "shm"
    """What carries everything else."""
    senders: tuple[int, ...] = ()
    """The ranks whose slices make up a block, where they have pools of their own; () = all share one pool."""
    hosts: int = 1
    """Hosts of the ranks, the same number on each, neighbours on one. Groups of more than one host have no memory in
    common: gloo stands in for shm there."""
    has_adapters: bool = False
    """Whether the ranks read adapters."""

    def __post_init__(self) -> None:
        if self.num_ranks % self.hosts:
            raise ConfigError(
                f"group_hosts is {self.hosts}, which does not divide {self.num_ranks} ranks",
                field="group_hosts",
                value=self.hosts,
                limit=self.num_ranks,
            )

    @property
    def num_ranks(self) -> int:
        """Processes."""
        return self.tensor * self.pipeline

    def ranks_of(self, host: int) -> range:
        """The ranks on one host."""
        each = self.num_ranks // self.hosts
        return range(host * each, (host + 1) * each)

    def host_of(self, rank: int) -> int:
        """The number of a rank's host within the group."""
        return rank // (self.num_ranks // self.hosts)

    @property
    def memberships(self) -> list[Membership]:
        """Every group, in the order in which ranks join them; a rank joins those that it is in."""
        everyone = tuple(range(self.num_ranks))
        control = self._reaching(everyone, self.control)
        groups = [Membership("everyone", everyone, control)]
        if self.senders:
            groups.append(Membership("blocks", everyone, control))
            if 1 < len(self.senders) < self.num_ranks:
                groups.append(Membership("slices", self.senders, self._reaching(self.senders, self.control)))
        if self.has_adapters:
            groups.append(Membership("adapters", everyone, control))
        known = {everyone} if self._reaching(everyone, self.backend) == control else set()
        for ranks in dict.fromkeys(self._sums):
            if ranks not in known:
                groups.append(Membership(f"sums {ranks}", ranks, self._reaching(ranks, self.backend)))
        return groups

    def _reaching(self, ranks: tuple[int, ...], backend: Backend) -> Backend:
        """What connects these ranks, by what would on one host."""
        spans_hosts = self.host_of(ranks[0]) != self.host_of(ranks[-1])
        return "gloo" if backend == "shm" and spans_hosts else backend

    @property
    def _sums(self) -> list[tuple[int, ...]]:
        """With several stages each stage, the head, and each pair of neighbours."""
        everyone = tuple(range(self.num_ranks))
        if self.pipeline == 1:
            return [everyone]
        stages = [everyone[first : first + self.tensor] for first in range(0, len(everyone), self.tensor)]
        pairs = [(rank, rank + self.tensor) for rank in everyone[: -self.tensor]]
        return [*(stages if self.tensor > 1 else []), (0, *stages[-1]), *pairs]

    def join(self, rank: int, connect: Callable[[Membership], Collectives]) -> RankLinks:
        """This rank's links: `connect` joins one group after the other, and returns when all its ranks have. Raises
        RankLost."""
        joined = {group: connect(group) for group in self.memberships if rank in group.ranks}
        named = {group.name: links for group, links in joined.items()}
        apart = ("blocks", "slices", "adapters")
        of_sums = {group.ranks: links for group, links in joined.items() if group.name not in apart}
        # A group for sums alone comes behind the one of the same ranks for plans, and takes its place.
        everyone, blocks, adapters = named["everyone"], named.get("blocks"), named.get("adapters")
        on_device = self.backend == "nccl"
        slices = blocks if len(self.senders) == self.num_ranks else named.get("slices")
        if self.pipeline == 1:
            whole = of_sums[tuple(range(self.num_ranks))]
            return RankLinks(everyone, whole, whole, None, None, blocks, slices, adapters, on_device)
        tensor, first = self.tensor, rank - rank % self.tensor
        last_stage = range(tensor * (self.pipeline - 1), tensor * self.pipeline)
        return RankLinks(
            everyone,
            of_sums.get(tuple(range(first, first + tensor))) if tensor > 1 else None,
            of_sums.get((0, *last_stage)),
            of_sums.get((rank - tensor, rank)),
            of_sums.get((rank, rank + tensor)),
            blocks,
            slices,
            adapters,
            on_device,
        )
