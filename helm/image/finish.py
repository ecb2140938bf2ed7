"""The last step of the image's build: what lies deep in packages gets a short path."""

from __future__ import annotations

import compileall
import sysconfig
from pathlib import Path

from services.kvstore.embedded import find_valkey_server
from services.local.spec import DEMO_MODEL

HOME = Path("/opt/tandem")


def main() -> None:
    """Links the demo model and the Valkey server, and compiles our code, which a running container cannot do."""
    (HOME / "models").mkdir()
    (HOME / "models/demo").symlink_to(DEMO_MODEL)
    server = find_valkey_server()
    server.chmod(0o755)
    (HOME / "bin/valkey-server").symlink_to(server)
    packages = Path(sysconfig.get_path("purelib"))
    for name in ("services", "shared", "tandem", "tandem_cli", "loadtest"):
        compileall.compile_dir(packages / name, quiet=1)


if __name__ == "__main__":
    main()
