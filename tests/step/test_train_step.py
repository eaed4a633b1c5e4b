"""The step function from outside: what it takes, what it gives, what it keeps."""

import copy
import pickle
import warnings
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import fzero
from fzero import Config, LossScale, Program, tree
from fzero.errors import ShardError
from tests.ranks import fake_ranks, run_ranks

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
SGD = fzero.optim.sgd(0.1, momentum=0.9)


def _params() -> dict[str, Tensor]:
    return {"b": torch.zeros(3), "w": torch.arange(15.0).reshape(5, 3) / 10}


def _loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return (x @ params["w"] + params["b"]).square().mean()


X = torch.linspace(-1, 1, 40).reshape(8, 5)


def _full(value: Any) -> list[Tensor]:
    return tree.leaves(fzero.unshard(value))


def _equal(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(_full(a), _full(b), strict=True))


class _Counted:
    """A model function that knows how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, params: Any, batch: Any) -> Tensor:
        self.calls += 1
        return _loss(params, tree.leaves(batch)[0])


# ---- staging out
def test_a_state_tells_what_is_on_this_rank_and_in_all() -> None:
    with fake_ranks(4):
        step_fn = fzero.make_train_step(
            lambda p, x: (p["w"] * x).sum(), fzero.optim.sgd(0.1, momentum=0.9)
        )
        _, state = step_fn.init({"w": torch.ones(8, 2**20)})
    assert "world 4, 8,388,608 parameters" in repr(step_fn)
    assert repr(state) == "OptState(step=0; inner=2 tensors, 8.0 MiB here of 32.0 MiB)"


def test_the_learning_rate_of_a_step_is_told() -> None:
    rates = fzero.optim.linear(0.5, 0.1, 4)
    opts = [
        fzero.optim.sgd(rates),
        fzero.optim.chain(fzero.optim.clip_by_global_norm(1.0), fzero.optim.adam(rates)),
    ]
    for opt in opts:
        step_fn = fzero.make_train_step(lambda p, x: (p["w"] * x).sum(), opt)
        params, state = step_fn.init({"w": torch.ones(3)})
        for expected in (0.5, 0.4, 0.3):
            params, state = step_fn(params, state, torch.ones(3))
            assert float(state.metrics["lr"]) == pytest.approx(expected)
        assert repr(step_fn) == "TrainStep(<lambda>, Config(stage=3), world 1, 3 parameters)"
        assert repr(state).startswith("OptState(step=3; inner=")
    both = fzero.optim.chain(fzero.optim.sgd(0.1), fzero.optim.sgd(0.2))
    step_fn = fzero.make_train_step(lambda p, x: (p["w"] * x).sum(), both)
    _, state = step_fn(*step_fn.init({"w": torch.ones(3)}), torch.ones(3))
    assert "lr" not in state.metrics


@STAGES
def test_a_shape_is_staged_out_once(stage: int) -> None:
    model_fn = _Counted()
    step_fn = fzero.make_train_step(model_fn, SGD, Config(stage=stage))
    state = step_fn.init(_params())
    step_fn.lower(*state, X)
    once = model_fn.calls
    assert once >= 1
    for _ in range(3):
        state = step_fn(*state, X)
    state = step_fn(*step_fn.init(_params()), X)
    assert model_fn.calls == once
    state = step_fn(*state, X[:4])
    assert model_fn.calls == 2 * once
    state = step_fn(*step_fn(*state, X), X[:4])
    assert model_fn.calls == 2 * once
    step_fn(*state, {"x": X})  # another structure
    assert model_fn.calls == 3 * once


@STAGES
def test_the_update_is_recorded_once_for_batches_of_all_shapes(stage: int) -> None:
    recorded: list[str] = []

    def seen(program: Program) -> Program:
        recorded.append(program.name)
        return program

    rate, cfg = [0.1], Config(stage=stage, passes=(seen,))
    optimizer = fzero.optim.sgd(lambda step: torch.full((), rate[0]), momentum=0.9)
    step_fn = fzero.make_train_step(_loss, optimizer, cfg)
    state = step_fn.init(_params())
    for batch in (X, X[:4], X[:6]):
        state = step_fn(*state, batch)
    assert recorded.count("gradients") == 3
    assert recorded.count("update") == 1
    # what is predicted is that of a step that never saw another shape
    program = step_fn.lower(*state, X[:6])
    alone = fzero.make_train_step(_loss, optimizer, cfg)
    assert str(program) == str(alone.lower(*alone.init(_params()), X[:6], like=program))
    assert program.peak_bytes() < step_fn.lower(*state, X).peak_bytes()
    # and it is recorded anew where what it read has changed
    recorded.clear()
    rate[0] = 0.0
    before = [x.clone() for x in tree.leaves(fzero.unshard(state[0]))]
    state = step_fn(*state, X[:2])
    assert recorded.count("update") == 1
    for x, y in zip(before, _full(state[0]), strict=True):
        assert torch.equal(x, y)


def test_an_update_is_recorded_anew_where_it_sees_more_than_gradients() -> None:
    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return _loss(params, x.float()).to(x.dtype)

    step_fn = fzero.make_train_step(loss, SGD)
    state = step_fn.init(_params())
    state = step_fn(*state, X)
    state = step_fn(*state, X)
    state = step_fn(*state, X[:4].double())
    assert state[1].metrics["loss"].dtype == torch.float64


@STAGES
@pytest.mark.parametrize("accum_steps", [1, 2])
def test_a_tensor_that_comes_twice_may_be_two_at_the_next_call(
    stage: int, accum_steps: int
) -> None:
    def model_fn(params: Any, batch: Any) -> Tensor:
        return (batch["x"] @ params["w"] - batch["y"] @ params["w"] - 1).square().mean()

    cfg = Config(stage=stage, accum_steps=accum_steps, donate=False)
    step_fn = fzero.make_train_step(model_fn, SGD, cfg)
    state = step_fn.init(_params())
    step_fn(*state, {"x": X, "y": X})
    batch = {"x": X, "y": 2 * X}
    loss = step_fn(*state, batch)[1].metrics["loss"]
    torch.testing.assert_close(loss, model_fn(_params(), batch))


def _asked(what: str, x: Tensor, y: Tensor) -> bool:
    return {"is": x is y, "grad": x.requires_grad, "leaf": x.is_leaf}[what]


@pytest.mark.parametrize("executor", ["traced", "eager"])
@pytest.mark.parametrize("what", ["is", "grad", "leaf"])
@pytest.mark.parametrize("accum_steps", [1, 2])
def test_what_python_asks_of_a_batch_is_asked_at_each_call(
    executor: Any, what: str, accum_steps: int
) -> None:
    def model_fn(params: Any, batch: Any) -> Tensor:
        x, y = batch
        factor = 2 if _asked(what, x, y) else 3
        return factor * (x @ params["w"] * (y @ params["w"] + 1)).mean()

    if what != "is" and accum_steps > 1:  # a part of a tensor is no leaf, and that of one is one
        return
    cfg = Config(executor=executor, accum_steps=accum_steps, donate=False)
    step_fn = fzero.make_train_step(model_fn, SGD, cfg)
    state = step_fn.init(_params())
    asking = X.clone().requires_grad_()
    for other in (False, True, False, True):
        others = {"is": (X, X), "grad": (asking, X), "leaf": (asking * 1, X)}
        batch = others[what] if other else (X, 2 * X)
        loss = step_fn(*state, batch)[1].metrics["loss"]
        torch.testing.assert_close(loss, model_fn(_params(), batch).detach())


@STAGES
@pytest.mark.parametrize("accum_steps", [1, 2])
def test_what_a_step_writes_to_one_of_a_batch_is_in_the_other_that_is_the_same(
    stage: int, accum_steps: int
) -> None:
    def model_fn(params: Any, batch: Any) -> Tensor:
        x, y = batch
        x.mul_(2)
        return (x @ params["w"] - y @ params["w"] - 1).square().mean()

    cfg = Config(stage=stage, accum_steps=accum_steps, donate=False)
    step_fn = fzero.make_train_step(model_fn, SGD, cfg)
    state = step_fn.init(_params())
    for batch in [(X, X + 1), (X, X)]:
        copy = X.clone()  # which plain PyTorch writes to
        expected = model_fn(_params(), (copy, copy if batch[1] is X else X + 1))
        loss = step_fn(*state, batch)[1].metrics["loss"]
        torch.testing.assert_close(loss, expected)
    memory = torch.linspace(-1, 1, 60).reshape(12, 5)
    # parts of one memory are right where nobody writes, or where they lie apart
    assert step_fn(*state, (memory[:4], memory[4:8]))[1].metrics["loss"].isfinite()
    with pytest.raises(fzero.FzeroError, match=r"batch\.0 in place"):
        step_fn(*state, (memory[:8], memory[2:10]))


class _Slots(NamedTuple):
    sum: Any
    sizes: Any
    before: Any


class _OneTensorInTwoSlots:
    """An optimizer of pure functions, whose state starts with one tensor under several names."""

    def __init__(self, start: str) -> None:
        self.start = start

    def init(self, params: Any) -> _Slots:
        zeros = tree.map(torch.zeros_like, params)
        if self.start == "views":
            return _Slots(zeros, tree.map(lambda x: x.view_as(x), zeros), params)
        if self.start == "numbers":
            zeros = tree.map(lambda x: x.new_zeros(()).expand(x.shape), params)
        return _Slots(zeros, zeros, params)

    def update(self, grads: Any, state: _Slots, params: Any) -> tuple[Any, _Slots]:
        total = tree.map(lambda m, g: 0.9 * m + g, state.sum, grads)
        sizes = tree.map(lambda s, m: s + m.abs(), state.sizes, total)
        before = tree.map(lambda b, p: (b + p) / 2, state.before, params)
        updates = tree.map(lambda m, s, b: -(0.1 * m + 0.01 * s + 0.02 * b), total, sizes, before)
        return updates, _Slots(total, sizes, before)


@STAGES
@pytest.mark.parametrize("start", ["a tensor", "views", "numbers"])
def test_an_optimizers_state_may_start_with_one_tensor_in_two_slots(stage: int, start: str) -> None:
    opt = _OneTensorInTwoSlots(start)
    step_fn = fzero.make_train_step(_loss, opt, Config(stage=stage))
    params, opt_state = step_fn.init(_params())
    plain: Any = _params()
    state = opt.init(plain)
    for _ in range(3):
        params, opt_state = step_fn(params, opt_state, X)
        given = {k: v.detach().requires_grad_() for k, v in plain.items()}
        grads = torch.autograd.grad(_loss(given, X), list(given.values()))
        updates, state = opt.update(dict(zip(given, grads, strict=True)), state, plain)
        plain = {k: plain[k] + updates[k] for k in plain}
    torch.testing.assert_close(_full(params), tree.leaves(plain))


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("executor", ["traced", "eager"])
def test_a_donated_leaf_in_the_memory_of_another_is_refused(stage: int, executor: Any) -> None:
    def model_fn(params: Any, teacher: Any, x: Tensor) -> Any:
        return _loss(params, x) + (params["w"] - teacher["w"]).square().sum(), teacher

    cfg = Config(stage=stage, executor=executor)
    step_fn = fzero.make_train_step(model_fn, SGD, cfg)
    params, opt_state = step_fn.init(_params(), _params())
    params, opt_state = step_fn(params, opt_state, X)
    # a teacher that is the student of now, and would go on as that does
    with pytest.raises(
        fzero.ShardError, match=r"params\['b'\] and leaf 0 of opt_state.model_state"
    ):
        step_fn(params, opt_state._replace(model_state=params), X)
    teacher = fzero.tree_map(torch.clone, params)
    _, opt_state = step_fn(params, opt_state._replace(model_state=teacher), X)
    assert _equal(opt_state.model_state, teacher)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_a_leaf_may_be_named_key(rate: float) -> None:
    def model_fn(params: Any, x: Tensor) -> Tensor:
        return (F.dropout(x, rate) @ params["key"] + params["query"]).square().mean()

    start = {"key": _params()["w"], "query": _params()["b"]}
    losses = []
    for executor in ("traced", "eager"):
        step_fn = fzero.make_train_step(model_fn, SGD, Config(executor=executor))
        losses.append(step_fn(*step_fn.init(start), X)[1].metrics["loss"])
    assert losses[0].isfinite()
    if not rate:
        torch.testing.assert_close(losses[0], losses[1])


def test_more_than_8_kinds_of_batch_warn_once_and_say_what_changed() -> None:
    step_fn = fzero.make_train_step(_Counted(), SGD)
    state = step_fn.init(_params())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows in range(1, 9):
            state = step_fn(*state, {"x": X[:rows]})
        for rows in range(1, 9):
            state = step_fn(*state, {"x": X[:rows]})
    said = r"batch\['x'\] from float32 \(8, 5\).*to .*\(9, 5\)"
    with pytest.warns(UserWarning, match=said) as told:
        state = step_fn(*state, {"x": torch.ones(9, 5)})
    assert len(told) == 1
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step_fn(*state, {"x": torch.ones(10, 5)})


@STAGES
def test_lower_tells_and_changes_nothing(stage: int) -> None:
    step_fn = fzero.make_train_step(_loss, SGD, Config(stage=stage, accum_steps=2))
    state = step_fn.init(_params())
    before = [x.clone() for x in _full(state)]
    program = step_fn.lower(*state, X)
    assert all(torch.equal(a, b) for a, b in zip(before, _full(state), strict=True))
    assert "w" in str(program)
    assert program.peak_bytes() > 0
    assert program.collectives() == []
    other = fzero.make_train_step(_loss, SGD, Config(stage=stage, accum_steps=2))
    assert _equal(step_fn(*state, X), other(*other.init(_params()), X))


# ---- what goes in
class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@pytest.mark.parametrize("accum", [1, 4])
@pytest.mark.parametrize(
    "batch",
    [
        X,
        (X, X),
        [X, {"a": None}],
        {"z": X, "a": (X.long(),)},
        Pair(X, X > 0),
        (X, torch.tensor(2.0)),
        (X.t().contiguous().t(), X[:, :0]),
    ],
    ids=range(7),
)
def test_a_batch_is_any_tree(batch: Any, accum: int) -> None:
    seen = []

    def model_fn(params: Any, given: Any) -> Tensor:
        seen.append((tree.flatten(given)[1], [x.shape for x in tree.leaves(given)]))
        rows = [x for x in tree.leaves(given) if x.shape == (8 // accum, 5)]
        return torch.stack([_loss(params, x.float()) for x in rows]).sum()

    step_fn = fzero.make_train_step(model_fn, SGD, Config(accum_steps=accum))
    _, opt_state = step_fn(*step_fn.init(_params()), batch)
    spec, shapes = seen[0]
    assert spec == tree.flatten(batch)[1]
    rows = [(x.shape[0] // accum, *x.shape[1:]) if x.dim() else () for x in tree.leaves(batch)]
    assert [tuple(shape) for shape in shapes] == rows
    assert opt_state.metrics["loss"] > 0


@STAGES
def test_parameters_of_a_module_are_taken_as_they_are(stage: int) -> None:
    module = nn.Linear(5, 3)
    kept = [p.detach().clone() for p in module.parameters()]
    step_fn = fzero.make_train_step(lambda p, x: F.linear(x, *p).mean(), SGD, Config(stage=stage))
    state = step_fn.init((module.weight, module.bias))
    for _ in range(2):
        state = step_fn(*state, X)
    assert all(torch.equal(a, b) for a, b in zip(kept, module.parameters(), strict=True))
    assert not any(x.requires_grad for x in tree.leaves(state))
    assert all(p.grad is None for p in module.parameters())


@STAGES
def test_a_state_goes_from_one_step_function_to_the_next(stage: int) -> None:
    cfg = Config(stage=stage, clip_norm=0.1)
    first, second = (fzero.make_train_step(_loss, SGD, cfg) for _ in range(2))
    state = first(*first.init(_params()), X)
    expected = fzero.make_train_step(_loss, SGD, cfg)
    reference = expected(*expected(*expected.init(_params()), X), X)
    assert _equal(second(*state, X), reference)  # without init


# ---- what comes out
METRICS = {"loss", "grad_norm", "nonfinite", "skipped", "loss_scale", "lr"}


def _metrics(stage: int) -> dict[str, Tensor]:
    step_fn = fzero.make_train_step(_loss, SGD, Config(stage=stage))
    params, opt_state = step_fn(*step_fn.init(_params()), X[dist.get_rank() :][:3])
    assert all(isinstance(x, DTensor) == (stage == 3) for x in params.values())
    momentum = tree.leaves(opt_state.inner.trace)
    assert all(isinstance(x, DTensor) == (stage >= 1) for x in momentum)
    assert [x.shape for x in momentum] == [p.shape for p in params.values()]
    return opt_state.metrics


@STAGES
def test_metrics_are_0_d_and_the_same_on_every_rank(stage: int) -> None:
    first, second = run_ranks(2, _metrics, stage)
    assert first.keys() == METRICS
    assert all(x.shape == () for x in first.values())
    assert first == second
    losses = [_loss(_params(), X[rank:][:3]) for rank in range(2)]
    torch.testing.assert_close(first["loss"], torch.stack(losses).mean())


@STAGES
@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("executor", ["traced", "eager"])
def test_what_shares_memory_with_the_inputs_is_not_overwritten(
    stage: int, accum: int, executor: Any
) -> None:
    """aux and model state may be the parameters themselves, which a donated step writes over."""

    def model_fn(params: Any, state: Any, x: Tensor) -> Any:
        return _loss(params, x), {"w": params["w"]}, (params["w"], params["w"].t()[0], x)

    outputs = []
    for donate in (True, False):
        cfg = Config(stage=stage, has_aux=True, donate=donate, accum_steps=accum, executor=executor)
        step_fn = fzero.make_train_step(model_fn, SGD, cfg)
        params, opt_state = step_fn.init(_params(), {"w": torch.zeros(5, 3)})
        params, opt_state = step_fn(params, opt_state, X)
        outputs.append([opt_state.model_state["w"], *opt_state.metrics["aux"]])
        assert torch.equal(outputs[-1][0], _params()["w"])
    for a, b in zip(*outputs, strict=True):
        assert torch.equal(a, b)


@STAGES
@pytest.mark.parametrize("accum", [1, 2])
def test_gradients_that_share_memory_are_summed_apart(stage: int, accum: int) -> None:
    def model_fn(params: Any, x: Tensor) -> Tensor:  # the gradients of a and b are one tensor
        return ((params["a"] + params["b"]) * x.mean(0)).sum() + params["c"].sum()

    start = {name: torch.ones(5) for name in "abc"}
    step_fn = fzero.make_train_step(
        model_fn, fzero.optim.sgd(1.0), Config(stage=stage, accum_steps=accum)
    )
    params, _ = step_fn(*step_fn.init(start), X)
    grad = X.mean(0)
    for name, expected in (("a", 1 - grad), ("b", 1 - grad), ("c", torch.zeros(5))):
        torch.testing.assert_close(fzero.unshard(params[name]), expected)


# ---- low precision
def _low(stage: int, steps: int) -> tuple[dict[str, Tensor], set[torch.dtype], set[torch.dtype]]:
    step_fn = fzero.make_train_step(_loss, SGD, Config(stage=stage, precision="bf16"))
    params, opt_state = step_fn.init(_params())
    for step in range(steps):
        # a batch comes in the dtype that the model function asks for
        batch = (X[dist.get_rank() * 4 :][:4] + step).bfloat16()
        params, opt_state = step_fn(params, opt_state, batch)
    high = params if opt_state.master is None else opt_state.master
    dtypes = ({x.dtype for x in tree.leaves(tree_)} for tree_ in (params, high))
    return fzero.unshard(high), *dtypes  # pyright: ignore


@STAGES
def test_bf16_equals_the_same_written_by_hand(stage: int) -> None:
    steps = 5
    masters = _params()
    momentum = {k: torch.zeros_like(v) for k, v in masters.items()}
    for step in range(steps):
        grads = []
        for rank in range(2):  # computed in bfloat16, reduced and applied in float32
            low = {k: v.bfloat16().requires_grad_() for k, v in masters.items()}
            loss = _loss(low, (X[rank * 4 :][:4] + step).bfloat16())
            grads.append(torch.autograd.grad(loss, list(low.values())))
        for name, a, b in zip(masters, *grads, strict=True):
            momentum[name] = 0.9 * momentum[name] + (a.float() + b.float()) / 2
            masters[name] = masters[name] - 0.1 * momentum[name]
    for ours, low, high in run_ranks(2, _low, stage, steps):
        for name, x in ours.items():
            assert (x - masters[name]).abs().max() <= 2**-6 * (x - _params()[name]).abs().max()
        assert high == {torch.float32}
        assert low == {torch.float32 if stage == 3 else torch.bfloat16}


@pytest.mark.parametrize("executor", ["traced", "eager"])
@pytest.mark.parametrize("scale", [2.0**10, 1000.0])
def test_a_loss_scale_leaves_gradients_of_float64_in_float64(scale: float, executor: Any) -> None:
    def trained(loss_scale: float | None) -> list[Tensor]:
        cfg = Config(accum_steps=3, loss_scale=loss_scale, executor=executor)  # a third of the mean
        step_fn = fzero.make_train_step(_loss, SGD, cfg)
        state = step_fn.init({name: x.double() for name, x in _params().items()})
        return _full(step_fn(*state, torch.cat([X, X, X]).double())[0])

    for x, y in zip(trained(scale), trained(None), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-14, atol=1e-14)


def _overflow(stage: int) -> list[tuple[bool, float, bool]]:
    scale = LossScale(init=2.0**10, hysteresis=1, window=2)
    cfg = Config(stage=stage, precision="fp16", loss_scale=scale, clip_norm=1.0)
    step_fn = fzero.make_train_step(_loss, SGD, cfg)
    params, opt_state = step_fn.init(_params())
    seen = []
    for step in range(6):
        x = X.half()
        if step == 2 and dist.get_rank() == 1:
            x = x * 1e4
        held = (params, opt_state.inner, opt_state.master)
        before = [t.clone() for t in _full(held)]
        params, opt_state = step_fn(params, opt_state, x)
        held = (params, opt_state.inner, opt_state.master)
        same = all(torch.equal(a, b) for a, b in zip(before, _full(held), strict=True))
        metrics = opt_state.metrics
        assert metrics["skipped"] == metrics["nonfinite"]
        seen.append((bool(metrics["skipped"]), metrics["loss_scale"].item(), same))
    return seen


@STAGES
def test_an_overflow_on_one_rank_is_skipped_on_all(stage: int) -> None:
    good, bad = (False, 2.0**10, False), (True, 2.0**11, True)
    after = [(False, 2.0**10, False)] * 2 + [(False, 2.0**11, False)]
    assert run_ranks(2, _overflow, stage) == [[good, good, bad, *after]] * 2


# ---- helpers
@pytest.mark.parametrize("executor", ["traced", "eager"])
def test_parameters_without_values_meet_no_batch_that_has_some(executor: Any) -> None:
    apply, params = fzero.functionalize(torch.nn.Linear(3, 1, device="meta"))
    cfg = Config(executor=executor, donate=False)
    step_fn = fzero.make_train_step(lambda p, x: apply(p, x).mean(), SGD, cfg)
    state = step_fn.init(params)
    said = r"params\['bias'\] is on the meta device.*batch is on cpu.*step_fn\.init\(build\)"
    with pytest.raises(fzero.ShardError, match=said):
        step_fn(*state, torch.ones(2, 3))
    if executor == "traced":  # a plan
        assert step_fn.lower(*state, torch.ones(2, 3, device="meta")).peak_bytes()


def test_a_number_that_changes_with_the_batch_is_named_with_its_values() -> None:
    step_fn = fzero.make_train_step(lambda p, b: (p["w"] * b["x"] * b["t"]).mean(), SGD)
    state = step_fn.init({"w": torch.ones(3)})
    for i in range(8):
        state = step_fn(*state, {"x": torch.ones(2, 3), "t": i / 10})
    said = r"changed batch\['t'\] from 0.7 to 0.8\. .*pass a tensor"
    with pytest.warns(UserWarning, match=said):
        step_fn(*state, {"x": torch.ones(2, 3), "t": 0.8})


def test_a_copy_of_a_step_function_is_another_that_gives_the_same() -> None:
    step_fn = fzero.make_train_step(_loss, SGD, Config(donate=False))
    start = step_fn.init(_params())
    once = step_fn(*start, X)
    for copied in (copy.copy(step_fn), copy.deepcopy({"step": step_fn})["step"]):
        assert copied is not step_fn
        assert _equal(copied(*start, X)[0], once[0])
    with pytest.raises(fzero.FzeroError, match=r"can't be pickled.*save_programs"):
        pickle.dumps(step_fn)


def test_parameters_that_a_module_does_not_train_are_told_of() -> None:
    """A tree of tensors is trained, so what was a low-rank adapter would be all of the model."""

    def told(frozen: Any, *, untrained: int = 1) -> list[str]:
        module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        for layer in module[:untrained]:
            layer.requires_grad_(False)
        apply, params = fzero.functionalize(module)
        step_fn = fzero.make_train_step(
            lambda p, x: apply(p, x).sum(), fzero.optim.sgd(0.1), fzero.Config(frozen=frozen)
        )
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            step_fn.init(params)
        return [str(x.message) for x in found if x.filename == __file__]

    (said,) = told(())
    assert "2 of 4 parameters have requires_grad=False in their module, 0.bias, 0.weight," in said
    assert told(["0.*"]) == told(lambda name: False) == []
    assert told((), untrained=2) == told((), untrained=0) == []


def test_a_call_without_a_batch_says_what_it_takes() -> None:
    step_fn = fzero.make_train_step(lambda p, x: (p["w"] * x).mean(), fzero.optim.sgd(0.1))
    state = step_fn.init({"w": torch.ones(3)})
    want = r"missing 1 .* 'batch'. Call it as step_fn\(params, opt_state, batch\)."
    with pytest.raises(fzero.ConfigError, match=want):
        step_fn(*state)  # pyright: ignore[reportCallIssue]
    with pytest.raises(fzero.ConfigError, match="takes 3 positional arguments but 4 were given"):
        step_fn(*state, 1, 2)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float64])
def test_operands_of_several_dtypes_are_named_with_their_line(dtype: torch.dtype) -> None:
    apply, params = fzero.functionalize(nn.Linear(3, 2))
    step_fn = fzero.make_train_step(lambda p, x: apply(p, x).mean(), fzero.optim.sgd(0.1))
    why = (
        "operands of one dtype" if dtype.is_floating_point else "refuses one of them: .*same dtype"
    )
    want = rf"addmm.*test_train_step.py.*{dtype} \(4, 3\).*{why}.*x.to\("
    with pytest.raises(fzero.TraceError, match=want):
        step_fn(*step_fn.init(params), torch.ones(4, 3).to(dtype))


def test_labels_of_another_integer_are_told_what_the_kernel_says() -> None:
    def loss(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(batch[0] @ params["w"], batch[1])

    step_fn = fzero.make_train_step(loss, fzero.optim.sgd(0.1))
    labels = torch.zeros(2, dtype=torch.int32)
    want = r"nll_loss.*test_train_step.py.*(target dtype to be|scalar type) Long.*labels.long\(\)"
    with pytest.raises(fzero.TraceError, match=want):
        step_fn(*step_fn.init({"w": torch.ones(3, 4)}), (torch.ones(2, 3), labels))


def test_dtypes_are_named_where_the_function_has_no_file() -> None:
    scope: dict[str, Any] = {}
    exec("def loss(params, x): return (x @ params['w']).mean()", scope)
    step_fn = fzero.make_train_step(scope["loss"], fzero.optim.sgd(0.1))
    with pytest.raises(fzero.TraceError, match=r"mm.default was given torch.float64 \(2, 3\)"):
        step_fn(*step_fn.init({"w": torch.ones(3, 4)}), torch.ones(2, 3).double())


def test_an_index_out_of_range_is_no_matter_of_dtypes() -> None:
    step_fn = fzero.make_train_step(lambda p, i: p["w"].gather(0, i).mean(), fzero.optim.sgd(0.1))
    with pytest.raises(RuntimeError, match="out of bounds") as caught:
        step_fn(*step_fn.init({"w": torch.ones(3)}), torch.tensor([5]))
    assert not isinstance(caught.value, fzero.TraceError)


def _local(x: Tensor) -> Tensor:
    return x._local_tensor if isinstance(x, DTensor) else x


@pytest.mark.parametrize("executor", ["traced", "eager"])
@pytest.mark.parametrize("stage", [0, 3])
def test_leaves_that_data_puts_elsewhere_are_looked_at_again(stage: int, executor: str) -> None:
    """`x.data = y` leaves the object what it was, which a loop hands in again."""
    config = fzero.Config(stage=stage, executor=executor)
    step_fn = fzero.make_train_step(
        lambda p, x: ((x @ p["a"]) @ p["b"]).square().mean(), fzero.optim.adamw(0.1), config
    )
    x = torch.ones(2, 4)
    state = step_fn.init({"a": torch.ones(4, 4), "b": torch.ones(4, 4)})
    state = step_fn(*state, x)
    a, b = _local(state[0]["a"]), _local(state[0]["b"])
    own, before = b.data, a.clone()
    for wrong, told in (
        (a.data, "lie in the same memory"),
        (a.data.view(-1)[:8].as_strided((4, 4), (1, 1)), "one number in memory"),
        (own[:1].expand(4, 4), "one number in memory"),
    ):
        b.data = wrong
        with pytest.raises(ShardError, match=told):
            step_fn(*state, x)
        assert torch.equal(a, before)
    b.data = own
    state = step_fn(*state, x)
    # of what is not dense, too: at the same address, as far as before or over itself
    memory = torch.ones(64)
    a.data = memory.as_strided((4, 4), (1, 4))
    state = step_fn(*state, x)
    a.data = memory.as_strided((4, 4), (1, 1))
    with pytest.raises(ShardError, match="one number in memory"):
        step_fn(*state, x)
    b.data = memory[16:32].view(4, 4)
    a.data = memory.as_strided((4, 4), (1, 8))
    with pytest.raises(ShardError, match="lie in the same memory"):
        step_fn(*state, x)
