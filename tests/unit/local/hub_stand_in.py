"""A Hub of one model: the routes, headers and refusals that its client depends on, over real HTTP."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "c0ffee" + "0" * 34
TOKEN = "hf_let-me-in"


class HubStandIn:
    """Serves a folder as ORG/NAME on main and v1, gated as ORG/gated; remembers what was asked."""

    def __init__(self, folder: Path, repo: str = "org/demo") -> None:
        self.files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        self.repo = repo
        self.break_once: dict[str, int] = {}
        """File → bytes after which its first download breaks off."""
        self.gets: list[tuple[str, str]] = []
        """(file, Range header) of each download."""

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Its address, for HF_ENDPOINT."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def answer(self, call: BaseHTTPRequestHandler, *, body: bool) -> None:
        path = call.path.partition("?")[0].strip("/").split("/")
        if path[:2] == ["api", "models"]:
            self._api(call, "/".join(path[2:4]), path[4:])
        elif len(path) < 5:
            _refuse(call, 404, "EntryNotFound")
        else:
            self._file(call, "/".join(path[:2]), path[3], "/".join(path[4:]), body=body)

    def _api(self, call: BaseHTTPRequestHandler, repo: str, rest: list[str]) -> None:
        if not self._allowed(call, repo):
            return
        revision = rest[1] if len(rest) > 1 else "main"
        if revision not in ("main", "v1", COMMIT):
            _refuse(call, 404, "RevisionNotFound")
            return
        if rest[:1] == ["tree"]:
            _json(call, [self._entry(name) for name in self.files])
        else:
            _json(call, {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in self.files]})

    def _entry(self, name: str) -> dict[str, Any]:
        content = self.files[name]
        entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": _oid(content)}
        if name.endswith(".safetensors"):
            sha = hashlib.sha256(content).hexdigest()
            entry["lfs"] = {"oid": sha, "size": len(content), "pointerSize": 134}
        return entry

    def _file(self, call: BaseHTTPRequestHandler, repo: str, revision: str, name: str, *, body: bool) -> None:
        if not self._allowed(call, repo):
            return
        content = self.files.get(name)
        if content is None or revision not in ("main", "v1", COMMIT):
            _refuse(call, 404, "EntryNotFound")
            return
        wanted = call.headers.get("Range", "")
        begin = int(wanted.removeprefix("bytes=").split("-")[0]) if wanted else 0
        call.send_response(206 if wanted else 200)
        call.send_header("ETag", f'"{self._etag(name)}"')
        call.send_header("X-Repo-Commit", COMMIT)
        call.send_header("Accept-Ranges", "bytes")
        call.send_header("Content-Length", str(len(content) - begin))
        if wanted:
            call.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        call.end_headers()
        if not body:
            return
        self.gets.append((name, wanted))
        if (limit := self.break_once.pop(name, None)) is not None:
            call.close_connection = True
        call.wfile.write(content[begin:limit])

    def _etag(self, name: str) -> str:
        content = self.files[name]
        return hashlib.sha256(content).hexdigest() if name.endswith(".safetensors") else _oid(content)

    def _allowed(self, call: BaseHTTPRequestHandler, repo: str) -> bool:
        if repo == self.repo:
            return True
        if repo != "org/gated":
            _refuse(call, 401, "RepoNotFound")  # as the Hub answers a call without a token
            return False
        if call.headers.get("Authorization") == f"Bearer {TOKEN}":
            return True
        _refuse(call, 401, "GatedRepo")
        return False


def _oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _json(call: BaseHTTPRequestHandler, value: object) -> None:
    content = json.dumps(value).encode()
    call.send_response(200)
    call.send_header("Content-Type", "application/json")
    call.send_header("Content-Length", str(len(content)))
    call.end_headers()
    call.wfile.write(content)


def _refuse(call: BaseHTTPRequestHandler, status: int, code: str) -> None:
    call.send_response(status)
    call.send_header("X-Error-Code", code)
    call.send_header("Content-Length", "0")
    call.end_headers()
