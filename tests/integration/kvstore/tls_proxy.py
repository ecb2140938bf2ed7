"""TLS in front of a plain server, as stunnel or a load balancer does it, with a certificate made on the spot."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
from pathlib import Path
from types import TracebackType


class TlsProxy:
    """Entered, it listens on `port` and hands what it decrypts to a unix socket."""

    def __init__(self, folder: Path, socket_path: str) -> None:
        self.certificate = folder / "cert.pem"
        self._key = folder / "key.pem"
        self._socket_path = socket_path
        self._server: asyncio.Server | None = None
        self._links: set[asyncio.Task[None]] = set()
        self.port = 0

    async def __aenter__(self) -> TlsProxy:
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
        command += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(self._key), "-out", str(self.certificate)]
        await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self._key)
        self._server = await asyncio.start_server(self._link, "127.0.0.1", 0, ssl=context)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for link in self._links:
            link.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)

    async def _link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._links.add(task)
        with contextlib.suppress(asyncio.CancelledError), contextlib.closing(writer):
            inner_reader, inner_writer = await asyncio.open_unix_connection(self._socket_path)
            try:
                await asyncio.gather(_copy(reader, inner_writer), _copy(inner_reader, writer))
            finally:
                for end in (writer, inner_writer):
                    end.close()
                    with contextlib.suppress(OSError):
                        await end.wait_closed()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.close()
