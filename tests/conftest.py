"""What all tests share; the ranks are in tests/ranks.py."""

import gc
import logging
import os

import pytest
import torch
from hypothesis import settings

from tests.ranks import close_ranks


def pytest_configure() -> None:
    # Ranks share the machine's cores; more threads than cores only wait for each other.
    torch.set_num_threads(1)
    # Torch writes its structured trace, with the caller's stack, where its logger has a handler;
    # pytest gives one to each logger that passes nothing on. That took 3% of all time.
    trace = logging.getLogger("torch.__trace")
    trace.handlers.clear()
    trace.propagate = True
    # No deadline: how long an example takes says how busy the machine is. CI judges a change by the
    # same examples every time; elsewhere every run tries new ones.
    ci = bool(os.environ.get("CI"))
    settings.register_profile("fzero", deadline=None, derandomize=ci)
    settings.load_profile("fzero")


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`@pytest.mark.quick("2-bf16")`: of all cases of a test these run by default."""
    found: dict[str, set[str]] = {}
    for item in items:
        if (mark := item.get_closest_marker("quick")) and isinstance(item, pytest.Function):
            case = item.name.partition("[")[2][:-1]
            found.setdefault(item.nodeid.partition("[")[0], set()).add(case)
            if case not in mark.args:
                item.add_marker("slow")
    for item in items:
        mark, name = item.get_closest_marker("quick"), item.nodeid.partition("[")[0]
        # a case that is asked for by its name comes alone
        if mark and len(found[name]) > 1 and (unknown := set(mark.args) - found[name]):
            raise pytest.UsageError(f"{name}: no case {sorted(unknown)} of {sorted(found[name])}")


def pytest_collection_finish() -> None:
    gc.freeze()  # modules and tests stay: the many tests that collect garbage needn't look at them


def pytest_sessionfinish(session: pytest.Session) -> None:
    close_ranks()
