"""What passes ask of a graph is what running it shows."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_iter

from fzero.program.graph import (
    BACKWARD,
    FORWARD,
    UPDATE,
    copy_graph,
    inputs_written_in_place,
    is_mutable,
    is_wanted,
    operands,
    output_node,
    phases,
    placeholders,
    segments,
    tensors_of,
    written_operands,
)

aten: Any = torch.ops.aten


# --- what is written
def _norm(x: Tensor, w: Tensor, training: bool) -> Any:
    mean, var = x.new_zeros(3), x.new_ones(3)
    return aten.native_batch_norm(x, w, w, mean, var, training, 0.1, 1e-5), mean, var


def _fused_sgd(x: Tensor, y: Tensor, **unscales: Tensor) -> None:
    numbers = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.1, "dampening": 0.0}
    flags = {"nesterov": False, "maximize": False, "is_first_step": True}
    torch._fused_sgd_([x], [y], [], **numbers, **flags, **unscales)  # pyright: ignore


WRITES = [
    lambda x, y: x + y,
    lambda x, y: x.add_(y),
    lambda x, y: torch.mul(x, y, out=y),
    lambda x, y: x[0].zero_(),
    lambda x, y: x.t()[1].copy_(y[:, 1]),
    lambda x, y: x.t_(),  # moves nothing
    lambda x, y: x.resize_(y.shape),
    lambda x, y: torch._foreach_mul_([x, y], 2.0),  # pyright: ignore
    lambda x, y: torch._foreach_add_([x], [y]),  # pyright: ignore
    lambda x, y: torch.Tensor.addcmul_(x, tensor1=y, tensor2=y),
    lambda x, y: torch.max(x, 0, out=(y[0], torch.zeros(3, dtype=torch.int64))),
    lambda x, y: _norm(x, y[0], True),
    lambda x, y: _norm(x, y[0], False),
    lambda x, y: torch.index_put_(x, [torch.tensor([1])], y[0]),
    lambda x, y: _fused_sgd(x, y),
    lambda x, y: _fused_sgd(x, y, grad_scale=torch.tensor(2.0), found_inf=torch.tensor(0.0)),
]


class Watching(fx.Interpreter):
    """Runs a graph and notes, node by node, which operands have other values afterwards."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.changed: dict[fx.Node, set[fx.Node]] = {}

    def run_node(self, n: fx.Node) -> Any:
        before = {x: [t.clone() for t in tree_iter(self.env[x])] for x in n.all_input_nodes}
        result = super().run_node(n)
        self.changed[n] = {
            x
            for x, kept in before.items()
            if not all(map(torch.equal, kept, tree_iter(self.env[x])))
        }
        return result


@pytest.mark.parametrize("fn", WRITES, ids=range(len(WRITES)))
def test_the_operands_that_are_written_are_those_that_change(fn: Any) -> None:
    def inputs() -> tuple[Tensor, Tensor]:
        return torch.arange(9.0).view(3, 3) + 1, torch.linspace(2, 3, 9).view(3, 3)

    def whole(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        fn(x, y)
        return x, y

    module = make_fx(whole, tracing_mode="fake")(*inputs())
    watching = Watching(module)
    given = inputs()
    watching.run(*given)
    for node, changed in watching.changed.items():
        if node.op != "call_function":
            continue
        # a shape that moves changes no number
        moved = isinstance(node.target, torch._ops.OpOverload) and (
            torch.Tag.inplace_view in node.target.tags
        )
        said = written_operands(node)
        assert set(said) == (set() if moved else changed), node.format_node()
        assert len(said) == len(set(said))
        # batch norm hides what it writes, and its results are read anyway
        hides = node.target is aten.native_batch_norm.default
        assert is_wanted(node) or not changed or hides
    written = {
        node
        for node, x, fresh in zip(placeholders(module.graph), given, inputs(), strict=True)
        if not torch.equal(x, fresh)
    }
    found = inputs_written_in_place(module.graph)
    # what a writing node only reads is taken for written, too; nothing is overlooked
    read = {x for node in module.graph.nodes if is_mutable(node) for x in operands(node)}
    assert written <= found
    assert read or not found


# --- which phase a node belongs to
STEPS = st.lists(st.sampled_from(["node", FORWARD, BACKWARD, UPDATE, "|"]), max_size=12)


@given(STEPS)
def test_marks_cut_a_graph_into_phases(steps: list[str]) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    nodes: list[tuple[fx.Node, str]] = []
    for step in steps:
        if step == "node":
            nodes.append((graph.call_function(aten.relu.default, (x,)), step))
        elif step == "|":
            nodes.append((graph.call_function(torch.ops.fzero.boundary.default, (x,)), step))
        else:
            nodes.append((graph.call_function(torch.ops.fzero.phase.default, (step,)), step))
    graph.output(())
    first = next((step for _, step in nodes if step != "node"), None)
    now = FORWARD if first == "|" else UPDATE
    expected, number = [], 0
    numbers = []
    for _, step in nodes:
        before = now, number
        if step != "node":
            now, number = BACKWARD if step == "|" else step, number + 1
        # what begins a backward is the last node of what was before it
        phase, segment = before if now == BACKWARD and step != "node" else (now, number)
        expected.append(phase)
        numbers.append(segment)
    found = phases(graph)
    assert [found[node] for node, _ in nodes] == expected
    assert [segments(graph)[node][0] for node, _ in nodes] == numbers


# --- copies
def test_a_copy_is_edited_alone_and_operands_come_as_often_as_they_are_passed() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.stack([x, x.sin(), x])

    graph = make_fx(fn)(torch.ones(2)).graph
    output_node(graph).meta["kept"] = 1
    before = str(graph)
    new = copy_graph(graph)
    assert str(new) == before
    assert output_node(new).meta == {"kept": 1}
    (stack,) = new.find_nodes(op="call_function", target=aten.stack.default)
    x, sin = placeholders(new)[0], new.find_nodes(op="call_function", target=aten.sin.default)[0]
    assert operands(stack) == [x, sin, x]
    sin.replace_all_uses_with(x)
    new.erase_node(sin)
    assert str(graph) == before != str(new)
    assert all(len(tensors_of(node)) == 1 for node in itertools.islice(graph.nodes, 3))
