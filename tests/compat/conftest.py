"""What DeepSpeed's interface starts in the tests' own process is ended with each test."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def _no_group_left() -> Iterator[None]:
    yield
    if dist.is_initialized():  # `init_distributed` in a process that is alone starts one
        dist.destroy_process_group()
