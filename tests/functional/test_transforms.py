"""What is asked of torch's private `torch._C._functorch`, seen by what it does."""

import pytest
import torch
from torch import Tensor

from fzero.errors import TransformOverError
from fzero.functional.transforms import Over, in_transform, is_over


def test_a_transform_is_active_inside_it_only() -> None:
    seen: list[bool] = []
    fn = lambda x: seen.append(in_transform()) or x.sin()  # noqa: E731
    torch.vmap(fn)(torch.ones(2))
    torch.func.jvp(fn, (torch.ones(2),), (torch.ones(2),))
    torch.func.vjp(fn, torch.ones(2))
    assert seen == [True] * 3
    assert not in_transform()


@pytest.mark.parametrize("transform", ["vjp", "vmap", "jacrev", "both"])
def test_a_tensor_is_over_when_its_transform_is(transform: str) -> None:
    kept: list[Tensor] = []
    within: list[bool] = []

    def fn(x: Tensor) -> Tensor:
        kept.append(x)
        within.append(is_over(x))
        return x.sin()

    x = torch.ones(2)
    {
        "vjp": lambda: torch.func.vjp(fn, x),
        "vmap": lambda: torch.vmap(fn)(x),
        "jacrev": lambda: torch.func.jacrev(fn)(x),
        "both": lambda: torch.vmap(torch.func.grad(fn))(x),
    }[transform]()
    assert within == [False]
    assert is_over(kept[0])
    assert not is_over(x)


def test_what_is_over_raises_when_it_is_read() -> None:
    over = Over(torch.ones(2, 3), "'w'")
    assert over.shape == (2, 3)
    for read in (lambda: over + 1, lambda: torch.ones(2) @ over, over.t, over.clone):
        with pytest.raises(TransformOverError, match="backward reads 'w'"):
            read()
