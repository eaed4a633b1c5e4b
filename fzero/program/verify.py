"""Whether a Program is what was recorded: run on fake tensors, every value is what its node says.

A pass that leaves a node out of order, forgets an input, or puts a value of another shape, dtype or
layout in a value's place is found here, by the node that reads it. See [Note: strides are part of a
value].
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.node import map_arg
from torch.utils._pytree import tree_iter

from fzero.errors import TraceError
from fzero.program.graph import READS, Part, operands, output_node, placeholders, tensors_of
from fzero.program.passes.rewrite import is_cheap
from fzero.program.strides import alike, shown


def verify(parts: Iterable[Part], others=()) -> None:
    """Check a Program and those that follow it.

    Raises:
        TraceError: with the node, what was recorded, and what is there.
    """
    for part in parts:
        _verify(part)


def _verify(program: Part) -> None:
    try:
        program.graph.lint()
    except RuntimeError as error:
        raise _wrong(
            program, f"its nodes are not in order: {str(error).splitlines()[0]}"
        ) from error
    inputs = placeholders(program.graph)
    if len(inputs) != len(program.inputs):
        raise _wrong(program, f"it has {len(inputs)} inputs and {len(program.inputs)} names")
    missing = [n.target for n in program.graph.nodes if n.op == "get_attr"]
    if missing := [x for x in missing if str(x) not in program.constants]:
        raise _wrong(program, f"its constants lack {missing}")
    outputs = output_node(program.graph)
    mode = _mode(program)
    values: dict[fx.Node, Any] = {}
    for node in program.graph.nodes:
        if node is not outputs and "val" in node.meta:
            values[node] = _value(node, values, mode)
            found = [x for x in tree_iter(values[node]) if isinstance(x, Tensor)]
            _compare(program, f"{node.name} = {node.target}", tensors_of(node), found)
    for node in program.graph.nodes:
        if READS not in node.meta or is_cheap(node):  # a view is told by what it makes
            continue
        given = [x for x in operands(node) if "val" in x.meta]  # what draws has a generator besides
        if len(given) != len(node.meta[READS]):
            raise _wrong(program, f"{node.name} reads {given}: too few, or too many")
        for operand, said in zip(given, node.meta[READS], strict=True):
            _compare(
                program, f"{operand.name}, which {node.name} reads,", said, tensors_of(operand)
            )


def _mode(program: Part) -> FakeTensorMode:
    # Fake tensors of two modes can't meet in one operator.
    fakes = (x for node in program.graph.nodes for x in tensors_of(node))
    found = next((x.fake_mode for x in fakes if isinstance(x, FakeTensor)), None)
    return found or FakeTensorMode(allow_non_fake_inputs=True)


def _value(node: fx.Node, values: dict[fx.Node, Any], mode: FakeTensorMode) -> Any:
    """What a node makes of what is made before it, on fake tensors."""
    # It reads nothing that a pass could have replaced.
    if node.op != "call_function" or not node.all_input_nodes:
        return node.meta["val"]
    # a generator is made anew at each run and is no value; a fake tensor's numbers need none
    known: Any = {x: None for x in node.all_input_nodes if "val" not in x.meta} | values
    args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
    assert callable(node.target)
    with torch.no_grad(), mode:
        return node.target(*args, **kwargs)


def _compare(program: Part, what: str, said: Sequence[Tensor], found: Sequence[Tensor]) -> None:
    if len(said) != len(found) or not all(map(alike, said, found)):
        one, other = ([shown(x) for x in xs] for xs in (said, found))
        raise _wrong(program, f"{what} is {', '.join(other)}, and was recorded as {', '.join(one)}")


def _wrong(program: Part, what: str) -> TraceError:
    passes = "\n  ".join(program.log)
    return TraceError(
        f"the Program {program.name!r} is not what was recorded: {what}. A pass made it so; what "
        "it puts in a value's place must have the shape, dtype and strides of that value. Its "
        f"log:\n  {passes}"
    )
