"""What holds for every test."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import os
from collections.abc import Awaitable, Callable, Iterator

import pytest
from hypothesis import settings

from shared.garbage import uncollected
from shared.kernels.cpu import build, isa
from tests.examples import examples
from tests.order import begun_in_order, scope_of

# Test processes share the cores out (`make test`); torch in each would take them all and wait for its own threads.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    _cores = len(os.sched_getaffinity(0)) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _cores)))

# How long an example takes says more about the machine's other work than about the code; pytest's timeout is the limit.
settings.register_profile("tandem", examples(100), deadline=None)
# A build server judges the change, not the luck of a draw; everywhere else each run draws new examples.
settings.register_profile("ci", examples(100), deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "tandem")

# `TANDEM_CPU_ISA=avx2 make test` is a test on a processor that has no more: workers read it as their setting, and what
# runs in the test's own process does not find the other features. An emulated set is the first that `auto` tries.
_wanted = os.environ.get("TANDEM_CPU_ISA", "auto")
_emulated = {each.name: each for each in isa.emulated(isa.processor_features())}
if _wanted in _emulated:
    build.AUTO_ORDER = (_emulated[_wanted], *isa.BUILT)
elif _wanted != "auto":
    _of_all = {need for each in isa.BUILT for need in each.needs}
    _own = next((each for each in isa.BUILT if each.name == _wanted), None)
    if _wanted != "torch" and (_own is None or _own.missing(isa.processor_features())):
        raise pytest.UsageError(f"TANDEM_CPU_ISA: this processor has no {_wanted!r}")
    _kept = set(_own.needs if _own else ())
    _features = isa.processor_features() - (_of_all - _kept)
    isa.processor_features = lambda: _features


def pytest_report_header() -> str:
    """Which instruction sets the C++ kernels are tested with."""
    features = isa.processor_features()
    emulated = isa.emulated(features) if os.environ.get("TANDEM_TEST_EMULATED") == "1" else ()
    covered = [each.name for each in dict.fromkeys((*isa.BUILT, *emulated)) if not each.missing(features)]
    return f"instruction sets of the C++ kernels: {', '.join(covered) or 'none'}"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Thousands of tests and all that they import stay to the end: no garbage collection need look through them."""
    with uncollected():
        return (yield)


def pytest_unconfigure() -> None:
    """Triton's bindings count what is left at the end as leaks."""
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)  # where there is pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """As `--dist loadfile`, by scopes that may be larger than a file."""
    from xdist.scheduler.loadfile import LoadFileScheduling

    scheduler = LoadFileScheduling(config, log)
    scheduler._split_scope = scope_of
    return scheduler


@pytest.hookimpl(trylast=True)  # the tests that are left once those of other marks are gone
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A coroutine's time limit holds within its loop too: uvloop swallows what pytest-timeout raises in a test that
    waits."""
    if hasattr(config, "workerinput"):  # one of several processes that share the files out
        items[:] = begun_in_order(items)
    for item in items:
        test = getattr(item, "obj", None)
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(test):
            marker = item.get_closest_marker("timeout")
            limit_s = float(marker.args[0] if marker is not None and marker.args else config.getini("timeout"))
            item.obj = _within(limit_s, test)


def _within(limit_s: float, test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    @functools.wraps(test)
    async def limited(*args: object, **kwargs: object) -> None:
        async with asyncio.timeout(limit_s):
            await test(*args, **kwargs)

    return limited
