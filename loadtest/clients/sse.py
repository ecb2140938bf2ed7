"""Server-sent events (WHATWG HTML, section 9.2), as far as the OpenAI API uses them: only the data of each event."""

from __future__ import annotations


class EventParser:
    """Splits a byte stream into events, for any chunking."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of the events that `chunk` completes; comments and other fields are dropped."""
        if (
            chunk.startswith(b"data: ")
            and chunk.endswith(b"\n\n")
            and chunk.find(b"\n") == len(chunk) - 2
            and not (self._rest or self._data)
        ):
            # Fast path: servers send one event at a time, and networks seldom split it.
            return [chunk[6:-2]]
        lines = (self._rest + chunk).split(b"\n")
        self._rest = lines.pop()
        events = []
        for line in lines:
            if line.endswith(b"\r"):
                line = line[:-1]
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
        return events
