"""What torch is asked before it is trusted has the same answer whatever the user's settings."""

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch

from fzero.functional.islands import check_islands
from fzero.functional.tasks import check_tasks
from fzero.functional.torch_checkpoint import check_checkpoints
from fzero.numerics.thread_generator import check_draws
from fzero.transforms.randomness import check_own


@contextlib.contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _holds(fits: bool) -> None:
    assert fits


SETTINGS = {
    "float64": lambda: _default(torch.float64),
    "bfloat16": lambda: _default(torch.bfloat16),
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "device": lambda: torch.device("meta"),
}
PROBES = {
    "islands": check_islands.__wrapped__,
    "tasks": check_tasks.__wrapped__,
    "checkpoints, traced": lambda: check_checkpoints.__wrapped__("traced"),
    "checkpoints, eager": lambda: check_checkpoints.__wrapped__("eager"),
    "draws": lambda: _holds(check_draws.__wrapped__()),
    "own generators": lambda: _holds(check_own.__wrapped__()),
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("probe", PROBES.values(), ids=PROBES)
def test_a_probe_knows_this_torch_under_every_setting(
    probe: Callable[[], None], setting: Callable[[], contextlib.AbstractContextManager[None]]
) -> None:
    with setting():
        probe()
