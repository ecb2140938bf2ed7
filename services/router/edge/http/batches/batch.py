"""One batch on disk: its state, the lines of its input, and the answers that it has, one a line."""

from __future__ import annotations

import json
import shutil
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from services.router.edge.http.batches.files import write_whole
from shared.errors import brief

MAX_ERRORS = 100
"""Most errors of an input file that a batch lists."""
MAX_CUSTOM_ID_LEN = 256
ENDED = ("completed", "failed", "expired", "cancelled")


@dataclass(frozen=True, slots=True)
class BatchState:
    """A batch's state as it is kept on disk. Times in seconds since 1970."""

    id: str
    tenant: str
    account: str
    """Account whose rate limits its lines count towards."""
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: str = "validating"
    metadata: Mapping[str, str] = field(default_factory=dict)
    errors: tuple[Mapping[str, object], ...] = ()
    total: int = 0
    output_file_id: str = ""
    """Set before the file is written; empty for none. The same holds for `error_file_id`."""
    error_file_id: str = ""
    ends_as: str = ""
    """The last status, known once the batch's files are to be written."""
    times: Mapping[str, int] = field(default_factory=dict)
    """When each status began, by the name of the `…_at` member."""

    @property
    def is_ended(self) -> bool:
        """Whether the status is one of ENDED, after which it stays."""
        return self.status in ENDED

    def at(self, status: str, now: int, **changes: Any) -> BatchState:
        """The state with another status, which begins `now`."""
        return replace(self, status=status, times={f"{status}_at": now, **self.times}, **changes)

    def body(self, num_completed: int, num_failed: int) -> dict[str, object]:
        """OpenAI's `batch` object."""
        names = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        errors = {"object": "list", "data": [dict(error) for error in self.errors]} if self.errors else None
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": errors,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id if self.is_ended and self.output_file_id else None,
            "error_file_id": self.error_file_id if self.is_ended and self.error_file_id else None,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{name}_at": self.times.get(f"{name}_at") for name in names},
            "request_counts": {"total": self.total, "completed": num_completed, "failed": num_failed},
            "metadata": dict(self.metadata),
        }


@dataclass(frozen=True, slots=True)
class _Place:
    offset: int
    length: int
    ok: bool


class Answers:
    """The answers of one batch by the number of their line, in a file that only grows. A line is written once, by one
    write; what a death cut off is dropped when the file is opened again. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        """Opens the file, or makes it, and reads the answers in it."""
        self._places: dict[int, _Place] = {}
        self._file: BinaryIO = path.open("a+b", buffering=0)
        self._end = 0
        self.num_ok = 0
        """Number of answers without an error."""
        self._file.seek(0)
        with path.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                entry = json.loads(line)
                self._note(entry["n"], len(line), entry["ok"])
        self._file.truncate(self._end)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, number: object) -> bool:
        return number in self._places

    def add(self, number: int, line: Mapping[str, object], *, ok: bool) -> None:
        """Writes the one answer of a line; nothing after `close`: the line is answered when the batch is resumed."""
        if self._file.closed:
            return
        assert number not in self._places, f"line {number} is answered already"
        data = json.dumps({"n": number, "ok": ok, "line": line}).encode() + b"\n"
        written = self._file.write(data)
        assert written == len(data), "the disk is full"
        self._note(number, len(data), ok)

    def lines(self, *, ok: bool) -> Iterator[bytes]:
        """Answers with or without an error, in the order of their lines, as the batch's files have them."""
        for number in sorted(self._places):
            place = self._places[number]
            if place.ok is ok:
                self._file.seek(place.offset)
                yield json.dumps(json.loads(self._file.read(place.length))["line"]).encode() + b"\n"

    def close(self) -> None:
        """Twice is fine."""
        self._file.close()

    def _note(self, number: int, length: int, ok: bool) -> None:
        self._places[number] = _Place(self._end, length, ok)
        self._end += length
        self.num_ok += ok


class Batch:
    """One batch and its folder. All methods do I/O, the properties none. Not thread-safe, except `body`."""

    def __init__(self, folder: Path, state: BatchState) -> None:
        self.state = state
        self._folder = folder
        self._offsets = array("Q")
        self.answers: Answers | None = None
        """Open while the batch runs."""
        self._counts = (0, 0)

    @classmethod
    def read(cls, folder: Path) -> Batch:
        """A batch from its folder."""
        content = json.loads((folder / "state.json").read_text())
        counts = tuple(content.pop("counts"))
        content["errors"] = tuple(content["errors"])
        batch = cls(folder, BatchState(**content))
        batch._counts = (counts[0], counts[1])
        return batch

    @property
    def body(self) -> dict[str, object]:
        """OpenAI's `batch` object."""
        self._count()
        return self.state.body(*self._counts)

    def write(self, state: BatchState) -> None:
        """The next state, written to disk before `state` changes."""
        self._count()
        self._folder.mkdir(parents=True, exist_ok=True)
        write_whole(self._folder / "state.json", {**asdict(state), "counts": self._counts})
        self.state = state

    def open(self, data: Path, max_line_bytes: int, max_lines: int) -> list[dict[str, object]]:
        """Finds the lines of the input. Returns at most MAX_ERRORS errors; opens the answers if there are none."""
        errors: list[dict[str, object]] = []
        known: set[str] = set()
        offsets, offset = array("Q"), 0
        with data.open("rb") as lines:
            for number in range(max_lines + 1):
                line = lines.readline(max_line_bytes + 2)
                if not line:
                    break
                if number == max_lines:
                    errors.append(_error("too_many_tasks", f"the file has more than {max_lines} lines", None, number))
                    break
                if len(line) > max_line_bytes + 1:
                    errors.append(_error("too_long", f"a line is longer than {max_line_bytes} bytes", None, number))
                    break
                offsets.append(offset)
                offset += len(line)
                wrong = _fault(line, self.state.endpoint, known)
                if wrong is not None:
                    errors.append(_error(*wrong, number))
                    if len(errors) == MAX_ERRORS:
                        break
        if not offsets and not errors:
            errors.append(_error("empty_file", "the file has no lines", None, 0))
        offsets.append(offset)
        self._offsets = offsets
        if not errors:
            self.answers = Answers(self._folder / "answers.jsonl")
        return errors

    @property
    def num_lines(self) -> int:
        """Lines of the input; valid after `open`."""
        return len(self._offsets) - 1

    def line(self, data: Path, number: int) -> dict[str, Any]:
        """One line of the input."""
        with data.open("rb") as lines:
            lines.seek(self._offsets[number])
            found: dict[str, Any] = json.loads(lines.read(self._offsets[number + 1] - self._offsets[number]))
        return found

    def collect(self, *, ok: bool) -> Path | None:
        """Writes the answers with or without an error to a file; None where there are none."""
        assert self.answers is not None
        path, num_lines = self._folder / ("output.part" if ok else "errors.part"), 0
        with path.open("wb") as out:
            for line in self.answers.lines(ok=ok):
                out.write(line)
                num_lines += 1
        return path if num_lines else None

    def close(self) -> None:
        """Closes its files; twice is fine."""
        self._count()
        if self.answers is not None:
            self.answers.close()
            self.answers = None

    def drop_answers(self) -> None:
        """Removes the answers, once the batch's two files have them."""
        self.close()
        (self._folder / "answers.jsonl").unlink(missing_ok=True)

    def remove(self) -> None:
        """Removes the batch's folder."""
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _count(self) -> None:
        """Notes the numbers of answers, which are wanted after the answers are closed too."""
        answers = self.answers  # another thread may close them meanwhile
        if answers is not None:
            self._counts = (answers.num_ok, len(answers) - answers.num_ok)


def _fault(line: bytes, endpoint: str, known: set[str]) -> tuple[str, str, str | None] | None:
    """Code, message and member of what is wrong with a line."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return "invalid_json_line", "the line is no JSON", None
    if not isinstance(content, dict):
        return "invalid_json_line", "the line must be a JSON object", None
    custom_id = content.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID_LEN:
        return "invalid_custom_id", f"custom_id must be a text of 1 to {MAX_CUSTOM_ID_LEN} characters", "custom_id"
    if custom_id in known:
        return "duplicate_custom_id", f"custom_id {brief(custom_id, 80)!r} stands twice", "custom_id"
    known.add(custom_id)
    if content.get("method") != "POST":
        return "invalid_method", "method must be POST", "method"
    if content.get("url") != endpoint:
        return "mismatched_endpoint", f"url must be {endpoint}, the batch's endpoint", "url"
    if not isinstance(content.get("body"), dict):
        return "invalid_request", "body must be a JSON object", "body"
    if content["body"].get("stream") or content["body"].get("background"):
        return "invalid_request", "a batch's answers are whole: body has stream or background", "body"
    return None


def _error(code: str, message: str, param: str | None, number: int) -> dict[str, object]:
    return {"code": code, "message": message, "param": param, "line": number + 1}
