"""What all tests share; the ranks are in tests/ranks.py."""

import pytest
import torch

from tests.ranks import close_ranks


def pytest_configure() -> None:
    # Ranks share the machine's cores; more threads than cores only wait for each other.
    torch.set_num_threads(1)


def pytest_sessionfinish(session: pytest.Session) -> None:
    close_ranks()
