"""Single parameters' values, gradients and states."""

from typing import Any

import pytest
import torch
from torch import nn

import fzero.compat.deepspeed as deepspeed
from fzero.errors import ShardError
from tests.ranks import run_ranks

u = deepspeed.utils


def _engine(stage: int, kind: str, accum: int) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accum,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}},
    }
    if kind == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 6}
    if kind == "bf16":
        config["bf16"] = {"enabled": True}
    return deepspeed.initialize(model=model, config=config)[0]


def _written(rank_cases: list[tuple[int, str, int]]) -> list[str]:
    """What went wrong, on a rank."""
    wrong: list[str] = []
    for case in rank_cases:
        engine = _engine(*case)
        rank = deepspeed.comm.get_rank()

        def same(what: str, found: Any, expected: Any, case: Any = case) -> None:
            if found is None or not torch.allclose(found, expected, rtol=1e-3, atol=1e-5):
                wrong.append(f"{case}: {what}: {found} for {expected}")

        params = list(engine.module.parameters())
        for micro in range(case[2]):
            x = (torch.randn(2, 5) + rank).to(next(engine.module.parameters()).dtype)
            engine.backward(engine(x).mean())
            if micro < case[2] - 1:
                engine.step()
        for i, param in enumerate(params):
            full = u.safe_get_full_grad(param)
            local = u.safe_get_local_grad(param)
            assert full is not None
            assert local is not None
            u.safe_set_full_grad(param, torch.full_like(full, 1.0 + i))
            same("grad", u.safe_get_full_grad(param), torch.full(param.shape, 1.0 + i))
            same("local grad", u.safe_get_local_grad(param), torch.full_like(local, 1.0 + i))
        # each rank its own part of the second one: 2 in all of it
        local = u.safe_get_local_grad(params[1])
        assert local is not None
        u.safe_set_local_grad(params[1], torch.full_like(local, 3.0))
        same("grad by parts", u.safe_get_full_grad(params[1]), torch.full(params[1].shape, 3.0))
        u.safe_set_full_fp32_param(params[2], torch.full(params[2].shape, 0.25))
        same("param", u.safe_get_full_fp32_param(params[2]), torch.full(params[2].shape, 0.25))
        part = u.safe_get_local_fp32_param(params[3])
        assert part is not None
        u.safe_set_local_fp32_param(params[3], torch.full_like(part, -0.5))
        same("param by parts", u.safe_get_full_fp32_param(params[3]), torch.tensor([-0.5]))
        before = [u.safe_get_full_fp32_param(param) for param in params]
        u.safe_set_full_optimizer_state(params[0], torch.full((7, 5), 2.0), "momentum_buffer")
        state = u.safe_get_local_optimizer_state(params[2], "momentum_buffer")
        assert state is not None
        u.safe_set_local_optimizer_state(params[2], torch.ones_like(state), "momentum_buffer")
        engine.step()
        trained = {0: 1.0 + 0.9 * 2.0, 1: 3.0, 2: 3.0 + 0.9, 3: 4.0}
        for i, param in enumerate(params):
            expected = before[i] - 0.5 * trained[i]
            same(f"step {i}", u.safe_get_full_fp32_param(param), expected)
            moment = u.safe_get_full_optimizer_state(param, "momentum_buffer")
            same(f"state {i}", moment, torch.full_like(expected, trained[i]))
        try:
            u.safe_get_full_optimizer_state(params[0], "exp_avg")
        except ShardError as error:
            if "momentum_buffer" not in str(error):
                wrong.append(str(error))
        else:
            wrong.append("a state that there isn't was given")
        engine.destroy()
    return wrong


CASES = [(stage, "fp32", 1) for stage in range(4)]
CASES += [(stage, "fp16", 2) for stage in range(4)]
CASES += [(3, "bf16", 1), (1, "bf16", 2)]


@pytest.mark.slow
def test_what_is_written_is_read_and_trained_with() -> None:
    assert run_ranks(2, _written, CASES, timeout=200) == [[], []]


def test_of_a_frozen_parameter_there_is_nothing() -> None:
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    engine = deepspeed.initialize(model=model, config=config, dist_init_required=False)[0]
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    for get in (u.safe_get_full_fp32_param, u.safe_get_local_fp32_param, u.safe_get_full_grad):
        assert get(model.bias) is None
    for state_of in (u.safe_get_full_optimizer_state, u.safe_get_local_optimizer_state):
        assert state_of(model.bias, "exp_avg") is None
        assert state_of(model.weight, "exp_avg") is not None


@pytest.mark.parametrize(
    ("kind", "params", "there"),
    [
        ("AdamW", {}, "mu, nu, and torch's exp_avg, .* mean those"),
        ("SGD", {"momentum": 0.9}, "trace, and torch's exp_avg, .* mean those"),
        ("SGD", {}, "none"),
    ],
)
def test_an_unknown_state_is_told_with_those_that_are_there(
    kind: str, params: dict[str, float], there: str
) -> None:
    model = nn.Sequential(nn.Linear(2, 1), *(nn.Identity() for _ in range(9)), nn.Linear(1, 1))
    config = {"optimizer": {"type": kind, "params": {"lr": 0.1, **params}}}
    engine = deepspeed.initialize(model=model, config=config, dist_init_required=False)[0]
    rule = rf"no state 'exp_avgg' of '0\.weight'; it has {there}\.$"
    with pytest.raises(ShardError, match=rule):
        u.safe_get_full_optimizer_state(engine.module[0].weight, "exp_avgg")


def test_gradients_are_updated_by_a_function() -> None:
    engine = deepspeed.initialize(
        model=nn.Linear(2, 1), config={"train_batch_size": 1}, dist_init_required=False
    )[0]
    params = list(engine.module.parameters())
    engine.backward(engine(torch.ones(1, 2)).sum())
    u.safe_update_full_grad_vectorized(params, lambda grad, param: grad + param.ndim)
    assert [float(u.safe_get_full_grad(p).mean()) for p in params] == [3.0, 2.0]  # pyright: ignore


def test_a_parameter_of_nobody_is_refused() -> None:
    with pytest.raises(ShardError, match="safe_get_full_grad"):
        u.safe_get_full_grad(nn.Parameter(torch.zeros(2)))
