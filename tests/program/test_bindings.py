"""A function of torch's is called for an overload only where it does what the overload does."""

import functools
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import fzero
from fzero.program import bindings, codegen
from fzero.program.bindings import Binding, binding_of

aten = torch.ops.aten


def _nodes(fn: Callable[..., Any], *args: Any) -> list[fx.Node]:
    graph = make_fx(fn, tracing_mode="fake")(*args).graph
    return [n for n in graph.nodes if isinstance(n.target, torch._ops.OpOverload)]


def _of(fn: Callable[..., Any], *args: Any) -> Any:
    (node,) = _nodes(fn, *args)
    found = binding_of(node, {})
    return found and found.function


X, Y = torch.arange(16.0).view(4, 4), torch.ones(4, 4)


@pytest.mark.parametrize(
    ("fn", "function"),
    [
        (lambda x: aten.mm.default(x, x), torch.mm),
        (lambda x: aten.add.Tensor(x, x, alpha=2), torch.add),
        (lambda x: aten.t.default(x), torch.t),
        (lambda x: aten.view.default(x, [2, 8]), Tensor.view),
        (lambda x: aten.gelu.default(x, approximate="tanh"), F.gelu),
        (lambda x: aten.sum.dim_IntList(x, [0], True), torch.sum),
        (lambda x: aten.cat.default([x, x], 1), torch.cat),
    ],
)
def test_of_what_is_the_same(fn: Any, function: Any) -> None:
    assert _of(fn, X) == function


@pytest.mark.parametrize(
    ("fn", "spreads"),
    [
        (lambda x: aten.view.default(x, [2, 8]), True),
        (lambda x: aten.view.default(x, [2, -1]), True),
        (lambda x: aten.expand.default(x, [3, 4, 4]), True),
        (lambda x: aten.view.default(x[0, 0], []), False),  # x.view() is refused
        (lambda x: aten.permute.default(x, [1, 0]), False),  # torch.permute takes a list alone
    ],
)
def test_sizes_one_by_one(fn: Any, spreads: bool) -> None:
    *_, node = _nodes(fn, X)
    binding = binding_of(node, {})
    assert binding is not None
    assert binding.spreads == spreads
    x, *rest = node.args
    given = binding.function(*binding.arguments([x.meta["val"], *rest]))
    assert given.shape == node.meta["val"].shape


def test_with_a_tensor_that_is_written_to() -> None:
    assert _of(lambda x, y: aten.mm.out(x, x, out=y), X, Y) == torch.mm


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: aten.mul.Scalar(x, 2.0),  # torch.mul has it as a tensor
        lambda x: aten.add.Scalar(x, 2.0, 2),  # torch.add warns, and has it as tensors
        lambda x: aten.split.Tensor(x, 2),  # a tuple for a list
        lambda x: aten.max.dim(x, 0),  # a tuple with names
        lambda x: aten.bernoulli.default(x),  # a try would draw
        lambda x: aten.add_.Tensor(x, x),  # and this would write
        lambda x: torch.zeros(2),  # torch.device(...) around it would have a say
    ],
)
def test_of_what_is_not(fn: Any) -> None:
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as said:
            assert _of(fn, X) is None
    finally:
        torch.set_warn_always(always)
    assert not said


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(func)
        return func(*args, **(kwargs or {}))


def _model(params: dict[str, Tensor], x: Tensor) -> Tensor:
    h = F.layer_norm(F.gelu(x @ params["a"] + params["b"]), (8,))
    q, k, v = (h @ params["c"]).view(4, 2, 2, 3, 4).transpose(1, 2).unbind(3)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return (out.transpose(1, 2).reshape(8, 8) * 2 - h.max(-1).values[:, None]).square().mean()


def test_a_step_runs_the_operators_that_it_was_recorded_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the same arguments, to the last bit, whatever it calls them through."""

    def run() -> tuple[list[Any], dict[str, Tensor]]:
        torch.manual_seed(0)
        full = {"a": torch.randn(6, 8), "b": torch.randn(8), "c": torch.randn(8, 24)}
        step_fn = fzero.make_train_step(_model, fzero.optim.adamw(0.1), fzero.Config())
        state, x = step_fn.init(full), torch.randn(8, 6)
        state = step_fn(*state, x)
        with _Seen() as seen:
            state = step_fn(*state, x)
        return seen.calls, fzero.unshard(state[0])

    calls, params = run()
    monkeypatch.setattr(codegen, "binding_of", lambda node: None)
    plain_calls, plain = run()
    assert calls == plain_calls
    assert len(calls) > 50
    assert all(torch.equal(x, plain[name]) for name, x in params.items())


def test_each_kind_of_call_is_tried_once() -> None:
    nodes = _nodes(lambda x: (x @ x) @ (x @ x), X)
    known: bindings.Known = {}
    with mock.patch.object(bindings, "_are_same", wraps=bindings._are_same) as tried:
        assert [binding_of(node, known) for node in nodes] == [Binding(torch.mm)] * 3
    assert tried.call_count == 1


def test_numbers_and_tensors_of_no_dims_are_kinds_of_their_own() -> None:
    nodes = _nodes(lambda x, s: (x * x) + (x * s) + (x * 2), X, torch.tensor(2.0))
    known: bindings.Known = {}
    found = [binding_of(n, known) for n in nodes if n.target is aten.mul.Tensor]
    assert found == [Binding(torch.mul)] * 3
    assert sum(key[0] is aten.mul.Tensor for key in known) == 3


def test_a_function_that_warns_is_not_called() -> None:
    def loud(x: Tensor, y: Tensor) -> Tensor:
        warnings.warn("old", stacklevel=1)
        return torch.mm(x, y)

    (node,) = _nodes(lambda x: torch.ops.aten.mm.default(x, x), torch.ones(2, 2))
    assert bindings._are_same(node, Binding(torch.mm))
    assert not bindings._are_same(node, Binding(loud))


def test_a_process_tries_what_it_has_tried_no_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> list[Binding | None]:
        return [binding_of(n) for n in _nodes(lambda x: (x @ x).view(5, 3, 15), torch.ones(15, 15))]

    first = found()
    monkeypatch.setattr(bindings, "_are_same", None)
    assert found() == first


def test_what_is_kept_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bindings, "_MOST", 2)
    known: bindings.Known = {}
    for n in range(1, 6):
        (node,) = _nodes(lambda x: x.view(-1, 1), torch.ones(n, n))
        assert binding_of(node, known) is not None
        (node,) = _nodes(functools.partial(Tensor.view, size=(n, 1)), torch.ones(n))
        assert binding_of(node, known) is not None
        assert len(known) <= 2
