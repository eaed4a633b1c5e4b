"""What a model function reads of what its calls have left in modules; and that it is put back."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero import TraceError
from fzero.functional.functionalize import functionalize
from tests.functional.test_leftovers import Net, hidden


def appended(m: Any, x: Tensor) -> Tensor:
    y = m.layer(x)
    m.terms.append(y.square().mean())
    return y


def begun_anew(m: Any, x: Tensor) -> Tensor:
    m.terms = []
    return appended(m, x)


def by_name(m: Any, x: Tensor) -> Tensor:
    y = m.layer(x)
    m.named["balance"] = y.square().mean()
    return y


def new_attribute(m: Any, x: Tensor) -> Tensor:
    y = m.layer(x)
    m.aux = y.square().mean()
    return y


def taken_away(m: Any, x: Tensor) -> Tensor:
    m.__dict__.pop("missing", None)
    return m.layer(x)


def passed_on(m: Any, x: Tensor) -> Tensor:
    """The second call in a function computes with what the first one left."""
    y = m.layer(x)
    m.h, y = y, y if m.h is None else y + m.h
    m.calls += 1
    return y * m.calls


LEFT: dict[str, tuple[Callable[[], Net], Callable[[Any], Any]]] = {
    "a list": (lambda: Net(appended, terms=[]), lambda m: sum(m.terms)),
    "another list": (lambda: Net(begun_anew, terms=()), lambda m: sum(m.terms)),
    "a dict": (lambda: Net(by_name, named={}), lambda m: m.named.get("balance", 0.0)),
    "an attribute": (lambda: Net(new_attribute, aux=None), lambda m: m.aux),
    "a new attribute": (lambda: Net(new_attribute), lambda m: getattr(m, "aux", 0.0)),
    "no attribute": (
        lambda: Net(taken_away, missing=2.0, other=1.0),
        lambda m: getattr(m, "missing", 1.0),
    ),
    "for the second call": (lambda: Net(passed_on, h=None, calls=0), lambda m: m.calls),
}


def reading(net: Net, call: Callable[[Any, Tensor], Tensor], left: Callable[[Any], Any]) -> Any:
    """Calls twice, reads what is left, and clears it."""
    inner = net[0] if isinstance(net, nn.Sequential) else net
    before = {name: x for name, x in vars(inner).items() if name not in vars(nn.Module())}

    def model_fn(params: Any, x: Tensor) -> Tensor:
        loss = (call(params, x) + call(params, 2 * x)).square().mean() + left(inner)
        for name in vars(inner).keys() - vars(nn.Module()).keys() - before.keys():
            delattr(inner, name)
        for name, value in before.items():
            value.clear() if type(value) in (list, dict) else setattr(inner, name, value)
        return loss

    return model_fn


RUNS: dict[str, Callable[[Any], fzero.Config]] = {
    "traced": lambda net: fzero.Config(),
    "eager": lambda net: fzero.Config(executor="eager"),
    "accumulated": lambda net: fzero.Config(accum_steps=2),
    "with an opaque part": lambda net: fzero.Config(opaque="0.layer"),
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", LEFT)
def test_a_model_function_reads_what_its_calls_left(name: str, run: str) -> None:
    make, left = LEFT[name]

    def net_of() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(make(), nn.Linear(3, 2)).double()

    def seen(net: Any) -> dict[str, Any]:
        return {k: v for k, v in vars(net[0]).items() if k not in vars(nn.Module())}

    x = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)
    halves = x.chunk(2) if run == "accumulated" else (x,)
    net = net_of()
    model_fn = reading(net, lambda params, x: net(x), left)
    opt = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(3):
        for half in halves:
            (model_fn(None, half) / len(halves)).backward()
        opt.step()
        opt.zero_grad()
    wanted = dict(net.named_parameters())

    net = net_of()
    apply, params = functionalize(net)
    before = {k: list(v) if isinstance(v, list) else v for k, v in seen(net).items()}
    opt_fn = fzero.optim.sgd(0.1)
    step_fn = fzero.make_train_step(reading(net, apply, left), opt_fn, RUNS[run](net))
    params, state = step_fn.init(params)
    for _ in range(3):
        params, state = step_fn(params, state, x)
    for key, value in fzero.unshard(params).items():
        torch.testing.assert_close(value, wanted[key].detach(), rtol=1e-10, atol=1e-12)
    assert [*seen(net).items()] == [*before.items()]


@pytest.mark.parametrize("name", ["a list", "an attribute", "for the second call"])
def test_functions_of_shards_read_it_too(name: str) -> None:
    make, left = LEFT[name]
    torch.manual_seed(0)
    net = make()
    x = torch.ones(4, 3)
    params = {k: v.detach().clone() for k, v in net.named_parameters()}
    wanted = reading(net, lambda params, x: net(x), left)(None, x)
    apply, _ = functionalize(net)
    fn, cfg = reading(net, apply, left), fzero.Config()
    shards = fzero.shard(params, cfg)
    for found in (
        fzero.value_and_grad(fn, cfg)(shards, x)[0],
        fzero.sharded(fn, cfg)(shards, x),
        fzero.jvp(fn, cfg)(shards, fzero.tree_random_like(shards, 0), x)[0],
        fzero.jit(fn)(params, x),
    ):
        torch.testing.assert_close(found, wanted.detach())


def test_what_grows_from_call_to_call_is_refused() -> None:
    """In plain PyTorch the sum would go on growing, and backward fail at the second step."""
    net = Net(appended, terms=[])
    apply, params = functionalize(net)

    def model_fn(params: Any, x: Tensor) -> Tensor:
        return apply(params, x).square().mean() + sum(net.terms)  # pyright: ignore

    step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(0.1), fzero.Config())
    params, state = step_fn.init(params)
    with pytest.raises(TraceError, match="leaves the attribute 'terms'"):
        step_fn(params, state, torch.ones(4, 3))
    assert net.terms == []


def test_alone_a_call_leaves_no_trace_at_once() -> None:
    net = Net(new_attribute, aux=None)
    apply, params = functionalize(net)
    torch.func.grad(lambda params: apply(params, torch.ones(4, 3)).sum())(params)
    assert net.aux is None


def test_what_is_left_goes_with_an_exception() -> None:
    net = Net(appended, terms=[])
    apply, params = functionalize(net)
    cfg = fzero.Config(executor="eager")

    def model_fn(params: Any, x: Tensor) -> Tensor:
        apply(params, x)
        raise ValueError("later")

    step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(0.1), cfg)
    params, state = step_fn.init(params)
    with pytest.raises(ValueError, match="later"):
        step_fn(params, state, torch.ones(4, 3))
    assert net.terms == []


def test_what_is_left_under_a_transform_inside_is_no_hindrance() -> None:
    """Its tensors are those of a transform that is over when the function ends."""
    net = Net(new_attribute, aux=None)
    apply, params = functionalize(net)

    def per_row(params: Any, x: Tensor) -> Tensor:
        return torch.func.vmap(lambda row: apply(params, row).square().mean())(x).mean()

    x = torch.linspace(-1, 1, 12).reshape(4, 3)
    wanted = per_row({k: v.detach() for k, v in net.named_parameters()}, x)
    for executor in ("traced", "eager"):
        cfg = fzero.Config(executor=executor)  # pyright: ignore
        step_fn = fzero.make_train_step(per_row, fzero.optim.sgd(0.1), cfg)
        _, state = step_fn(*step_fn.init(params), x)
        torch.testing.assert_close(state.metrics["loss"], wanted)
        assert net.aux is None


def test_a_hidden_state_under_a_transform_inside_is_refused() -> None:
    net = Net(hidden, h=None)
    apply, params = functionalize(net)
    step_fn = fzero.make_train_step(
        lambda params, x: torch.func.vmap(lambda row: apply(params, row[None]).mean())(x).mean(),
        fzero.optim.sgd(0.1),
        fzero.Config(),
    )
    with pytest.raises(TraceError, match="leaves the attribute 'h'"):
        step_fn(*step_fn.init(params), torch.ones(4, 3))
    assert net.h is None


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("executor", ["traced", "eager"])
def test_calls_inside_of_calls_are_put_back_in_turn(executor: Any, raises: bool) -> None:
    """The outer call writes what the inner one writes again."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.inner = nn.Linear(3, 3), Net(new_attribute, aux=None)
            self.__dict__["call"] = functionalize(self.inner)[0]

        def forward(self, x: Tensor) -> Tensor:
            self.inner.aux = self.layer(x)
            return self.call(dict(self.inner.named_parameters()), self.inner.aux)

    outer = Outer()
    apply, params = functionalize(outer)

    def model_fn(params: Any, x: Tensor) -> Tensor:
        loss = apply(params, x).square().mean() + outer.inner.aux
        apply(params, 2 * x)
        if raises:
            raise ValueError("at the end")
        return loss + outer.inner.aux

    cfg = fzero.Config(executor=executor)
    step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(0.1), cfg)
    with pytest.raises(Exception, match="at the end") if raises else contextlib.nullcontext():
        x = torch.ones(4, 3)
        _, state = step_fn(*step_fn.init(params), x)
        assert outer.inner.aux is None
        outs = [outer.inner(outer.layer(each)) for each in (x, 2 * x)]
        wanted = sum(out.square().mean() for out in (outs[0], *outs))
        torch.testing.assert_close(state.metrics["loss"], wanted)
    assert raises is (outer.inner.aux is None)  # the comparison leaves one of its own


def merged_once(m: Any, x: Tensor) -> Tensor:
    """As adapters are merged into a weight when a model is evaluated."""
    if m.merged is None:
        m.merged = m.layer.weight * 2
    m.terms.append(m.merged.mean())
    if m.training:
        m.aux = m.merged.square().mean()
    return x @ m.merged


def test_a_call_with_other_parameters_finds_no_attribute_of_the_first() -> None:
    """Though after it they are there again: a teacher's call does not lose the student's terms."""
    net = Net(merged_once, merged=None, terms=[], aux=None)
    apply, params = functionalize(net)
    teacher = {k: v * 0.5 for k, v in params.items()}

    def model_fn(params: Any, batch: Any) -> Tensor:
        x, teacher = batch
        net.train()
        out = apply(params, x)
        net.eval()
        with torch.no_grad():
            target = apply(teacher, x)
        net.train()
        loss = (out - target).square().mean() + net.aux + sum(net.terms)  # pyright: ignore
        net.terms.clear()
        return loss

    x = torch.linspace(-1, 1, 12).reshape(4, 3)
    w, v = (2 * each["layer.weight"] for each in (params, teacher))
    wanted = (x @ w - x @ v).square().mean() + w.square().mean() + w.mean() + v.mean()
    cfg = fzero.Config(stage=0, executor="eager")
    step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(0.1), cfg)
    _, state = step_fn(*step_fn.init(params), (x, teacher))
    torch.testing.assert_close(state.metrics["loss"], wanted)
    assert (net.merged, net.aux, net.terms) == (None, None, [])


def test_a_call_that_fails_around_another_leaves_nothing_of_either() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Net(new_attribute, aux=None)
            self.__dict__["call"] = functionalize(self.inner)[0]

        def forward(self, x: Tensor) -> Tensor:
            self.inner.aux = x
            self.call(dict(self.inner.named_parameters()), x)
            raise ValueError("after it")

    outer = Outer()
    apply, params = functionalize(outer)

    def model_fn(params: Any, x: Tensor) -> Tensor:
        with contextlib.suppress(ValueError):
            apply(params, x)
        assert outer.inner.aux is None
        return sum(p.sum() for p in params.values())  # pyright: ignore

    step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(0.1), fzero.Config(executor="eager"))
    step_fn(*step_fn.init(params), torch.ones(4, 3))
    assert outer.inner.aux is None
