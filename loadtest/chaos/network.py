"""A network namespace for each part, joined by ours, which forwards between them and can cut any two apart.

Ours is a namespace of its own too, and so is the list of the named ones: nothing of this is seen outside, and all of it
goes with the last process in it. What is cut is dropped without a word on its way through ours (`ip rule … blackhole`):
neither side sees more than silence. Our own traffic with the parts, that of clients and of the supervisor, continues.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from services.local.places import INDEX
from shared.errors import ConfigError

_FOLDER = Path("/run/netns")
_FIRST_PORT = 7000
_NO_COPIES = "UCX_TLS=^cma"
"""Keeps UCX from reading another part's memory, which no network carries."""
_OUTER = "TANDEM_CHAOS_OUTER_NETWORK"
"""Variable that names the namespace from which this process was started again."""


def enter(module: str) -> None:
    """Runs `python -m module` again, with this process's arguments, in namespaces of its own. Returns where this
    process is in such. Raises ConfigError (`only`) where that is not permitted."""
    own = os.readlink("/proc/self/ns/net")
    if os.environ.get(_OUTER, own) != own:
        _run("ip", "link", "set", "lo", "up")
        return
    if reason := not_permitted():
        raise ConfigError(f"partitions need network namespaces: {reason}", field="only")
    command = ["unshare", "--net", "--mount", sys.executable, "-m", module, *sys.argv[1:]]
    os.execvpe(command[0], command, {**os.environ, _OUTER: own})


def not_permitted() -> str:
    """Why there can be no namespaces here; empty where there can."""
    for program in ("ip", "unshare", "nsenter"):
        if shutil.which(program) is None:
            return f"there is no `{program}` (Debian: iproute2, util-linux)"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "ip", "link", "set", "lo", "up"], capture_output=True, text=True, check=False
    )
    return tried.stderr.strip() if tried.returncode else ""


class Network:
    """The parts' namespaces; implements `Places`. Part number n has the address 10.77.n.2. Call `enter` first."""

    on_loopback = False

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._num_ports = 0
        self._cuts: list[str] = []

    def open(self) -> None:
        """Makes ours forward."""
        _FOLDER.mkdir(parents=True, exist_ok=True)
        if not _FOLDER.is_mount():
            _run("mount", "-t", "tmpfs", "tmpfs", str(_FOLDER))
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")

    def reserve_index(self) -> str:
        """See `Places`."""
        return self.reserve(INDEX)

    def reserve(self, part: str, bind: str = "") -> str:  # noqa: ARG002 - a namespace of its own has every port
        """See `Places`."""
        self._num_ports += 1
        return f"{self.address(part)}:{_FIRST_PORT + self._num_ports}"

    def command(self, part: str, command: Sequence[str]) -> Sequence[str]:
        """See `Places`."""
        self.address(part)
        return [str(shutil.which("nsenter")), f"--net={_FOLDER / part}", "--", "env", _NO_COPIES, *command]

    def address(self, part: str) -> str:
        """The part's IP address; makes its namespace at the first call."""
        if part not in self._numbers:
            self._numbers[part] = len(self._numbers) + 1
            self._add(part, self._numbers[part])
        return f"10.77.{self._numbers[part]}.2"

    def num_forwarded_bytes(self, part: str) -> int:
        """What the part has sent into the network."""
        device = f"part{self._numbers[part]}"
        shown = subprocess.run(
            ["ip", "-statistics", "link", "show", device], capture_output=True, text=True, check=True
        )
        return int(shown.stdout.split("RX:")[1].splitlines()[1].split()[0])

    def cut(self, sides: Iterable[tuple[str, str]], *, both_ways: bool) -> None:
        """What the first part of each pair sends to the second is lost from now on, and the reverse `both_ways`."""
        pairs = [(self.address(sender), self.address(receiver)) for sender, receiver in sides]
        pairs += [(receiver, sender) for sender, receiver in pairs] if both_ways else []
        self._cuts = [f"from {sender} to {receiver} blackhole" for sender, receiver in dict.fromkeys(pairs)]
        _batch(f"rule add {cut}" for cut in self._cuts)

    def heal(self) -> None:
        """Lets all parts reach each other again."""
        cuts, self._cuts = self._cuts, []
        _batch(f"rule del {cut}" for cut in cuts)

    def close(self) -> None:
        """See `Places`: removes the parts' namespaces."""
        self.heal()
        for part, number in self._numbers.items():
            _run("ip", "link", "del", f"part{number}")  # the namespace's end would take it away later
            _run("ip", "netns", "del", part)
        self._numbers.clear()

    def _add(self, part: str, number: int) -> None:
        own, gateway, device = f"10.77.{number}.2/24", f"10.77.{number}.1", f"part{number}"
        _run("ip", "netns", "add", part)
        _batch(
            (
                f"link add {device} type veth peer name eth0 netns {part}",
                f"address add {gateway}/24 dev {device}",
                f"link set {device} up",
            )
        )
        _batch(
            ("link set lo up", f"address add {own} dev eth0", "link set eth0 up", f"route add default via {gateway}"),
            "-netns",
            part,
        )


def _batch(lines: Iterable[str], *options: str) -> None:
    """Runs all lines in one process, so that they take effect at nearly the same time."""
    _run("ip", *options, "-batch", "-", text="".join(f"{line}\n" for line in lines))


def _run(*command: str, text: str = "") -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}", field="network")
