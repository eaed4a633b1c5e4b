"""Client optimizers and the ones of fzero.optim that they become."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero.compat.deepspeed as deepspeed
from fzero.compat.deepspeed.optimizers import (
    ClientGroups,
    DeepSpeedCPUAdam,
    FusedAdam,
    FusedLamb,
    FusedLion,
    client_of,
)
from fzero.compat.deepspeed.settings import Section
from fzero.errors import ConfigError, FzeroError

Make = Callable[[Any], torch.optim.Optimizer]


def grads_of(model: nn.Linear, step: int) -> dict[str, Tensor]:
    torch.manual_seed(step)
    return {name: torch.randn_like(p) for name, p in model.named_parameters()}


class Kernel(torch.optim.Optimizer):
    """DeepSpeed's kernels, which want a GPU, line by line: csrc/lamb and csrc/adam."""

    def __init__(self, params: Any, bounds: tuple[float, float] | None, corrects: bool) -> None:
        super().__init__(params, {})
        self.bounds, self.corrects, self.t = bounds, corrects, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore
        lr, b1, b2, eps, decay = 0.1, 0.9, 0.999, 1e-8, 0.2
        self.t += 1
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            m = state["m"] = b1 * state.get("m", 0.0) + (1 - b1) * p.grad
            v = state["v"] = b2 * state.get("v", 0.0) + (1 - b2) * p.grad * p.grad
            update = m / (v.sqrt() + eps) + decay * p
            coeff = 1.0
            if self.bounds is not None and p.norm() != 0 and update.norm() != 0:
                coeff = min(max((p.norm() / update.norm()).item(), self.bounds[0]), self.bounds[1])
            size = lr * (1 - b2**self.t) ** 0.5 / (1 - b1**self.t) if self.corrects else lr
            p -= size * coeff * update


@pytest.mark.parametrize(
    ("client", "torchs"),
    [
        (
            lambda p: client_of(Section("Lamb", {"lr": 0.1, "weight_decay": 0.2}), list(p)),
            lambda p: Kernel(p, (0.01, 10.0), corrects=True),
        ),
        (
            lambda p: FusedLamb(p, 0.1, weight_decay=0.2, max_coeff=0.3, min_coeff=0.1),
            lambda p: Kernel(p, (0.1, 0.3), corrects=True),
        ),
        (
            lambda p: FusedLamb(p, 0.1, weight_decay=0.2, min_coeff=2.0, bias_correction=False),
            lambda p: Kernel(p, (2.0, 10.0), corrects=False),
        ),
        (
            lambda p: FusedAdam(p, 0.1, weight_decay=0.2, bias_correction=False),
            lambda p: Kernel(p, None, corrects=False),
        ),
        (lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.2), None),
        (lambda p: torch.optim.AdamW(p, 0.1, amsgrad=True), None),
        (lambda p: torch.optim.Adam(p, 0.1, betas=(0.8, 0.9), weight_decay=0.2), None),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.1, weight_decay=0.2), None),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True), None),
        (
            lambda p: FusedAdam(p, 0.1, weight_decay=0.2),
            lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.2),
        ),
        (
            lambda p: DeepSpeedCPUAdam(p, 0.1, weight_decay=0.2, adamw_mode=False),
            lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.2),
        ),
        (
            lambda p: client_of(Section("Adam", {"lr": 0.1}), list(p)),
            lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.0),
        ),
        (
            lambda p: client_of(Section("Adam", {"lr": 0.1, "torch_adam": True}), list(p)),
            lambda p: torch.optim.AdamW(p, 0.1),
        ),
    ],
)
def test_the_numbers_are_those_of_torch(client: Make, torchs: Make | None) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    groups = ClientGroups(
        client(model.parameters()), {id(p): n for n, p in model.named_parameters()}
    )
    real = (torchs or client)(model.parameters())
    state = groups.transform.init(params)
    for step in range(4):
        grads = grads_of(model, step)
        for name, p in model.named_parameters():
            p.grad = grads[name].clone()
        real.step()
        updates, state = groups.transform.update(grads, state, params)
        params = {name: p + updates[name] for name, p in params.items()}
    for name, p in model.named_parameters():
        torch.testing.assert_close(params[name], p.detach(), rtol=1e-9, atol=1e-12)


class Mine(torch.optim.AdamW):
    """Its step may be anything."""


@pytest.mark.parametrize(
    ("client", "message"),
    [
        (lambda p: torch.optim.RMSprop(p), "RMSprop"),
        (Mine, "Mine"),
        (lambda p: torch.optim.AdamW(p, maximize=True), "maximize"),
        (lambda p: torch.optim.AdamW([torch.zeros(2, requires_grad=True)]), "none of the model's"),
    ],
)
def test_an_optimizer_that_can_not_be_honoured_is_refused(client: Make, message: str) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ConfigError, match=message):
        ClientGroups(client(model.parameters()), {id(p): n for n, p in model.named_parameters()})


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (Section("AdamW", {"max_grad_norm": 1.0}), "gradient_clipping"),
        (Section("AdamW", {"learning_rate": 1.0}), "learning_rate"),
        (Section("NoSuch", {}), "NoSuch"),
        (Section("OneBitAdam", {}), "OneBitAdam"),
        (Section("Lamb", {"eps_inside_sqrt": True}), "eps_inside_sqrt"),
        (Section("Lamb", {"amsgrad": True}), "amsgrad"),
    ],
)
def test_a_section_that_can_not_be_honoured_is_refused(section: Section, message: str) -> None:
    with pytest.raises(FzeroError, match=message):
        client_of(section, list(nn.Linear(2, 2).parameters()))


def test_other_numbers_than_rates_are_settled() -> None:
    model = nn.Linear(3, 1)
    opt = torch.optim.AdamW(model.parameters(), 0.1)
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, optimizer=opt, config={"train_batch_size": 2}, dist_init_required=False
    )
    engine.backward(engine(torch.ones(2, 3)).mean())
    before = engine.inner.full_params()
    optimizer.param_groups[0]["weight_decay"] = 0.5
    with pytest.raises(ConfigError, match=r"param_groups\[0\]\['weight_decay'\]"):
        engine.step()
    assert all(torch.equal(x, before[name]) for name, x in engine.inner.full_params().items())
    optimizer.param_groups[0]["weight_decay"] = 0.01
    engine.step()
    with pytest.raises(ConfigError, match="add_param_group"):
        optimizer.add_param_group({"params": []})


@pytest.mark.parametrize("bad", ["a", None, [0.1]])
def test_a_rate_that_is_no_number_is_told_where_it_is_read(bad: Any) -> None:
    engine, optimizer, _, _ = deepspeed.initialize(
        model=nn.Linear(3, 1),
        config={"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}},
        dist_init_required=False,
    )
    engine.backward(engine(torch.ones(2, 3)).mean())
    optimizer.param_groups[0]["lr"] = bad
    with pytest.raises(ConfigError, match=r"param_groups\[0\]\['lr'\] = .*must be a number"):
        engine.step()
    optimizer.param_groups[0]["lr"] = 0.2
    engine.step()


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "message"),
    [
        ({"lr": "a"}, {}, r"\['lr'\] = 'a': must be a number"),
        ({"betas": ["a", 0.9]}, {}, r"betas\[0\] = 'a': must be a number"),
        ({"betas": 0.9}, {}, "betas = 0.9: must be two numbers"),
        ({"torch_adam": True, "lr": -1.0}, {}, "optimizer.params of AdamW: Invalid learning rate"),
        ({}, {"warmup_max_lr": "a"}, "a scheduler's rate = 'a': must be a number"),
        ({}, {"warmup_max_lr": ["a"]}, "a scheduler's rate = 'a': must be a number"),
    ],
)
def test_a_number_of_a_section_that_is_none_is_refused(
    optimizer: dict[str, Any], scheduler: dict[str, Any], message: str
) -> None:
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": optimizer},
        "scheduler": {"type": "WarmupLR", "params": scheduler},
    }
    with pytest.raises(ConfigError, match=message):
        deepspeed.initialize(model=nn.Linear(3, 1), config=config, dist_init_required=False)


def test_a_holder_of_groups_does_not_step() -> None:
    holder = FusedLion([torch.zeros(2, requires_grad=True)])
    with pytest.raises(FzeroError, match=r"engine\.step"):
        holder.step()
