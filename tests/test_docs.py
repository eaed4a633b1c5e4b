"""What the pages of the documentation show runs as it is shown, block after block."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("page", ["functions.md"])
def test_the_blocks_of_a_page_run_one_after_the_other(page: str) -> None:
    torch.manual_seed(0)
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)
    assert blocks
    scope: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), scope)
