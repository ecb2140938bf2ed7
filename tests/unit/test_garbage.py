"""Where no collection looks for garbage."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys

from shared.garbage import uncollected

COUNTED = """
import gc
collections = []
gc.callbacks.append(lambda phase, info: collections.append(phase))
{begin}
    import decimal, email.message, json, statistics, uuid, xml.dom.minidom
print(len(collections), gc.isenabled(), gc.get_freeze_count() > 1000)
"""


def counted(begin: str) -> list[str]:
    """Collections while modules are imported, and the collector's state after."""
    program = COUNTED.format(begin=begin)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return ran.stdout.split()


def test_imports_within_cause_no_collection_and_what_they_allocate_stays_out_of_later_ones():
    num_otherwise, *_ = counted("if True:")
    assert int(num_otherwise) > 0
    assert counted("from shared.garbage import uncollected\ncollections.clear()\nwith uncollected():") == [
        "0", "True", "True",
    ]  # fmt: skip


def test_collections_go_on_after_an_error():
    with contextlib.suppress(ImportError), uncollected():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
