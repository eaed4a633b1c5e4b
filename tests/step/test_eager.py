"""The eager executor takes the same step as plain torch, for functions that nothing stages out."""

import collections
import functools
import itertools
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fzero
from fzero import ConfigError, FzeroError, RankMismatchError, TraceError
from fzero.optim import sgd
from tests.laws.models import Case, Mixed, Normed, Odd, error, train_ours, train_plain
from tests.ranks import fake_ranks, run_fresh, run_ranks

STEPS = 4


# --- parity with plain torch
def _cases() -> Iterator[tuple[str, Case]]:
    for stage, accum in itertools.product(range(4), (1, 4)):
        config = {"stage": stage, "accum_steps": accum, "clip_norm": 0.2 if accum == 4 else None}
        name = f"stage {stage}, accum {accum}"
        mixed = config | {"frozen": "frozen.*", "bucket_mb": 0.001}
        yield f"mixed, {name}", Case(Mixed, torch.float64, mixed)
        yield f"batchnorm, {name}", Case(Normed, torch.float64, config)
        yield f"odd, {name}", Case(Odd, torch.float64, config)


@pytest.mark.parametrize("name", [name for name, _ in _cases()])
@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_training_equals_plain_torch(world: int, name: str) -> None:
    for found in (by_name[name] for by_name in _errors(world)):
        assert isinstance(found, float), found
        assert found <= 1e-12


@functools.cache  # one job per world for all its cases
def _errors(world: int) -> list[dict[str, float | str]]:
    return run_ranks(world, _train_all, timeout=240)


def _train_all() -> dict[str, float | str]:
    world, rank = dist.get_world_size(), dist.get_rank()
    found: dict[str, float | str] = {}
    for name, case in _cases():
        try:
            ours = train_ours(case, world, rank, STEPS, executor="eager")
            found[name] = error(ours, train_plain(case, world, STEPS))
        except Exception:
            found[name] = traceback.format_exc()
    return found


def test_a_mesh_of_2_by_2_equals_plain_torch() -> None:
    assert max(run_ranks(4, _train_hybrid, timeout=120)) <= 1e-12


def _train_hybrid() -> float:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    errors = []
    for stage in range(4):
        case = Case(Mixed, torch.float64, {"stage": stage, "clip_norm": 0.2})
        ours = train_ours(case, 4, dist.get_rank(), STEPS, executor="eager", mesh=mesh)
        errors.append(error(ours, train_plain(case, 4, STEPS)))
    return max(errors)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", range(4))
def test_precisions_are_the_traced_executors_bit_for_bit(stage: int, precision: str) -> None:
    def run(executor: str) -> list[Tensor]:
        cfg = fzero.Config(stage=stage, precision=precision, executor=executor)  # pyright: ignore
        _, params, opt_state = _trained(_linear, {"w": _values(7, 5)}, cfg, _values(6, 7))
        return [fzero.unshard(params)["w"], *opt_state.metrics.values()]

    for a, b in zip(run("eager"), run("traced"), strict=True):
        assert torch.equal(a, b)


def _linear(params: Any, x: Tensor) -> Tensor:
    return torch.tanh(x.to(params["w"].dtype) @ params["w"]).float().square().mean()


def _values(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _trained(
    model_fn: Callable[..., Any], params: Any, cfg: fzero.Config, batch: Any, steps: int = 2
) -> tuple[fzero.TrainStep, Any, Any]:
    step_fn = fzero.make_train_step(model_fn, sgd(0.1), cfg)
    params, opt_state = step_fn.init(params)
    for _ in range(steps):
        params, opt_state = step_fn(params, opt_state, batch)
    return step_fn, params, opt_state


# --- what can't be staged out
def _branches(params: Any, x: Tensor) -> Tensor:
    y = x @ params["w"]
    return y.square().mean() if y.sum().item() > 0 else y.abs().mean()


def _through_numpy(params: Any, x: Tensor) -> Tensor:
    weights = torch.from_numpy(np.tanh((x @ params["w"]).detach().numpy()))
    return ((x @ params["w"]) * weights).mean()


def _loops(params: Any, x: Tensor) -> Tensor:
    y = x
    while y.norm() < 10:
        y = y @ params["w"] + y
    return y.mean()


def _old_function(params: Any, x: Tensor) -> Tensor:
    return _OldMatmul.apply(x, params["w"]).square().mean()


def _derivative_inside(params: Any, x: Tensor) -> Tensor:
    def inner(w: Tensor) -> Tensor:
        return (x @ w).tanh().sum()

    return torch.func.grad(inner)(params["w"]).square().sum() + inner(params["w"])


def _penalty(params: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad((x @ params["w"]).tanh().sum(), x, create_graph=True)
    return slope.square().mean()


class _OldMatmul(torch.autograd.Function):
    """Without `setup_context`: `torch.func` refuses it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:  # pyright: ignore
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore
        x, w = ctx.saved_tensors
        return grad @ w.t(), x.t() @ grad


@pytest.mark.parametrize("executor", ["traced", "eager"])
@pytest.mark.parametrize("stage", range(4))
def test_a_loss_that_depends_on_no_parameter_is_refused(executor: Any, stage: int) -> None:
    module = nn.Linear(5, 5)  # the usual slip: module(x) for apply(params, x)
    losses: list[Callable[..., Any]] = [
        lambda params, x: x.mean(),
        lambda params, x: module(x).mean(),
        lambda params, x: (x @ params["w"].detach()).mean(),
    ]
    for model_fn in losses:
        cfg = fzero.Config(stage=stage, executor=executor, donate=False)
        step_fn = fzero.make_train_step(model_fn, fzero.optim.adamw(0.1), cfg)
        params, opt_state = step_fn.init({"w": _values(5, 5)})
        before = fzero.unshard(params)["w"].clone()
        with pytest.raises(fzero.FzeroError, match="depends on no trained parameter"):
            step_fn(params, opt_state, _values(4, 5))
        assert torch.equal(fzero.unshard(params)["w"], before)


@pytest.mark.parametrize("executor", ["traced", "eager"])
@pytest.mark.parametrize("stage", range(4))
def test_a_parameter_that_is_read_past_the_params_is_refused(executor: Any, stage: int) -> None:
    module, x = nn.Linear(3, 2), torch.ones(4, 3)
    apply, params = fzero.functionalize(module)
    first, penalty = {k: v.clone() for k, v in params.items()}, module.weight.T

    def after(reads: Callable[[], Tensor]) -> Any:
        cfg = fzero.Config(stage=stage, executor=executor)
        step_fn = fzero.make_train_step(
            lambda p, x: apply(p, x).square().mean() + reads(), fzero.optim.sgd(0.1), cfg
        )
        return step_fn(*step_fn.init(params), x)[1].metrics["loss"]

    for reads in (
        lambda: module.weight.square().sum(),
        lambda: penalty.abs().sum(),
        lambda: module(x).mean(),
    ):
        with pytest.raises(fzero.TraceError, match=r"own parameter '\w+' beside apply"):
            after(reads)

    def teacher() -> Tensor:
        with torch.no_grad():
            return module(x).mean()

    # the values of the beginning, as a constant
    plain = apply(first, x).square().mean()
    for reads in (teacher, lambda: apply(first, x).mean()):
        torch.testing.assert_close(after(reads), (plain + module(x).mean()).detach())


@pytest.mark.parametrize("executor", ["traced", "eager"])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_under_inference_mode_is_the_same_step(executor: Any, stage: int) -> None:
    apply, full = fzero.functionalize(nn.Linear(3, 2))
    cfg = fzero.Config(stage=stage, executor=executor)

    def trained(inside: Callable[[int], bool]) -> Any:
        step_fn = fzero.make_train_step(
            lambda p, x: apply(p, x).square().mean(), fzero.optim.adamw(0.1), cfg
        )
        params, opt_state = step_fn.init(full)
        for i in range(3):
            with torch.inference_mode(inside(i)):
                params, opt_state = step_fn(params, opt_state, torch.full((4, 3), 1.0 + i))
        return fzero.unshard(params)

    expected = trained(lambda i: False)
    for inside in (lambda i: True, lambda i: i != 1):
        torch.testing.assert_close(trained(inside), expected, rtol=0, atol=0)


@pytest.mark.parametrize("executor", ["traced", "eager"])
def test_a_hook_on_a_parameter_is_refused_whenever_it_comes(executor: Any) -> None:
    module, x = nn.Linear(3, 2), torch.ones(4, 3)
    hooks = (
        lambda p: p.register_hook(torch.zeros_like),
        lambda p: p.register_post_accumulate_grad_hook(print),
    )
    apply, params = fzero.functionalize(module)
    cfg = fzero.Config(executor=executor)
    step_fn = fzero.make_train_step(
        lambda p, x: apply(p, x).square().mean(), fzero.optim.sgd(0.1), cfg
    )
    params, opt_state = step_fn.init(params)
    for register in hooks:
        params, opt_state = step_fn(params, opt_state, x)
        handle = register(module.bias)
        with pytest.raises(fzero.TraceError, match="'bias' has a hook"):
            step_fn(params, opt_state, x)
        with pytest.raises(fzero.TraceError, match="'bias' has a hook"):
            fzero.functionalize(module)
        handle.remove()


@pytest.mark.parametrize(
    "model_fn",
    [_branches, _through_numpy, _loops, _old_function, _derivative_inside, _penalty],
)
@pytest.mark.parametrize("stage", [1, 3])
def test_any_python_runs(model_fn: Callable[..., Any], stage: int) -> None:
    start, x = {"w": _values(5, 5), "other": _values(3)}, _values(4, 5)
    _, params, _ = _trained(model_fn, start, _eager(stage=stage), x)
    w = start["w"].clone()
    for _ in range(2):
        leaf = w.detach().requires_grad_()
        loss = model_fn({"w": leaf}, x)
        if loss.requires_grad:
            w = w - 0.1 * torch.autograd.grad(loss, leaf)[0]
    torch.testing.assert_close(fzero.unshard(params), {"w": w, "other": start["other"]})


def test_packed_sequences_run() -> None:
    apply, start = fzero.functionalize(nn.LSTM(3, 4))

    def model_fn(params: Any, batch: Any) -> Tensor:
        x, lengths = batch
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        return apply(params, packed)[0].data.square().mean()

    batch = (_values(5, 2, 3), torch.tensor([5, 2]))
    with pytest.raises(TraceError):
        _trained(model_fn, start, fzero.Config(), batch)
    _, params, _ = _trained(model_fn, start, _eager(), batch, steps=1)
    leaves = {k: x.clone().requires_grad_() for k, x in start.items()}
    grads = torch.autograd.grad(model_fn(leaves, batch), list(leaves.values()))
    for (name, x), grad in zip(start.items(), grads, strict=True):
        torch.testing.assert_close(fzero.unshard(params)[name], x - 0.1 * grad)


@pytest.mark.parametrize("executor", ["eager", "traced"])
@pytest.mark.parametrize("accum_steps", [1, 3])
def test_sparse_gradients_become_dense(executor: Any, accum_steps: int) -> None:
    def model_fn(params: Any, x: Tensor) -> Tensor:
        return F.embedding(x, params["w"], sparse=True).square().mean()

    start, tokens = {"w": _values(9, 4)}, torch.tensor([1, 1, 3])
    for stage in range(4):
        cfg = fzero.Config(stage=stage, accum_steps=accum_steps, executor=executor)
        _, params, _ = _trained(model_fn, start, cfg, tokens, steps=1)
        leaf = start["w"].clone().requires_grad_()
        (grad,) = torch.autograd.grad(F.embedding(tokens, leaf).square().mean(), leaf)
        torch.testing.assert_close(fzero.unshard(params)["w"], start["w"] - 0.1 * grad)


class _Frozen(torch.autograd.Function):
    """x * w, of which w shall not learn: its gradient is None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:  # pyright: ignore
        ctx.save_for_backward(w)
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        return grad * ctx.saved_tensors[0], None


@pytest.mark.parametrize("executor", ["eager", "traced"])
@pytest.mark.parametrize("accum_steps", [1, 2])
@pytest.mark.parametrize("used_again", [False, True])
def test_a_gradient_of_none_is_zero(executor: Any, accum_steps: int, used_again: bool) -> None:
    start, x = {"w": _values(4), "b": _values(4) + 1}, _values(2, 4)

    def model_fn(params: Any, x: Tensor) -> Tensor:
        loss = _Frozen.apply(x * params["b"], params["w"]).square().mean()  # pyright: ignore
        return loss + params["w"].square().sum() if used_again else loss

    leaves = {k: v.clone().requires_grad_() for k, v in start.items()}
    model_fn(leaves, x).backward()
    want = {k: v - 0.1 * (0 if v.grad is None else v.grad) for k, v in leaves.items()}
    for stage in range(4):
        cfg = fzero.Config(stage=stage, accum_steps=accum_steps, executor=executor)
        _, params, _ = _trained(model_fn, start, cfg, x, steps=1)
        torch.testing.assert_close(fzero.unshard(params), {k: v.detach() for k, v in want.items()})


def test_a_checkpoint_recomputes_with_the_parameters_of_the_call() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.drop = nn.Linear(5, 8), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=False) + x.sum()  # pyright: ignore

        def block(self, x: Tensor) -> Tensor:
            return self.drop(self.up(x).tanh()).square()

    net = Net()
    apply, start = fzero.functionalize(net)

    def plain(params: Any, x: Tensor) -> Tensor:
        net.forward = lambda x: net.block(x) + x.sum()
        try:
            return apply(params, x).mean()
        finally:
            del net.forward

    start = {k: x.clone() for k, x in start.items()}
    # after a step the parameters are no longer the module's
    _, ours, _ = _trained(lambda p, x: apply(p, x).mean(), start, _eager(), _values(3, 5))
    _, wanted, _ = _trained(plain, start, _eager(), _values(3, 5))
    torch.testing.assert_close(fzero.unshard(ours), fzero.unshard(wanted), rtol=0, atol=0)


# --- purity
def _eager(**fields: Any) -> fzero.Config:
    return fzero.Config(executor="eager", **fields)


def _dropping(params: Any, x: Tensor) -> Tensor:
    return F.dropout(x @ params["w"], 0.5).square().mean()


def test_randomness_is_a_function_of_seed_step_and_micro_batch() -> None:
    def losses(seed: int, accum: int = 1) -> list[float]:
        step_fn = fzero.make_train_step(
            _dropping, sgd(0.0), _eager(seed=seed, accum_steps=accum, donate=False)
        )
        params, opt_state = step_fn.init({"w": _values(5, 5)})
        found = []
        for _ in range(2):
            again = step_fn(params, opt_state, _values(1, 5).expand(4, 5))[1]
            params, opt_state = step_fn(params, opt_state, _values(1, 5).expand(4, 5))
            assert torch.equal(again.metrics["loss"], opt_state.metrics["loss"])
            found.append(opt_state.metrics["loss"].item())
        return found

    torch.manual_seed(3)
    before = torch.get_rng_state()
    first, second = losses(0)
    assert torch.equal(torch.get_rng_state(), before)
    assert first != second
    torch.manual_seed(4)
    assert losses(0) == [first, second]
    assert losses(1) != [first, second]
    assert losses(0, accum=4) != [first, second]


class OwnCheckpoint(torch.autograd.Function):
    """As Megatron writes it: the state of torch's global generator is read, and set in backward."""

    @staticmethod
    def forward(ctx: Any, fn: Callable[[Tensor], Tensor], w: Tensor) -> Tensor:
        ctx.fn, ctx.state = fn, torch.get_rng_state()
        ctx.save_for_backward(w)
        with torch.no_grad():
            return fn(w)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (w,) = ctx.saved_tensors
        now = torch.get_rng_state()
        torch.set_rng_state(ctx.state)
        with torch.enable_grad():
            w = w.detach().requires_grad_()
            out = ctx.fn(w)
        torch.set_rng_state(now)
        return None, *torch.autograd.grad(out, w, grads[0])


class ForkingCheckpoint(OwnCheckpoint):
    """As older ones do it."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with torch.random.fork_rng(devices=[]):
            return OwnCheckpoint.backward(ctx, *grads)


class CheckpointOfTheGenerator(OwnCheckpoint):
    """The same by torch's generator itself."""

    @staticmethod
    def forward(ctx: Any, fn: Callable[[Tensor], Tensor], w: Tensor) -> Tensor:
        state = torch.default_generator.get_state()
        out = OwnCheckpoint.forward(ctx, fn, w)
        ctx.state = state
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (w,) = ctx.saved_tensors
        torch.default_generator.set_state(ctx.state)
        with torch.enable_grad():
            w = w.detach().requires_grad_()
            out = ctx.fn(w)
        return None, *torch.autograd.grad(out, w, grads[0])


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("own", [OwnCheckpoint, ForkingCheckpoint, CheckpointOfTheGenerator])
def test_a_checkpoint_of_the_users_draws_its_mask_again(own: Any, stage: int) -> None:
    def model_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return own.apply(lambda w: F.dropout(w * x, 0.5), params["w"]).sum()

    step_fn = fzero.make_train_step(model_fn, sgd(1.0), _eager(donate=False, stage=stage))
    params, opt_state = step_fn.init({"w": _values(1000)})
    new, opt_state = step_fn(params, opt_state, torch.ones(1000))
    before, after = (fzero.unshard(tree)["w"] for tree in (params, new))
    # linear in w: with another mask than forward's the two would differ
    found = (before * (before - after)).sum()
    torch.testing.assert_close(found, opt_state.metrics["loss"], rtol=1e-3, atol=1e-3)


def test_a_selective_checkpoint_draws_its_mask_again() -> None:
    """Its modes call the operators that draw, from Python."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = op == torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def block(w: Tensor, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(F.dropout(x @ w))) * torch.rand(5)

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def selective(params: Any, x: Tensor) -> Tensor:
        out: Any = checkpoint(block, params["w"], x, use_reentrant=False, context_fn=contexts)
        return out.square().mean()

    _, plain, wanted = _trained(
        lambda p, x: block(p["w"], x).square().mean(), {"w": _values(5, 5)}, _eager(), _values(4, 5)
    )
    _, params, found = _trained(selective, {"w": _values(5, 5)}, _eager(), _values(4, 5))
    assert torch.equal(found.metrics["loss"], wanted.metrics["loss"])
    assert torch.equal(fzero.unshard(params)["w"], fzero.unshard(plain)["w"])


def test_threads_that_draw_from_torchs_generator_disturb_no_step() -> None:
    step_fn = fzero.make_train_step(
        lambda p, x: F.dropout(p["w"] * x).sum(), sgd(0.1), _eager(donate=False)
    )
    state = step_fn.init({"w": torch.ones(4000)})
    want = step_fn(*state, torch.ones(4000))[1].metrics["loss"].item()
    drawn: list[tuple[float, ...]] = []
    stop = threading.Event()

    def draw() -> None:
        while not stop.is_set():
            drawn.append(tuple(torch.rand(4).tolist()))

    thread = threading.Thread(target=draw)
    thread.start()
    losses = [step_fn(*state, torch.ones(4000))[1].metrics["loss"].item() for _ in range(30)]
    stop.set()
    thread.join()
    assert losses == [want] * 30
    assert len(set(drawn)) == len(drawn)


def test_ranks_draw_different_numbers() -> None:
    a, b = run_ranks(2, _draw)
    assert not torch.equal(a, b)


def _draw() -> Tensor:
    def model_fn(params: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.rand(8)
        return (params["w"] * mask).sum(), mask

    cfg = _eager(has_aux=True)
    return _trained(model_fn, {"w": torch.ones(8)}, cfg, torch.ones(1))[2].metrics["aux"]


def _scale_in_place(params: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        params["w"].mul_(2)
    return (x @ params["w"]).mean()


def _scale_a_view_in_place(params: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        params["w"].t()[0].zero_()
    return (x @ params["w"]).mean()


def _give_other_data(params: Any, x: Tensor) -> Tensor:
    params["w"].data = params["w"].data * 0.5
    return (x @ params["w"]).mean()


@pytest.mark.parametrize("model_fn", [_scale_in_place, _scale_a_view_in_place, _give_other_data])
@pytest.mark.parametrize("stage", range(4))
def test_a_parameter_changed_in_place_is_an_error(stage: int, model_fn: Any) -> None:
    with pytest.raises(FzeroError, match="'w' in place"):
        _trained(model_fn, {"w": _values(5, 5)}, _eager(stage=stage), _values(4, 5))


def test_a_batch_changed_in_place_is_an_error() -> None:
    def model_fn(params: Any, batch: Any) -> Tensor:
        return (batch["x"].sub_(1) @ params["w"]).mean()

    for others in ({}, {"a": "task", "b": 2, "c": None}):
        with pytest.raises(FzeroError, match=r"batch\['x'\] in place"):
            _trained(model_fn, {"w": _values(5, 5)}, _eager(), {**others, "x": _values(4, 5)})


Item = collections.namedtuple("Item", ["x", "scale"])


@pytest.mark.parametrize(
    "batch",
    [
        lambda x: (x, 2),
        lambda x: {"a": "task", "x": x, "y": None, "scale": 2.0},
        lambda x: Item(x, 2),
        lambda x: [x, torch.tensor(2.0, dtype=x.dtype), "task", True],
    ],
)
def test_a_batch_may_hold_what_is_no_tensor(batch: Any) -> None:
    def model_fn(params: Any, batch: Any) -> Tensor:
        x, scale = (batch["x"], batch["scale"]) if isinstance(batch, dict) else batch[:2]
        return (x @ params["w"]).square().mean() * scale

    start, given = {"w": _values(5, 5)}, batch(_values(4, 5))
    _, eager, _ = _trained(model_fn, start, _eager(), given)
    _, traced, _ = _trained(model_fn, start, fzero.Config(), given)
    torch.testing.assert_close(fzero.unshard(eager), fzero.unshard(traced))


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("executor", ["eager", "traced"])
def test_a_callers_no_grad_does_not_reach_a_step(stage: int, executor: Any) -> None:
    def model_fn(params: Any, x: Tensor) -> Tensor:
        return (x @ params["w"]).square().mean()

    start, x = {"w": _values(5, 5)}, _values(4, 5)
    cfg = fzero.Config(stage=stage, executor=executor)
    _, expected, _ = _trained(model_fn, start, cfg, x)
    with torch.no_grad():
        _, found, _ = _trained(model_fn, start, cfg, x)
    torch.testing.assert_close(fzero.unshard(found), fzero.unshard(expected))


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("executor", ["eager", "traced"])
def test_aux_and_state_are_no_views_of_the_batch(stage: int, executor: Any) -> None:
    def model_fn(params: Any, state: Any, x: Tensor) -> Any:
        return (x @ params["w"]).mean(), {"last": x[0]}, x.t()

    cfg = fzero.Config(stage=stage, executor=executor, has_aux=True)
    step_fn = fzero.make_train_step(model_fn, sgd(0.1), cfg)
    params, opt_state = step_fn.init({"w": _values(5, 5)}, {"last": torch.zeros(5)})
    x = _values(4, 5)
    before = x.clone()
    params, opt_state = step_fn(params, opt_state, x)
    x.zero_()  # as a loader that fills one buffer again and again
    torch.testing.assert_close(opt_state.metrics["aux"], before.t())
    torch.testing.assert_close(opt_state.model_state["last"], before[0])


@pytest.mark.parametrize("stage", range(4))
def test_aux_and_state_are_no_views_of_parameters(stage: int) -> None:
    def model_fn(params: Any, state: Any, x: Tensor) -> Any:
        return (x @ params["w"]).mean(), {"last": params["w"]}, params["w"].t()

    step_fn = fzero.make_train_step(model_fn, sgd(0.1), _eager(stage=stage, has_aux=True))
    start = _values(5, 5)
    params, opt_state = step_fn.init({"w": start}, {"last": torch.zeros(5, 5)})
    params, opt_state = step_fn(params, opt_state, _values(4, 5))
    assert not torch.equal(fzero.unshard(params)["w"], start)
    assert torch.equal(opt_state.metrics["aux"], start.t())
    assert torch.equal(opt_state.model_state["last"], start)


def _updated_by_a_model_that_takes_gradients(stage: int, executor: Any) -> float:
    """On a rank: how far from plain torch. The inner gradients are the mean over the ranks."""
    world, rank = dist.get_world_size(), dist.get_rank()
    cfg = fzero.Config(stage=stage, executor=executor)
    data = torch.randn(world, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    outside = torch.linspace(-1, 1, 4, dtype=torch.float64)
    params = {"w": outside.cos(), "rate": torch.tensor([0.1, 0.2], dtype=torch.float64)}

    def inner(u: Tensor, p: dict[str, Tensor], x: Tensor) -> Tensor:
        return (u**4 * x).sum() + p["rate"].sum() * u.square().sum()

    def model_fn(p: dict[str, Tensor], x: Tensor, grad: Any = None) -> Tensor:
        take = grad or (lambda f: fzero.grad(f, cfg))
        # of what is trained, and of what is not, with what is trained beside it or in a closure
        one = take(lambda p, x: inner(p["w"], p, x))(p, x)["w"]
        two = take(lambda u, p, x: inner(u["u"], p, x))({"u": outside}, p, x)["u"]
        three = take(lambda u, x: inner(u["u"], p, x))({"u": outside}, x)["u"]
        return sum((y**3 * x).sum() for y in (p["w"] - 0.1 * one, two, three))  # pyright: ignore

    def of_all(f: Any) -> Any:
        return torch.func.grad(lambda *args: torch.stack([f(*args[:-1], x) for x in data]).mean())

    def by_all(p: dict[str, Tensor]) -> Tensor:
        return torch.stack([model_fn(p, x, of_all) for x in data]).mean()

    step_fn = fzero.make_train_step(model_fn, sgd(0.01), cfg)
    state = step_fn(*step_fn.init({k: v.clone() for k, v in params.items()}), data[rank])
    found, grads = fzero.unshard(state[0]), torch.func.grad(by_all)(params)
    return max(float((found[k] - params[k] + 0.01 * grads[k]).abs().max()) for k in params)


@pytest.mark.parametrize("executor", ["eager", "traced"])
def test_a_model_may_take_gradients_inside(executor: Any) -> None:
    for stage in (0, 3):
        for found in run_ranks(2, _updated_by_a_model_that_takes_gradients, stage, executor):
            assert found <= 1e-12


def test_lower_says_that_there_is_no_program() -> None:
    step_fn, params, opt_state = _trained(_linear, {"w": _values(5, 5)}, _eager(), _values(4, 5))
    with pytest.raises(TraceError, match="executor='traced'"):
        step_fn.lower(params, opt_state, _values(4, 5))


# --- collectives
@pytest.mark.parametrize(
    ("stage", "gathers", "reductions"), [(0, 0, 0), (1, 1, 1), (2, 1, 1), (3, 1, 1)]
)
def test_leaves_share_collectives(stage: int, gathers: int, reductions: int) -> None:
    def model_fn(params: Any, x: Tensor) -> Tensor:
        for w in params:
            x = torch.tanh(x @ w)
        return x.mean()

    with fake_ranks(4):
        start = [_values(8, 8) for _ in range(20)]
        step_fn, params, opt_state = _trained(model_fn, start, _eager(stage=stage), _values(4, 8))
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            step_fn(params, opt_state, _values(4, 8))
    names = [event.name.rpartition("::") for event in profiled.events() or ()]
    sent = [name for library, _, name in names if library == "_c10d_functional"]
    assert sum(name.startswith("all_gather_into_tensor") for name in sent) == gathers
    assert sent.count("reduce_scatter_tensor") == reductions
    assert sent.count("all_reduce") == (2 if stage == 0 else 1)  # one for loss and norm


def test_ranks_that_use_different_leaves_at_stage_2() -> None:
    for found in run_ranks(2, _use_own_leaf, 2):
        torch.testing.assert_close(found, {"a": torch.full((3,), 0.95), "b": torch.full((3,), 0.9)})


def _use_own_leaf(stage: int) -> Any:
    def model_fn(params: Any, x: Tensor) -> Tensor:
        return params["a"].sum() if x.item() == 0 else params["b"].sum() * 2

    start = {"a": torch.ones(3), "b": torch.ones(3)}
    x = torch.tensor(dist.get_rank())
    _, params, _ = _trained(model_fn, start, _eager(stage=stage), x, steps=1)
    return fzero.unshard(params)


def test_ranks_that_gather_different_leaves_raise_at_stage_3() -> None:
    for message in run_ranks(2, _gather_own_leaf):
        assert "all_gather of a" in message
        assert "all_gather of b" in message
        assert "fzero.opaque" in message


def test_modules_that_some_ranks_run_are_no_matter_of_an_eager_step_at_stage_3() -> None:
    params = {"experts": [{"w": torch.ones(3)}] * 2}
    together = {"gather_together": ["experts"]}
    for cfg in (_eager(stage=2, **together), fzero.Config(stage=3, **together)):
        fzero.make_train_step(lambda params, x: x.sum(), sgd(0.1), cfg).init(params)
    cfg = _eager(stage=3, **together)
    with pytest.raises(ConfigError, match=r"gather_together.*opaque.*Engine"):
        fzero.make_train_step(lambda params, x: x.sum(), sgd(0.1), cfg).init(params)


def _gather_own_leaf() -> str:
    try:
        _use_own_leaf(3)
    except RankMismatchError as error:
        return str(error)
    return "no error"


# --- compiled parts
def _compiled_step() -> str:
    dist.init_process_group("gloo")
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    module[0].compile(backend="eager")
    apply, params = fzero.functionalize(module)
    step_fn = fzero.make_train_step(
        lambda params, x: apply(params, x).sum(), sgd(0.1), fzero.Config(executor="eager")
    )
    try:
        step_fn(*step_fn.init(params), torch.ones(2, 3))
    except FzeroError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", [2, 3])
def test_a_compiled_part_draws_what_it_draws_uncompiled(stage: int) -> None:
    def part(x: Tensor, w: Tensor) -> Tensor:
        return (F.dropout(torch.sin(x @ w)) + torch.rand(5) * torch.randn_like(x)).cos()

    losses = []
    for fn in (part, torch.compile(part, backend="aot_eager")):
        step_fn = fzero.make_train_step(
            lambda p, x, fn=fn: fn(fn(x, p["w"]), p["w"]).square().mean(),
            sgd(0.1),
            _eager(donate=False, stage=stage),
        )
        state = step_fn.init({"w": _values(5, 5)})
        before = torch.get_rng_state()
        for _ in range(3):  # compiled in the first
            new, opt_state = step_fn(*state, _values(4, 5))
            losses.append([opt_state.metrics["loss"].item(), *fzero.unshard(new)["w"][0].tolist()])
        assert torch.equal(torch.get_rng_state(), before)
    assert losses == [losses[0]] * 6


def test_a_compiled_part_that_reads_sharded_leaves_is_refused_in_words() -> None:
    for said in run_fresh(2, _compiled_step, timeout=120):
        assert "torch.compile can't follow its gather" in said


# --- a leaf that isn't split is reduced where it is used, and gathered nowhere
def _scale_of_one_rank() -> str:
    dist.init_process_group("gloo")
    rank, params = dist.get_rank(), {"w": torch.ones(4, 4), "scale": torch.tensor(2.0)}

    def model_fn(params: Any, x: Tensor) -> Tensor:
        out = (x @ params["w"]).sum()
        return out * params["scale"] if rank else out

    step_fn = fzero.make_train_step(
        model_fn, sgd(0.1), fzero.Config(executor="eager", timeout=60.0)
    )
    state = step_fn.init(params)
    dist.barrier()
    try:
        step_fn(*state, torch.ones(2, 4))
    except RankMismatchError as error:
        return str(error)
    return ""


def test_a_rank_that_goes_on_to_the_update_is_elsewhere_and_not_late() -> None:
    for said in run_fresh(2, _scale_of_one_rank, timeout=120):
        assert "rank 0 came to 'eager step function 1, update after micro-batch 1'" in said


class Counting(nn.Module):
    """Leaves a number, and what most modules leave, in its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.n, self.flag = 0, False

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        self.flag, self.last = True, self.linear(x)
        return self.last


def test_a_number_that_is_put_back_is_told_of_once() -> None:
    """The traced executor refuses it where it counts; there is no recording to tell that here."""
    module = Counting()
    apply, params = fzero.functionalize(module)
    step_fn = fzero.make_train_step(
        lambda p, x: apply(p, x).sum(), sgd(0.1), fzero.Config(executor="eager")
    )
    state = step_fn.init(params)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            state = step_fn(*state, torch.ones(2, 3))
    assert "attribute 'n' of the module (Counting) from 0 to 1" in str(told[0].message)
    assert len(told) == 1
    assert told[0].filename == __file__
    assert module.n == 0
