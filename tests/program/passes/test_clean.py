"""What computes nothing goes; what has other values or strides stays."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fzero.program.codegen import compile_program
from fzero.program.graph import output_node, tensors_of
from fzero.program.passes.clean import clean
from fzero.program.trace import trace_program

X = torch.arange(24.0).view(2, 3, 4)
CASES: dict[str, tuple[Callable[[Tensor], Any], int]] = {
    "identities": (lambda x: x.sin().detach().detach() + 1, 2),
    "undone transpositions": (lambda x: (x[0].t().t() * 2,)[0], 2),
    "a view of a view": (lambda x: x.view(6, 4).view(24).view(4, 6) * 2, 2),
    "a view that changes nothing": (lambda x: x.view(2, 3, 4) * 2, 1),
    "repeated views": (lambda x: x.permute(2, 0, 1) + x.permute(2, 0, 1) * 3, 3),
    "dead nodes": (lambda x: (x * 3, x + 1)[1], 1),
}


def traced(fn: Callable[[Tensor], Any]) -> Any:
    return trace_program("fn", [("make_fx", lambda x: (fn(x),))], [X], ["x"])


@pytest.mark.parametrize("case", CASES)
def test_what_computes_nothing_goes(case: str) -> None:
    fn, most = CASES[case]
    before = traced(fn)
    after = clean(before)
    calls = [node for node in after.graph.nodes if node.op == "call_function"]
    assert len(calls) <= most
    assert len(after.graph.nodes) < len(before.graph.nodes)
    assert torch.equal(compile_program(after)(X)[0], fn(X))


def test_strides_stay_as_they_were() -> None:
    def fn(x: Tensor) -> Tensor:
        # of a transpose: in one step this view would not be possible
        return x.transpose(0, 1).reshape(3, 8).view(24).view(4, 6).t().detach()

    before = traced(fn)
    after = clean(before)
    results: list[Any] = [output_node(p.graph).args[0] for p in (before, after)]
    (old,), (new,) = (tensors_of(nodes[0]) for nodes in results)
    assert (new.shape, new.stride()) == (old.shape, old.stride())
    found = compile_program(after)(X)[0]
    assert torch.equal(found, fn(X))
    assert found.stride() == fn(X).stride()


def test_views_that_differ_are_not_taken_for_one() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.transpose(0, 1)[:2, :2] * 2 + x.transpose(1, 2)[:2, :2, :2].sum(0)[0, 0]

    assert torch.equal(compile_program(clean(traced(fn)))(X)[0], fn(X))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.view(torch.int32) + 1,
        lambda x: (x > 3).view(torch.uint8) * 200,
        lambda x: x.view(24).view(torch.int32).view(4, 6) + 1,
        lambda x: x.view(torch.int32).view(torch.float32) * 2,
        lambda x: x.view(12, 2).view(torch.float64) * 2,
    ],
)
def test_a_view_in_another_dtype_stays(fn: Callable[[Tensor], Tensor]) -> None:
    assert torch.equal(compile_program(clean(traced(fn)))(X)[0], fn(X))


def test_what_detaches_in_place_goes() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.sin().unsqueeze(0).detach() + 1

    # make_fx records it of a DTensor's backward alone; torch refuses to run it on a view
    program = traced(fn)
    for node in program.graph.find_nodes(
        op="call_function", target=torch.ops.aten.detach.default, sort=False
    ):
        node.target = torch.ops.aten.detach_.default
    assert torch.equal(compile_program(clean(program))(X)[0], fn(X))
