"""A follower's side of its leader's whole blocks: a thread that gives and takes this rank's slices beside the steps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from shared.collectives.interface import Collectives
from shared.collectives.rank_links import RankLinks
from shared.engine.group.own_slices import MOST_ROWS, OwnSlices, SliceForm
from shared.engine.runner.device_link import DeviceLink
from shared.engine.runner.pool_memory import HostArena
from shared.errors import RankLost

_HEAD = 3
logger = logging.getLogger(__name__)


class SliceAction(IntEnum):
    """The exchange that follows a command."""

    END = 0
    """No exchange: the server ends."""
    READ = 1
    """The senders' rows are gathered."""
    WRITE = 2
    """Rows are scattered to all ranks; each answers when it has stored its own."""
    SUMS = 3
    """The senders' parts of checksums are gathered."""


@dataclass(frozen=True, slots=True)
class SliceCommand:
    """One command; at most MOST_ROWS blocks."""

    action: SliceAction
    block_ids: Sequence[int] = ()
    num_runs: int = 0
    """Plans with host copies that went before: a follower obeys when it has begun theirs."""

    def send(self, blocks: Collectives) -> None:
        """Sends the command from the leader to all ranks. Raises RankLost."""
        frame = [int(self.action), self.num_runs, len(self.block_ids), *self.block_ids]
        blocks.broadcast(torch.tensor(frame + [0] * (_HEAD + MOST_ROWS - len(frame)), dtype=torch.int64))

    @classmethod
    def receive(cls, blocks: Collectives) -> SliceCommand:
        """Waits for the next one. Raises RankLost."""
        frame = torch.zeros(_HEAD + MOST_ROWS, dtype=torch.int64)
        blocks.broadcast(frame)
        action, num_runs, count, *block_ids = frame.tolist()
        return cls(SliceAction(action), tuple(block_ids[:count]), num_runs)


class SliceServer:
    """Obeys the leader's `SlicedBlocks` until that ends it.

    The two share no order with the steps but this: a block that a plan copied to or from host memory may be named in a
    command right behind that plan, so a command waits until this rank has begun the same copies. Blocks that a step
    wrote are named when the leader has the step's result, which every rank has added to behind its last write.
    """

    def __init__(
        self, form: SliceForm, links: RankLinks, kv_blocks: Tensor, link: DeviceLink, arena: HostArena | None
    ) -> None:
        """`kv_blocks`, `link` and `arena`: of this rank's runner."""
        assert links.blocks is not None, "the ranks share one pool"
        self._links = links
        self._group = links.blocks
        self._link = link
        self._arena = arena
        self._own = OwnSlices(form, links.blocks.rank, kv_blocks, link)
        self._thread = threading.Thread(target=self._run, name="slices", daemon=True)

    def start(self) -> None:
        """Starts to carry out commands."""
        self._thread.start()

    def join(self) -> None:
        """Waits until the leader has ended it, or is lost."""
        self._thread.join()

    def _run(self) -> None:
        self._link.bind_thread()
        try:
            while (command := SliceCommand.receive(self._group)).action is not SliceAction.END:
                self._obey(command)
        except RankLost as error:
            logger.debug("no more blocks pass: %s", error)  # the steps fail with an error of their own
        except Exception:
            logger.exception("a slice of a block could not be read or written")
            self._links.fail(self._group.rank)

    def _obey(self, command: SliceCommand) -> None:
        if self._arena is not None:
            self._arena.wait_for_run(command.num_runs)
        own, block_ids = self._own, command.block_ids
        match command.action:
            case SliceAction.READ if self._links.slices is not None:
                self._links.slices.gather(own.read(block_ids))
            case SliceAction.SUMS if self._links.slices is not None:
                self._links.slices.gather(own.sums(block_ids))
            case SliceAction.WRITE:
                rows = own.rows[: len(block_ids)]
                self._group.scatter(None, rows)
                own.write(block_ids, rows)
                self._group.gather(torch.zeros(1))
