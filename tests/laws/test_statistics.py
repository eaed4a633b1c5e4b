"""In low precision a norm that keeps statistics computes with its own dtype, as its statistics."""

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fzero
from fzero import Config, LossScale, Precision
from tests.ranks import run_ranks

LR, STEPS = 0.1, 2
PRECISIONS: dict[str, Precision] = {
    "bf16": Precision(torch.bfloat16, reduce=torch.float32, master=torch.float32),
    "fp16": Precision(torch.float16, reduce=torch.float32, master=torch.float32),
    "bf16 alone": Precision(torch.bfloat16, master=torch.bfloat16),
}
CASES = [
    (name, stage, how)
    for name in PRECISIONS
    for stage in range(4)
    for how in ("traced", "eager", "engine")
]


class Own(nn.BatchNorm1d):
    """A user's: what counts is what it is, not what it is called."""


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(24, 5), Own(5), nn.Linear(5, 3)),
        )


def _net() -> Net:
    torch.manual_seed(0)
    return Net()


def _rows(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(6, 3, 8, generator=generator)


def _loss(out: Tensor) -> Tensor:
    return out.float().square().mean()


def _by_hand(precision: Precision, world: int) -> dict[str, Tensor]:
    """Masters, updated by the mean over ranks of gradients that are computed in low precision."""
    masters = _net()
    for module in masters:
        if precision.master == torch.bfloat16 and not isinstance(module, nn.BatchNorm1d):
            module.to(torch.bfloat16)
    for step in range(STEPS):
        sums: dict[str, Tensor] = {}
        for rank in range(world):
            low = copy.deepcopy(masters)
            for module in low:
                if not isinstance(module, nn.BatchNorm1d):
                    module.to(precision.param)
            (_loss(low(_rows(rank, step).to(precision.param))) / world).backward()
            for name, p in low.named_parameters():
                assert p.grad is not None
                grad = p.grad.to(precision.reduce or p.dtype)
                sums[name] = sums[name] + grad if name in sums else grad
        with torch.no_grad():
            for name, p in masters.named_parameters():
                p.sub_(LR * sums[name].to(p.dtype))
    return {name: p.detach() for name, p in masters.named_parameters()}


def _trained(how: str, cfg: Config) -> dict[str, Tensor]:
    rank = dist.get_rank()
    opt = fzero.optim.sgd(LR)
    if how == "engine":
        engine = fzero.Engine(_net(), opt, cfg)
        for step in range(STEPS):
            engine.backward(_loss(engine(_rows(rank, step))))
            engine.step()
        params, state = engine.state
        statistics = dict(engine.module.named_buffers())
    else:
        apply, start, buffers = fzero.functionalize(_net(), buffers=True)

        def model_fn(params: Any, buffers: Any, x: Tensor) -> tuple[Tensor, Any]:
            out, buffers = apply(params, buffers, x)
            return _loss(out), buffers

        step_fn = fzero.make_train_step(model_fn, opt, cfg.replace(executor=how))
        params, state = step_fn.init(start, buffers)
        for step in range(STEPS):
            params, state = step_fn(params, state, _rows(rank, step))
        statistics = state.model_state
    assert {x.dtype for x in statistics.values()} == {torch.float32, torch.int64}
    return fzero.unshard(params if state.master is None else state.master)


def _all() -> dict[tuple[str, int, str], dict[str, Tensor]]:
    found = {}
    for name, stage, how in CASES:
        # a scale of one: what is rounded is what is rounded without it
        scale = LossScale(init=1.0, window=1000) if name == "fp16" else None
        cfg = Config(stage=stage, precision=PRECISIONS[name], loss_scale=scale)
        found[name, stage, how] = _trained(how, cfg)
    return found


@functools.cache  # one job for all cases
def _found() -> list[dict[tuple[str, int, str], dict[str, Tensor]]]:
    return run_ranks(2, _all, timeout=240)


@pytest.mark.parametrize(("name", "stage", "how"), CASES)
def test_norms_with_statistics_compute_in_their_dtype(name: str, stage: int, how: str) -> None:
    expected = _by_hand(PRECISIONS[name], 2)
    for found in _found():
        ours = found[name, stage, how]
        assert ours.keys() == expected.keys()
        for leaf, x in expected.items():
            # sums of two ranks in bfloat16 alone may round the other way
            rtol, atol = (1e-2, 1e-3) if name == "bf16 alone" else (1.3e-6, 1e-5)
            torch.testing.assert_close(ours[leaf].to(x.dtype), x, rtol=rtol, atol=atol, msg=leaf)
