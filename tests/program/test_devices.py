"""Derivatives of derivatives, batched: staged out, with the gradients of backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import hessian, jacfwd, jacrev, jvp

import fzero
from fzero.program.devices import devices_kept

FORMS: dict[str, Callable[[Any], Callable[[Tensor], Tensor]]] = {
    "hessian": lambda f: lambda q: hessian(f)(q).trace(),
    "jacfwd of jacfwd": lambda f: lambda q: jacfwd(jacfwd(f))(q).trace(),
    "jacrev of jacrev": lambda f: lambda q: jacrev(jacrev(f))(q).trace(),
    "jvp of jacrev": lambda f: lambda q: jvp(jacrev(f), (q,), (torch.ones_like(q),))[1].sum(),
    "jvp": lambda f: lambda q: jvp(f, (q,), (torch.ones_like(q),))[1],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stage", [0, 3])
def test_batched_derivatives_are_staged_out(form: str, stage: Any) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    apply, params = fzero.functionalize(net)

    def loss(params: Any, xs: Tensor) -> Tensor:
        of_one = FORMS[form](lambda q: apply(params, q[None])[0, 0])
        return torch.vmap(of_one)(xs).square().mean()

    xs = torch.rand(4, 2, dtype=torch.float64)
    plain = {name: p.clone().requires_grad_() for name, p in params.items()}
    loss(plain, xs).backward()
    step = fzero.make_train_step(loss, fzero.optim.sgd(1.0), fzero.Config(stage=stage))
    new, state = step.init({name: p.clone() for name, p in params.items()})
    new, _ = step(new, state, xs)
    for name, p in fzero.unshard(new).items():
        grad = plain[name].grad
        want = params[name] - (torch.zeros_like(p) if grad is None else grad)
        torch.testing.assert_close(p, want, rtol=1e-10, atol=1e-12)


def test_a_tensor_of_the_meta_device_stays_there() -> None:
    moved = devices_kept(lambda x: x.to("meta", torch.float64))
    assert moved(torch.ones(1)).device.type == "cpu"
    assert moved(torch.ones(1, device="meta")).device.type == "meta"
