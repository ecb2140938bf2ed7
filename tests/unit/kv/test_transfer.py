"""Tags, and the addresses of the UCX plane."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import TransferFailed
from shared.kv.transfer import TICKET_BITS, TRAILER_INDEX, new_ticket, tag
from shared.kv.ucx.peer_address import HOST_ID_BYTES, PeerAddress, process_started, this_host

tickets = st.integers(0, (1 << TICKET_BITS) - 1)
indexes = st.integers(0, TRAILER_INDEX)
addresses = st.builds(
    PeerAddress,
    host=st.binary(min_size=HOST_ID_BYTES, max_size=HOST_ID_BYTES),
    pid=st.integers(1, (1 << 22) - 1),
    started=st.integers(0, (1 << 64) - 1),
    worker=st.binary(min_size=1, max_size=300),
)


@given(tickets, indexes, tickets, indexes)
def test_tags_are_equal_only_where_ticket_and_index_are(t1: int, i1: int, t2: int, i2: int) -> None:
    assert (tag(t1, i1) == tag(t2, i2)) == ((t1, i1) == (t2, i2))
    assert 0 <= tag(t1, i1) < 1 << 64


@pytest.mark.parametrize(("ticket", "index"), [(1 << TICKET_BITS, 0), (-1, 0), (0, TRAILER_INDEX + 1), (0, -1)])
def test_a_tag_out_of_range_is_a_bug(ticket: int, index: int) -> None:
    with pytest.raises(AssertionError):
        tag(ticket, index)


def test_tickets_do_not_repeat() -> None:
    assert len({new_ticket() for _ in range(1000)}) == 1000


@given(addresses)
def test_an_address_survives_encoding(address: PeerAddress) -> None:
    assert PeerAddress.decode(address.encode()) == address


@given(addresses, st.data())
def test_a_damaged_address_is_refused(address: PeerAddress, data: st.DataObject) -> None:
    encoded = bytearray(address.encode())
    if data.draw(st.booleans()):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    else:
        del encoded[data.draw(st.integers(0, len(encoded) - 1)) :]
    with pytest.raises(TransferFailed):
        PeerAddress.decode(bytes(encoded))


def test_processes_of_one_host_agree_on_it() -> None:
    program = "from shared.kv.ucx.peer_address import this_host; print(this_host().hex())"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True)
    assert other.stdout.strip() == this_host().hex()
    assert len(this_host()) == HOST_ID_BYTES


@pytest.mark.parametrize("namespace", ["--net", "--ipc"])
def test_processes_of_different_namespaces_are_on_different_hosts(namespace: str) -> None:
    program = "from shared.kv.ucx.peer_address import this_host; print(this_host().hex())"
    command = ["unshare", namespace, sys.executable, "-c", program]
    if shutil.which("unshare") is None or subprocess.run(["unshare", namespace, "true"], check=False).returncode:
        pytest.skip("namespaces of one's own are not permitted here")
    other = subprocess.run(command, capture_output=True, check=True, text=True)
    assert other.stdout.strip() != this_host().hex()


def test_the_start_time_tells_processes_apart() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert process_started(os.getpid()) < process_started(child.pid)
    child.communicate(b"\n")
    with pytest.raises(ProcessLookupError):
        process_started(child.pid)


def test_importing_the_interface_does_not_open_ucx() -> None:
    program = "import sys, shared.kv.ucx; sys.exit('ucxx' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
