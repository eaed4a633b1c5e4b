"""No collection of cycles begins inside of a Program, but where Python of users runs in it."""

import gc

import pytest
import torch
from torch import Tensor

import fzero

SEEN: list[bool] = []
FAILS: list[Exception] = []


@torch.library.custom_op("fzero_tests::looks", mutates_args=())
def looks(x: Tensor) -> Tensor:
    SEEN.append(gc.isenabled())
    for error in FAILS:
        raise error
    return x.clone()


@looks.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


looks.register_autograd(lambda ctx, grad: grad)


def by_operator(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return (looks(params["w"]) * x).sum()


def by_python(params: dict[str, Tensor], x: Tensor) -> Tensor:
    def run(w: Tensor, x: Tensor) -> Tensor:
        SEEN.append(gc.isenabled())
        return w * x

    return fzero.opaque(run)(params["w"], x).sum()


@pytest.mark.parametrize(("model_fn", "inside"), [(by_operator, False), (by_python, True)])
@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_waits_for_the_end_of_a_program(
    model_fn: object, inside: bool, enabled: bool
) -> None:
    step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(0.1))  # pyright: ignore
    state = step_fn.init({"w": torch.ones(3)})
    state = step_fn(*state, torch.ones(3))
    SEEN.clear()
    if not enabled:
        gc.disable()
    try:
        step_fn(*state, torch.ones(3))
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
    assert SEEN
    assert set(SEEN) == {inside and enabled}


def test_it_is_as_it_was_after_an_error() -> None:
    cfg = fzero.Config(donate=False)
    step_fn = fzero.make_train_step(by_operator, fzero.optim.sgd(0.1), cfg)
    state = step_fn.init({"w": torch.ones(3)})
    step_fn(*state, torch.ones(3))
    FAILS.append(ValueError("of a kernel"))
    with pytest.raises(ValueError, match="of a kernel"):
        step_fn(*state, torch.ones(3))
    FAILS.clear()
    assert gc.isenabled()
    step_fn(*state, torch.ones(3))
