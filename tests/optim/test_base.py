"""Two functions are an optimizer: elementwise, and without a step in place of its own."""

import torch

from fzero import optim


def test_two_functions_are_an_optimizer() -> None:
    halve = optim.Optimizer(
        lambda params: (), lambda grads, state, params=None, **_: (grads, state)
    )
    assert halve.apply_ is None
    assert not halve.foreign  # it is given shards, not whole leaves
    params = [torch.ones(2)]
    made = optim.as_optimizer(halve)
    assert not made.foreign
    assert made.apply_ is not None
    made.apply_([torch.full((2,), 0.5)], made.init(params), params)
    assert torch.equal(params[0], torch.full((2,), 1.5))
