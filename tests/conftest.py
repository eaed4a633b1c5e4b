"""What all tests share; the ranks are in tests/ranks.py."""

import os

import pytest
import torch
from hypothesis import settings

from tests.ranks import close_ranks


def pytest_configure() -> None:
    # Ranks share the machine's cores; more threads than cores only wait for each other.
    torch.set_num_threads(1)
    # CI judges a change by the same examples every time; elsewhere every run tries new ones.
    settings.register_profile("ci", derandomize=True)
    if os.environ.get("CI"):
        settings.load_profile("ci")


def pytest_sessionfinish(session: pytest.Session) -> None:
    close_ranks()
