"""What draws from a generator of its own draws what torch's operator draws from the global one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fzero.program.sites import WRITTEN_OUT, generator, seed, with_generator

aten: Any = torch.ops.aten
X = torch.linspace(-2, 2, 60).view(6, 10)
CALLS: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.native_dropout.default, (X, 0.3, True)),
    (aten.native_dropout.default, (X, 0.3, False)),
    (aten.native_dropout.default, (X, 1.0, True)),
    (aten.rand_like.default, (X,)),
    (aten.randn_like.default, (X,)),
    (aten.randint_like.default, (X, 7)),
    (aten.randint_like.low_dtype, (X, -3, 7)),
    (aten.bernoulli_.float, (X.clone(), 0.3)),
    (aten.normal.Tensor_float, (X, 2.0)),
    (aten.randperm.default, (9,)),
]


def drawn(call: Callable[[], Any]) -> list[Tensor]:
    found = call()
    return list(found) if isinstance(found, tuple) else [found.clone()]


@pytest.mark.parametrize(("op", "args"), CALLS, ids=[f"{op}{args[1:]}" for op, args in CALLS])
def test_the_same_state_draws_the_same_numbers(op: Any, args: tuple[Any, ...]) -> None:
    drawing = with_generator(op)
    assert drawing is not None
    before = torch.get_rng_state()
    own = torch.Generator().manual_seed(5)
    mine = drawn(lambda: drawing(*args, generator=own))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    torchs = drawn(lambda: op(*args))
    assert all(map(torch.equal, mine, torchs))
    assert [x.dtype for x in mine] == [x.dtype for x in torchs]


def test_all_that_is_written_out_is_tried() -> None:
    assert WRITTEN_OUT.keys() <= {op for op, _ in CALLS}
    assert with_generator(aten.add.Tensor) is None


def test_a_state_is_a_function_of_key_and_site() -> None:
    device = torch.device("cpu")

    def first(key: int, site: int) -> float:
        return torch.rand((), generator=generator(key, site, device)).item()

    assert first(1, 2) == first(1, 2)
    assert len({first(key, site) for key in (1, 2) for site in (1, 2)}) == 4
    seed(1, 2, device)
    assert torch.rand(()).item() == first(1, 2)
