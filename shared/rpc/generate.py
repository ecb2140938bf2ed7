"""Generates the protobuf and gRPC stubs from `proto/` into `shared/rpc/pb/` (what `make proto` runs).

protoc writes imports relative to the proto root (`from tandem.v1 import types_pb2`); ours live under
`shared.rpc.pb`, so that no second top-level package exists, and the imports are rewritten to say so.
"""

from __future__ import annotations

import re
import shutil
import sys
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "shared" / "rpc" / "pb"
_IMPORT = re.compile(r"^(from|import) tandem\.v1", re.MULTILINE)


def generate() -> list[Path]:
    """Writes all stubs anew and returns their paths; raises SystemExit with protoc's status on a bad proto."""
    from grpc_tools import protoc  # a development dependency: not needed to serve

    protos = sorted((ROOT / "proto").rglob("*.proto"))
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    well_known = str(files("grpc_tools") / "_proto")
    plugins = Path(sys.executable).parent
    arguments = [
        "protoc",
        f"-I{ROOT / 'proto'}",
        f"-I{well_known}",
        f"--plugin=protoc-gen-mypy={plugins / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={plugins / 'protoc-gen-mypy_grpc'}",
        f"--python_out={OUT}",
        f"--grpc_python_out={OUT}",
        f"--mypy_out=quiet:{OUT}",
        f"--mypy_grpc_out=quiet:{OUT}",
        *map(str, protos),
    ]
    status = protoc.main(arguments)
    if status != 0:
        raise SystemExit(status)
    for folder in (OUT, OUT / "tandem", OUT / "tandem" / "v1"):
        (folder / "__init__.py").write_text('"""Generated from proto/ by `make proto`; not edited by hand."""\n')
    written = sorted(OUT.rglob("*_pb2*.py*"))
    for path in written:
        path.write_text(_IMPORT.sub(r"\1 shared.rpc.pb.tandem.v1", path.read_text()))
    return written


if __name__ == "__main__":
    for stub in generate():
        print(stub.relative_to(ROOT))
