"""What travels in which dtype, read from the Program; what steps with other dtypes notice of it."""

import copy
import functools
import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero import Config, Precision, tree
from tests.functional.test_owners import SAFE, Net
from tests.ranks import fake_ranks

BF16, FP32 = torch.bfloat16, torch.float32
STAGES = pytest.mark.parametrize("stage", range(4))
EXECUTORS = pytest.mark.parametrize("executor", ["traced", "eager"])
GATHERS, REDUCTIONS = ("all_gather",), ("reduce_scatter", "all_reduce")
TOKENS = torch.tensor([0, 1, 2, 3])


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Net()


def step_of(**config: Any) -> tuple[fzero.TrainStep, Any]:
    apply, params = fzero.functionalize(net())

    def model_fn(params: dict[str, Tensor], tokens: Tensor) -> Tensor:
        return apply(params, tokens).float().square().mean()

    step_fn = fzero.make_train_step(model_fn, fzero.optim.adamw(1e-2), Config(**config))
    return step_fn, step_fn.init(params)


def rows(world: int = 4, **config: Any) -> list[Any]:
    """The collectives that carry leaves."""
    with fake_ranks(world):
        step_fn, state = step_of(**config)
        found = step_fn.lower(*state, TOKENS).collectives()
    names = {name for name, _ in Net().named_parameters()}
    return [row for row in found if names.intersection(row.leaves)]


def wire(rows: list[Any], kinds: tuple[str, ...]) -> int:
    """Bytes that these collectives carry in a whole step."""
    chosen = [row for row in rows if row.kind in kinds]
    assert chosen
    return sum(row.bytes * row.times for row in chosen)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("preset", "offload"),
    [("bf16", None), pytest.param("fp16", None, marks=pytest.mark.slow), ("bf16", "cpu")],
)
def test_low_gathers_move_exactly_half(stage: int, preset: str, offload: Any) -> None:
    low, full = (rows(stage=stage, precision=p, offload=offload) for p in (preset, None))
    assert 2 * wire(low, GATHERS) == wire(full, GATHERS)
    assert wire(low, REDUCTIONS) == wire(full, REDUCTIONS)  # the presets reduce in float32


@STAGES
@pytest.mark.parametrize("accum", [1, 2])
def test_low_reductions_move_exactly_half(stage: int, accum: int) -> None:
    precision = Precision(BF16, reduce=BF16, master=FP32)
    low, full = (rows(stage=stage, precision=p, accum_steps=accum) for p in (precision, None))
    assert 2 * wire(low, REDUCTIONS) == wire(full, REDUCTIONS)


@STAGES
def test_autocast_moves_safe_modules_low_and_the_rest_in_float32(stage: int) -> None:
    found = rows(stage=stage, precision=Precision(autocast=BF16))
    for row in found:
        low = row.kind in REDUCTIONS or stage == 3  # below, what is gathered are float32 masters
        expected = {BF16 if low and name in SAFE else FP32 for name in row.leaves}
        assert expected == {row.dtype}, row
    reduced = Counter(n for row in found if row.kind in REDUCTIONS for n in row.leaves)
    assert reduced == Counter(name for name, _ in Net().named_parameters())


def test_other_safe_modules_travel_otherwise() -> None:
    precision = Precision(autocast=BF16, lower_precision_safe_modules=("torch.nn.LayerNorm",))
    for row in rows(stage=3, precision=precision):
        assert row.dtype == (BF16 if set(row.leaves) <= {"norm.weight", "norm.bias"} else FP32)


# ------------------------------------------------------------------------------- isolation
CONFIGS: list[dict[str, Any]] = [
    {},
    {"precision": "bf16"},
    {"precision": "fp16", "loss_scale": 64.0},
    {"precision": Precision(autocast=BF16)},
    {"precision": Precision(autocast=torch.float16, lower_precision_safe_modules=())},
    {"precision": Precision(BF16, master=FP32, output=FP32)},
]


@EXECUTORS
def test_steps_of_different_precision_do_not_touch_each_other(executor: Any) -> None:
    alone = []
    for config in CONFIGS:
        step_fn, state = step_of(**config, executor=executor)
        for _ in range(3):
            state = step_fn(*state, TOKENS)
        alone.append(_values(state))
    together = [step_of(**config, executor=executor) for config in CONFIGS]
    states = [state for _, state in together]
    for _ in range(3):
        states = [fn(*state, TOKENS) for (fn, _), state in zip(together, states, strict=True)]
    for ours, expected in zip(map(_values, states), alone, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    losses = {values[-1].item() for values in alone}
    assert len(losses) > 3  # they do compute differently


def _values(state: Any) -> list[Tensor]:
    params, opt_state = copy.deepcopy(state)
    kept = fzero.unshard((params, opt_state.inner, opt_state.master))
    return [*tree.leaves(kept), opt_state.metrics["loss"]]


def test_other_threads_keep_their_own_precision() -> None:
    seen: list[torch.dtype] = []
    x = torch.ones(2, 2)

    def model_fn(params: Any, tokens: Tensor) -> Tensor:
        other = threading.Thread(target=lambda: seen.append((x @ x).dtype))
        other.start()
        other.join()
        seen.append((x @ x).dtype)
        return params["gain"] * 1.0

    cfg = Config(executor="eager", precision=Precision(autocast=BF16))
    step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(0.1), cfg)
    step_fn(*step_fn.init(fzero.functionalize(net())[1]), TOKENS)
    assert [*seen, (x @ x).dtype] == [FP32, BF16, FP32]


@STAGES
@EXECUTORS
def test_autocast_equals_torch_autocast(stage: int, executor: Any) -> None:
    config = {"stage": stage, "executor": executor}
    step_fn, state = step_of(**config, precision=Precision(autocast=BF16))
    _, opt_state = step_fn(*state, TOKENS)
    module = net()
    with torch.autocast("cpu", BF16):
        loss = module(TOKENS).float().square().mean()
    loss.backward()
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    assert opt_state.metrics["loss"].item() == loss.item()
    norm = torch.nn.utils.get_total_norm(grads)
    # float32 sums in bfloat16 where a weight has two uses, which autocast casts one by one
    assert opt_state.metrics["grad_norm"].item() == pytest.approx(norm.item(), rel=1e-2)


@EXECUTORS
def test_autocast_inside_the_model_function_is_its_own(executor: Any) -> None:
    seen: list[torch.dtype] = []

    def model_fn(params: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            seen.append((x @ params["w"]).dtype)
        with torch.autocast("cpu", enabled=False):
            seen.append((x @ params["w"]).dtype)
        seen.append((x @ params["w"]).dtype)
        return (x @ params["w"]).float().sum()

    precision = Precision(autocast=BF16, lower_precision_safe_modules=())
    cfg = Config(stage=0, precision=precision, executor=executor)
    step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(0.1), cfg)
    step_fn(*step_fn.init({"w": torch.ones(2, 2)}), torch.ones(2, 2))
    assert seen[:3] == [torch.float16, FP32, BF16]


class Doubled(torch.autograd.Function):
    """Without `setup_context`, which `torch.func` refuses: the second front end records it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore
        return 2 * grad


def test_both_front_ends_record_autocast() -> None:
    def model_fn(params: Any, x: Tensor, double: Any) -> Tensor:
        y = x @ params["w"]
        assert y.dtype == BF16
        return double(y).float().square().mean()

    precision = Precision(autocast=BF16, lower_precision_safe_modules=())
    results, logs = [], []
    for double in (Doubled.apply, lambda y: 2 * y):
        fn = functools.partial(model_fn, double=double)
        cfg = Config(precision=precision, donate=False)
        step_fn = fzero.make_train_step(fn, fzero.optim.sgd(0.1), cfg)
        state = step_fn.init({"w": torch.randn(3, 3, generator=torch.Generator().manual_seed(0))})
        results.append(step_fn(*state, torch.ones(2, 3)))
        logs.append(" ".join(next(step_fn.lower(*state, torch.ones(2, 3)).parts()).log))
    assert "staged out through torch.autograd.grad" in logs[0]
    assert "staged out through torch.func.vjp" in logs[1]
    for a, b in zip(*map(_values, results), strict=True):
        assert torch.equal(a, b)


@STAGES
@EXECUTORS
def test_output_is_what_apply_returns_and_what_the_model_function_returns(
    stage: int, executor: Any
) -> None:
    apply, params = fzero.functionalize(nn.Linear(3, 2))
    seen: list[torch.dtype] = []

    def model_fn(params: Any, x: Tensor) -> Any:
        out = apply(params, x.to(params["weight"].dtype))
        seen.append(out.dtype)
        return out.square().mean(), {"out": out.bfloat16(), "rows": torch.tensor(len(x))}

    cfg = Config(stage, precision=Precision(BF16, output=FP32), executor=executor, has_aux=True)
    step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(0.1), cfg)
    _, opt_state = step_fn(*step_fn.init(params), torch.ones(4, 3))
    assert set(seen) == {FP32}
    assert opt_state.metrics["loss"].dtype == opt_state.metrics["aux"]["out"].dtype == FP32
    assert opt_state.metrics["aux"]["rows"].item() == 4
    assert (
        apply({k: x.bfloat16() for k, x in params.items()}, torch.ones(4, 3).bfloat16()).dtype
        == BF16
    )


# ------------------------------------------------------------------- masters of 16 bits
# float16 with a state in bfloat16 is refused, see tests/numerics/test_precision.py
LOW = [(BF16, None), (BF16, FP32), (BF16, BF16), (torch.float16, None)]


@pytest.mark.parametrize(
    ("stage", "low", "state"),
    # one at all stages, the others where leaves are gathered and where they aren't
    [
        (stage, *dtypes)
        for i, dtypes in enumerate(LOW)
        for stage in ((0, 1, 2, 3) if not i else (i - 1, 3))
    ],
)
def test_low_masters_and_states_are_kept_as_asked(stage: int, low: Any, state: Any) -> None:
    step_fn, opt = step_of(stage=stage, precision=Precision(low, master=low, optimizer=state))
    for _ in range(2):
        params, opt_state = opt = step_fn(*opt, TOKENS)
        assert opt_state.master is None
        assert {x.dtype for x in tree.leaves(params)} == {low}
        moments = tree.leaves((opt_state.inner.mu, opt_state.inner.nu))
        assert {x.dtype for x in moments} == {state or FP32}


@EXECUTORS
@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.quick("2-traced", "2-eager")
def test_stages_keep_the_same_low_masters(executor: Any, accum: int) -> None:
    precision = Precision(BF16, master=BF16, reduce=FP32, stochastic_rounding=accum == 1)
    found = []
    for stage in range(4):
        config = {"stage": stage, "executor": executor, "accum_steps": accum}
        step_fn, state = step_of(**config, precision=precision)
        for _ in range(3):
            state = step_fn(*state, TOKENS)
        found.append(tree.leaves(fzero.unshard(state[0])))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@EXECUTORS
def test_autocast_keeps_what_it_does_not_compute_with(executor: Any) -> None:
    # at stages 1 and 2 updated shards are published: in float32, also where gradients travel low
    step_fn, state = step_of(stage=2, precision=Precision(autocast=BF16), executor=executor)
    params, _ = step_fn(*state, TOKENS)
    for x in params.values():
        assert x.dtype == FP32
    assert not torch.equal(params["up.weight"], params["up.weight"].bfloat16().float())


def test_stochastic_rounding_moves_what_rounding_to_nearest_forgets() -> None:
    # steps of a 2048th of the weights, an eighth of what bfloat16 tells apart there
    weights, ends = torch.full((4096,), 1.0), {}
    for rounding in (True, False):
        precision = Precision(BF16, master=BF16, stochastic_rounding=rounding)
        step_fn = fzero.make_train_step(
            lambda params, x: (params["w"] * x).sum(),
            fzero.optim.sgd(2.0**-11),
            Config(precision=precision),
        )
        state = step_fn.init({"w": weights})
        for _ in range(16):
            state = step_fn(*state, -torch.ones(4096))
        ends[rounding] = fzero.unshard(state[0])["w"].float()
    assert torch.equal(ends[False], weights)
    assert ends[True].mean().item() == pytest.approx(1.0 + 16 * 2.0**-11, abs=5e-4)
