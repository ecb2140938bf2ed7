"""Certificates for tests, made by the openssl command."""

from __future__ import annotations

import subprocess
from pathlib import Path


class Authority:
    """Signs certificates for 127.0.0.1 and localhost; all files lie in `folder`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self.key = folder / f"{name}.key"
        self.cert = folder / f"{name}.pem"
        self._run(
            "req", "-x509", *_NEW_KEY, "-keyout", self.key, "-out", self.cert, "-days", "2", "-subj", f"/CN={name}",
            "-addext", "keyUsage=critical,keyCertSign,cRLSign",
        )  # fmt: skip

    def issue(self, name: str, names: str = "IP:127.0.0.1,DNS:localhost") -> tuple[Path, Path]:
        """(certificate, key) of a server and client of that name, which is reached by `names`."""
        key, request, cert = (self._folder / f"{name}.{suffix}" for suffix in ("key", "csr", "pem"))
        extensions = self._folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName={names}\nauthorityKeyIdentifier=keyid\n")
        self._run("req", "-new", *_NEW_KEY, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        self._run(
            "x509", "-req", "-in", request, "-CA", self.cert, "-CAkey", self.key, "-CAcreateserial", "-out", cert,
            "-days", "2", "-extfile", extensions,
        )  # fmt: skip
        return cert, key

    def settings(self, name: str) -> dict[str, str]:
        """`tls` of a service that trusts this authority."""
        cert, key = self.issue(name)
        return {"cert": str(cert), "key": str(key), "ca": str(self.cert)}

    def _run(self, *arguments: object) -> None:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
