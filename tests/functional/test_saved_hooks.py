"""What torch tells of the hooks on what autograd saves."""

import torch
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from fzero.functional.saved_hooks import enable_hooks, knows_hooks, takes_hooks


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def test_hooks_of_ours_are_taken_where_nobody_elses_are() -> None:
    assert knows_hooks()
    assert takes_hooks()
    with torch.no_grad():
        assert not takes_hooks()
    with saved_tensors_hooks(_same, _same):
        assert not takes_hooks()
    with disable_saved_tensors_hooks("a reason"):
        assert not takes_hooks()
    assert takes_hooks()
    found: list[bool] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        found.append(takes_hooks())
        return x * x

    checkpoint(run, torch.ones(2, requires_grad=True), use_reentrant=False)
    assert found == [False]


def test_what_a_refusal_has_left_off_is_on_again() -> None:
    torch._C._autograd._saved_tensors_hooks_disable("left off")  # pyright: ignore
    assert not takes_hooks()
    enable_hooks()
    assert takes_hooks()


def test_asking_leaves_them_as_they_are() -> None:
    with saved_tensors_hooks(_same, _same):
        assert knows_hooks.__wrapped__()
        assert not takes_hooks()
    assert takes_hooks()
