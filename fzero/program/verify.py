"""Whether a Program does what was recorded.

First every value, run on fake tensors, must be what its node says, and what its readers were
recorded reading: a pass that leaves a node out of order, forgets an input, or puts a value of
another shape, dtype or layout in a value's place is found here. See [Note: strides are part of a
value]. Then come the rules of `fzero.program.rules`: [Note: rules].
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.node import map_arg
from torch.utils._pytree import tree_iter

from fzero.errors import TraceError, first_line
from fzero.program.graph import Part, output_node, placeholders, tensors_of
from fzero.program.passes.rewrite import is_cheap
from fzero.program.promises import promise_of, values_read
from fzero.program.rules import RULES
from fzero.program.rules import alike as same_on_all
from fzero.program.strides import alike, shown


def verify(parts: Iterable[Part], others: Iterable[Sequence[Part]] = ()) -> None:
    """Check a Program and those that follow it.

    Args:
        parts: of the step.
        others: the same of other ranks.

    Raises:
        TraceError: with the node, what was recorded, and what is there.
    """
    parts = list(parts)
    for part in parts:
        _values(part)
        wrong = list(islice((message for rule in RULES for message in rule(part)), _TOLD))
        if wrong:
            raise _wrong(part, "; ".join(wrong))
    for other in others:
        for message in same_on_all(parts, other):
            raise _wrong(parts[0], message)


_TOLD = 5  # one fault is often seen in many places


def _values(program: Part) -> None:
    try:
        program.graph.lint()
    except RuntimeError as error:
        raise _wrong(program, f"its nodes are not in order: {first_line(error)}") from error
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
            values[node] = _value(program, node, values, mode)
            found = [x for x in tree_iter(values[node]) if isinstance(x, Tensor)]
            _compare(program, f"{node.name} = {node.target}", tensors_of(node), found)
    for node in program.graph.nodes:
        promise = promise_of(node)
        if promise is None or is_cheap(node):  # a view is told by what it makes
            continue
        given = values_read(node)
        if len(given) != len(promise.reads) and node.op != "placeholder":
            raise _wrong(program, f"{node.name} reads {given}: too few, or too many")
        for operand, said in zip(given, promise.reads, strict=False):
            _compare(
                program, f"{operand.name}, which {node.name} reads,", said, tensors_of(operand)
            )


def _mode(program: Part) -> FakeTensorMode:
    # Fake tensors of two modes can't meet in one operator.
    fakes = (x for node in program.graph.nodes for x in tensors_of(node))
    found = next((x.fake_mode for x in fakes if isinstance(x, FakeTensor)), None)
    return found or FakeTensorMode(allow_non_fake_inputs=True)


def _value(program: Part, node: fx.Node, values: dict[fx.Node, Any], mode: FakeTensorMode) -> Any:
    """What a node makes of what is made before it, on fake tensors."""
    # It reads nothing that a pass could have replaced.
    if node.op != "call_function" or not node.all_input_nodes:
        return node.meta["val"]
    # a generator is made anew at each run and is no value; a fake tensor's numbers need none
    known: Any = {x: None for x in node.all_input_nodes if "val" not in x.meta} | values
    args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
    assert callable(node.target)
    try:
        with torch.no_grad(), mode:
            return node.target(*args, **kwargs)
    except Exception as error:
        where = f"{node.name} = {node.target} can't run on {node.all_input_nodes}"
        raise _wrong(program, f"{where}: {first_line(error)}") from error


def _compare(program: Part, what: str, said: Sequence[Tensor], found: Sequence[Tensor]) -> None:
    if len(said) != len(found) or not all(map(alike, said, found)):
        one, other = ([shown(x) for x in xs] for xs in (said, found))
        raise _wrong(program, f"{what} is {', '.join(other)}, and was recorded as {', '.join(one)}")


def _wrong(program: Part, what: str) -> TraceError:
    passes = "\n  ".join(program.log)
    return TraceError(
        f"the Program {program.name!r} is not what was recorded: {what}. A pass made it so; what "
        "it puts in a value's place must have the shape, dtype and strides of that value, and each "
        "value, collective and random number must be the one that was recorded. Its log:\n"
        f"  {passes}"
    )
