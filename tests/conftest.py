"""What all tests share; the ranks are in tests/ranks.py."""

import os

import pytest
import torch
from hypothesis import settings

from tests.ranks import close_ranks


def pytest_configure() -> None:
    # Ranks share the machine's cores; more threads than cores only wait for each other.
    torch.set_num_threads(1)
    # No deadline: how long an example takes says how busy the machine is. CI judges a change by the
    # same examples every time; elsewhere every run tries new ones.
    ci = bool(os.environ.get("CI"))
    settings.register_profile("fzero", deadline=None, derandomize=ci)
    settings.load_profile("fzero")


def pytest_sessionfinish(session: pytest.Session) -> None:
    close_ranks()
