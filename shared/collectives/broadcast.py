"""Messages of any length from a group's first rank to all others."""

from __future__ import annotations

import numpy as np
import torch

from shared.collectives.interface import Collectives

FRAME_BYTES = 8192
"""The first part of every message, its length included: most are no longer."""
_LENGTH_BYTES = 8


def broadcast_bytes(group: Collectives, message: bytes | None = None) -> bytes:
    """Rank 0's `message`, on every rank; the others give None. One broadcast, two beyond a frame. Raises RankLost."""
    frame = np.zeros(FRAME_BYTES, dtype=np.uint8)
    if message is not None:
        first = message[: FRAME_BYTES - _LENGTH_BYTES]
        frame[:_LENGTH_BYTES].view(np.int64)[0] = len(message)
        frame[_LENGTH_BYTES : _LENGTH_BYTES + len(first)] = np.frombuffer(first, dtype=np.uint8)
    group.broadcast(torch.from_numpy(frame))
    length = int(frame[:_LENGTH_BYTES].view(np.int64)[0])
    content = frame[_LENGTH_BYTES:].tobytes()
    if length > len(content):
        rest = np.zeros(length - len(content), dtype=np.uint8)
        if message is not None:
            rest[:] = np.frombuffer(message[len(content) :], dtype=np.uint8)
        group.broadcast(torch.from_numpy(rest))
        content += rest.tobytes()
    return content[:length]
