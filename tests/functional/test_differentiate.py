"""The gradients are those that `loss.backward()` accumulates, wherever it leaves them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fzero.errors import FzeroError
from fzero.functional.differentiate import accumulated, added, differentiated, reaching_all


class Inside(torch.autograd.Function):
    """Computes `x * w` again in a backward inside of backward, as re-entrant checkpoints do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:  # pyright: ignore
        ctx.save_for_backward(x)
        ctx.w = w  # closed over: no input of the node
        return (x * w).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            torch.autograd.backward((x * ctx.w), grad)
        return x.grad, None


def start() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    w, v, x = torch.randn(3, 3, dtype=torch.float64)
    return w.clone().requires_grad_(), v.clone().requires_grad_(), x.clone().requires_grad_()


def plain(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
    return (w * x).sin().sum() + (w * v).sum()


def inside(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
    # beside the part that accumulates there is one that autograd returns: both count
    return Inside.apply(x, w).sin().sum() + (w * v).sum()


def reentrant(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
    # on the way to no trained leaf: only `x` needs a gradient there
    return checkpoint(lambda x: w * x, x, use_reentrant=True).sin().sum() + (w * v).sum()


@pytest.mark.parametrize("fn", [plain, inside, reentrant])
def test_the_gradients_are_those_of_backward_and_nothing_is_left(fn: Any) -> None:
    w, v, x = start()
    plain(w, v, x).backward()
    expected = [w.grad, v.grad]
    w, v, x = start()
    found = differentiated(fn(w, v, x), [w, v])
    for grad, wanted in zip(found, expected, strict=True):
        assert grad is not None
        assert wanted is not None
        torch.testing.assert_close(grad, wanted, rtol=1e-14, atol=0)
    # the next step must not find this one's
    assert w.grad is None
    assert v.grad is None


def test_other_leaves_are_only_asked_for_where_a_users_node_may_need_it() -> None:
    ran = []
    for fn in (plain, reentrant):
        w, v, x = start()
        x.register_hook(lambda grad: ran.append(1))
        reaching_all([fn(w, v, x)], [w, v])
        assert len(ran) == (0 if fn is plain else 1)


def test_a_leaf_that_nothing_reaches_has_none_and_a_loss_of_none_is_refused() -> None:
    w, v, x = start()
    assert differentiated(w.sum(), [w, v])[1] is None
    assert differentiated(torch.ones(()), [w], must_depend=False) == [None]
    for loss in (x.sum(), torch.ones(())):
        with pytest.raises(FzeroError, match="depends on no trained parameter"):
            differentiated(loss, [w, v])
    assert differentiated(torch.ones(()), []) == []


def test_what_was_accumulated_is_taken_once_and_added() -> None:
    (w, _, _), one = start(), torch.ones(3, dtype=torch.float64)
    w.grad = one
    assert accumulated(w) is one
    assert accumulated(w) is None
    assert added(None, one) is one is added(one, None)
    assert added(None, None) is None
    assert torch.equal(added(one, one), 2 * one)  # pyright: ignore
