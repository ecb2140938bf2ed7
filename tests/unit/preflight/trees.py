"""Written /dev, /proc and /sys trees: machines with hardware that the test's own lacks."""

from __future__ import annotations

from pathlib import Path

from services.preflight.machine import Machine


def write(root: Path, **files: str) -> Machine:
    """A machine whose files are these, `dev__shm` standing for /dev/shm."""
    for name, content in files.items():
        add(root, "/" + name.replace("__", "/"), content)
    return Machine(root)


def add(root: Path, path: str, content: str) -> None:
    """One more file."""
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content + "\n")


def add_rdma_device(
    root: Path,
    name: str = "mlx5_0",
    *,
    layer: str = "InfiniBand",
    state: str = "4: ACTIVE",
    rate: str = "400 Gb/sec (4X NDR)",
    gid: str = "fe80:0000:0000:0000:0002:c903:00a0:0001",
    driver: str = "mlx5_core",
    uverbs: str = "uverbs0",
) -> None:
    """A device with one port, as the kernel shows it."""
    device = f"/sys/class/infiniband/{name}"
    for file, content in (("state", state), ("link_layer", layer), ("rate", rate), ("gids/0", gid)):
        add(root, f"{device}/ports/1/{file}", content)
    add(root, f"/sys/bus/drivers/{driver}/uevent", "")
    (root / device.lstrip("/") / "device").mkdir()
    (root / device.lstrip("/") / "device/driver").symlink_to(root / f"sys/bus/drivers/{driver}")
    add(root, f"/sys/class/infiniband_verbs/{uverbs}/ibdev", name)
    add(root, f"/dev/infiniband/{uverbs}", "")
