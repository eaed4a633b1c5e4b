"""What tests of several saves share."""

from collections.abc import Iterator

import pytest

from fzero.checkpoint import background
from fzero.checkpoint.lineage import Heads


@pytest.fixture
def new_process() -> Iterator[None]:
    """Nothing was saved or loaded before, as far as lineages go; nor is it afterwards."""
    background.heads = Heads()
    yield
    background.heads = Heads()
