"""A module has other tensors for one call, and is itself again after it, whatever happened."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.functional.slots import plan_slots
from fzero.functional.swap import read_buffers, swapped


class Tied(nn.Module):
    """One parameter in two slots, a buffer, and a list that forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.b.weight = self.a.weight
        self.register_buffer("mean", torch.zeros(2))
        self.log: list[Any] = []

    mean: Tensor


def _inside(module: Tied, act: Any) -> Any:
    plan = plan_slots(module)
    params = {"a.weight": torch.full((2, 2), 3.0)}
    buffers = {"mean": torch.ones(2)}
    with swapped(plan, params, buffers, buffers):
        act(module)
        return params, read_buffers(plan, buffers)


def test_every_slot_has_the_tensor() -> None:
    module = Tied()

    def look(m: Tied) -> None:
        assert m.a.weight is m.b.weight
        assert m.a.weight[0, 0] == 3

    _inside(module, look)


@pytest.mark.parametrize("raises", [False, True])
def test_the_module_is_as_before(raises: bool) -> None:
    module = Tied()
    weight, mean, log = module.a.weight, module.mean, module.log

    def act(m: Tied) -> None:
        m.log.append(1)
        m.extra = 2  # pyright: ignore
        m.mean = torch.zeros(2)
        if raises:
            raise ValueError("forward")

    if raises:
        with pytest.raises(ValueError, match="forward"):
            _inside(module, act)
    else:
        _inside(module, act)
    assert module.a.weight is module.b.weight is weight
    assert module.mean is mean
    assert module.log is log
    assert log == []
    assert not hasattr(module, "extra")


def test_buffers_are_read_where_they_were_replaced() -> None:
    _, new = _inside(Tied(), lambda m: setattr(m, "mean", m.mean + 1))
    assert torch.equal(new["mean"], torch.full((2,), 2.0))
    with pytest.raises(fzero.TraceError, match="replaced buffer 'mean'"):
        _inside(Tied(), lambda m: setattr(m, "mean", torch.zeros(3)))
