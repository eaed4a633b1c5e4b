"""What lives on is normal, whatever mode a caller is in; what torch can't write over is refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.errors import ShardError
from fzero.functional.memory import overlaps_itself
from fzero.inference import counts_versions, makes_normal
from tests.optim.zoo import OPTIMIZERS
from tests.ranks import run_ranks

X = torch.ones(2, 3)


def _inside(fn: Callable[..., Any], *args: Any) -> Any:
    with torch.inference_mode():
        return fn(*args)


def _copy(tree: Any) -> Any:
    return fzero.tree_map(lambda x: x * 1 if isinstance(x, Tensor) else x, tree)


def _expanded(x: Tensor) -> Tensor:
    return x.flatten()[:1].clone().expand(x.numel()).view(x.shape)


def _normal(tree: Any) -> bool:
    return all(counts_versions(x) for x in fzero.tree.leaves(tree) if isinstance(x, Tensor))


def test_grad_mode_of_a_caller_outside_of_inference_mode_stays() -> None:
    with torch.no_grad():
        assert not makes_normal(torch.is_grad_enabled)()


def _step_fn(opt: Any = None, **fields: Any) -> Any:
    apply, full = fzero.functionalize(nn.Linear(3, 3))
    opt = opt or fzero.optim.sgd(0.1, momentum=0.9)
    cfg = fzero.Config(**fields)
    return fzero.make_train_step(lambda p, x: apply(p, x).square().mean(), opt, cfg), full


def _spoil(how: str, params: Any, opt_state: Any) -> tuple[Any, Any, str]:
    """A state with leaves that can't be written over, and what names the first of them."""
    bad: Any = _expanded if how.startswith("expanded") else lambda x: _inside(_copy, x)
    if how.endswith("params"):
        return {**params, "weight": bad(params["weight"])}, opt_state, r"params\['weight'\]"
    if how.endswith("inner"):
        inner = opt_state.inner
        if hasattr(inner, "trace"):
            inner = inner._replace(trace=fzero.tree_map(bad, inner.trace))
        else:
            inner = fzero.tree_map(bad, inner)
        return params, opt_state._replace(inner=inner), r"opt_state\.inner, .*bias"
    master = fzero.tree_map(bad, opt_state.master)
    return params, opt_state._replace(master=master), r"opt_state\.master, bias"


HOWS = [f"{kind} {what}" for kind in ("expanded", "inference") for what in ("params", "inner")]


@pytest.mark.parametrize("executor", ["traced", "eager"])
@pytest.mark.parametrize(
    ("how", "fields"),
    [
        *((how, {"stage": stage}) for how in HOWS for stage in (0, 2)),
        *((how, {"stage": 3}) for how in HOWS if "inference" in how),
        ("inference master", {"stage": 1, "precision": "bf16"}),
        ("expanded master", {"stage": 1, "precision": "bf16"}),
    ],
)
def test_a_leaf_that_cant_be_written_is_refused_before_the_first_write(
    how: str, fields: dict[str, Any], executor: Any
) -> None:
    """By name; nothing has changed, and the next call with good leaves goes on."""
    step_fn, full = _step_fn(executor=executor, **fields)
    x = X.bfloat16() if "precision" in fields else X
    params, opt_state = step_fn(*step_fn.init(full), x)
    before = fzero.tree_map(torch.clone, (params, opt_state.inner, opt_state.master))
    *spoilt, named = _spoil(how, params, opt_state)
    why = "can't write over it" if "inference" in how else "one number in memory"
    with pytest.raises(ShardError, match=f"{named}.*{why}.*outside of torch.inference_mode"):
        step_fn(*spoilt, x)
    after = params, opt_state.inner, opt_state.master
    fzero.tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), after, before)
    step_fn(params, opt_state, x)


@pytest.mark.parametrize("executor", ["traced", "eager"])
@pytest.mark.parametrize("how", HOWS)
def test_without_donation_such_leaves_are_taken(how: str, executor: Any) -> None:
    step_fn, full = _step_fn(executor=executor, stage=1, donate=False)
    params, opt_state = step_fn(*step_fn.init(full), X)
    *spoilt, _ = _spoil(how, params, opt_state)
    expected = step_fn(*fzero.tree_map(torch.clone, tuple(spoilt)), X)
    found = step_fn(*spoilt, X)
    torch.testing.assert_close(found[0], expected[0])
    assert _normal(found)


class Momentum:
    """An optimizer from elsewhere."""

    def init(self, params: Any) -> Any:
        return fzero.tree_map(torch.zeros_like, params)

    def update(self, grads: Any, state: Any, params: Any = None) -> Any:
        state = fzero.tree_map(torch.add, grads, state)
        return fzero.tree_map(torch.neg, state), state


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("how", ["inference params", "inference inner"])
def test_states_of_optimizers_from_elsewhere_are_looked_at(how: str, stage: int) -> None:
    step_fn, full = _step_fn(Momentum(), stage=stage)
    params, opt_state = step_fn(*step_fn.init(full), X)
    *spoilt, named = _spoil(how, params, opt_state)
    named = named.replace(", .*", ", ")
    with pytest.raises(ShardError, match=named):
        step_fn(*spoilt, X)
    step_fn(params, opt_state, X)


@pytest.mark.parametrize("executor", ["traced", "eager"])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("fields", [{}, {"precision": "fp16"}, {"donate": False}])
def test_all_that_a_step_makes_under_inference_mode_can_be_trained(
    executor: Any, stage: int, fields: dict[str, Any]
) -> None:
    step_fn, full = _step_fn(fzero.optim.adamw(0.1), executor=executor, stage=stage, **fields)
    x = X.half() if "precision" in fields else X
    with torch.inference_mode():
        state = step_fn(*step_fn.init(_copy(full)), x)
    assert _normal(state)
    expected = step_fn(*step_fn(*step_fn.init(full), x), x)
    torch.testing.assert_close(step_fn(*state, x)[0], expected[0], rtol=0, atol=0)


OPTS: dict[str, Any] = OPTIMIZERS | {
    "lamb": lambda: fzero.optim.lamb(0.1),
    "adafactor": lambda: fzero.optim.adafactor(0.1),
    "muon": lambda: fzero.optim.muon(0.1),
    "from elsewhere": lambda: fzero.optim.as_optimizer(Momentum()),
}


@pytest.mark.parametrize("name", OPTS)
def test_an_optimizers_state_is_normal(name: str) -> None:
    params = {"w": torch.ones(3, 2), "v": torch.ones(4, 4)}
    assert _normal(_inside(OPTS[name]().init, _inside(_copy, params)))


def test_shards_are_normal() -> None:
    assert _normal(_inside(fzero.shard, _inside(_copy, {"w": torch.ones(3)})))


def test_what_a_load_under_inference_mode_has_filled_can_be_trained(tmp_path: Any) -> None:
    step_fn, full = _step_fn(stage=1)
    fzero.checkpoint.save(tmp_path, *step_fn.init(full))
    with torch.inference_mode():
        first = fzero.checkpoint.load(tmp_path, *step_fn.init(full))
        *second, _ = fzero.checkpoint.load_partial(tmp_path, *step_fn.init(full), state=True)
    for state in (first, second):
        assert _normal(state)
        step_fn(*state, X)


@pytest.mark.parametrize("spoil", [_expanded, lambda x: _inside(_copy, x)])
def test_jit_refuses_a_donated_argument_that_cant_be_written(spoil: Any) -> None:
    run = fzero.jit(lambda a, b: (a * 2, b * 3), donate_argnums=(0,))
    run(torch.ones(4), torch.ones(4))
    with pytest.raises(ShardError, match=r"^a (was made|has elements).*Nothing has changed"):
        run(spoil(torch.ones(4)), torch.ones(4))
    run(torch.ones(4), spoil(torch.ones(4)))  # what nobody writes over is as good as any
    with torch.inference_mode():  # there torch writes over its own
        run(torch.ones(4), torch.ones(4))


@pytest.mark.parametrize("stage", [1, 3])
def test_an_engine_of_inference_parameters_is_refused_by_name(stage: int) -> None:
    module = _inside(nn.Linear, 3, 3)
    cfg = fzero.Config(stage=stage)
    with pytest.raises(ShardError, match=r"parameter 'weight' was made under.*copy\.deepcopy"):
        fzero.Engine(module, fzero.optim.sgd(0.1), cfg)
    engine = fzero.Engine(copy.deepcopy(module), fzero.optim.sgd(0.1), cfg)
    engine(X).sum().backward()
    engine.step()


def _trained(engine: Any) -> bool:
    for _ in range(2):
        engine(X).square().sum().backward()
        engine.step()
    return _normal(engine.state)


@pytest.mark.parametrize("stage", [1, 3])
def test_what_an_engine_makes_under_inference_mode_can_be_trained(stage: int) -> None:
    cfg = fzero.Config(stage=stage)
    for model in (nn.Linear(3, 3), lambda: nn.Linear(3, 3)):
        engine = _inside(fzero.Engine, model, fzero.optim.adamw(0.1), cfg)
        assert _trained(engine)
    for param in engine.module.parameters():
        param.data = _inside(_copy, param.data)
    assert _trained(engine)
    next(engine.module.parameters()).requires_grad_(False)
    _inside(engine, X)  # which has the state count leaf by leaf
    assert _trained(engine)
    assert _normal(dict(_inside(engine.release).named_parameters()))


def _ranks(stage: int, what: str) -> str:
    step_fn, full = _step_fn(
        stage=stage, donate=False, precision="bf16" if what == "master" else None
    )
    params, opt_state = step_fn.init(full)
    whole = fzero.unshard(params)
    if what == "inner":
        opt_state = opt_state._replace(inner=opt_state.inner._replace(trace=whole))
    else:
        opt_state = opt_state._replace(master=fzero.tree_map(Tensor.float, whole))
    try:
        step_fn(params, opt_state, X.to(whole["weight"].dtype))
    except ShardError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("stage", "what"), [(1, "inner"), (2, "inner"), (1, "master")])
def test_full_leaves_where_shards_belong_are_refused_by_name(stage: int, what: str) -> None:
    for said in run_ranks(2, _ranks, stage, what):
        assert f"opt_state.{what}" in said
        assert "on this rank, and must be" in said


def test_overlaps_are_found_exactly() -> None:
    x = torch.zeros(12)
    apart = [x.view(3, 4).T, x[::2], x.as_strided((2, 3), (1, 2)), x.as_strided((3, 2), (2, 3))]
    twice = [x[:1].expand(4), x.unfold(0, 3, 2), x.as_strided((3, 3), (2, 1))]
    for y in (*apart, *twice):
        places = [y.storage_offset() + at for at in _offsets(y)]
        assert overlaps_itself(y) == (len({*places}) < len(places))


def _offsets(x: Tensor) -> list[int]:
    at = [0]
    for size, stride in zip(x.shape, x.stride(), strict=True):
        at = [i + stride * n for i in at for n in range(size)]
    return at
