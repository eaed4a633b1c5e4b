"""Remove in-place operators, by recording the graph a second time with functional tensors.

A second recording, because `torch.func.functionalize` can't wrap autograd, and because C++
functionalisation leaves `native_batch_norm`'s hidden mutation of its running statistics.
"""

from typing import Any

import torch
from torch import fx
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import CodeGen
from torch.fx.traceback import preserve_node_meta

from fzero.errors import TraceError
from fzero.program.graph import placeholders
from fzero.program.passes.rewrite import is_cheap
from fzero.program.program import Program


def functionalise(program: Program) -> Program:
    """The same Program without in-place operators. Changes of inputs in place do not leave it.

    Raises:
        TraceError: the function changes a tensor in place that it closed over; the change would be
            lost.
    """
    changed = [node for node in program.graph.nodes if _mutated(node)]
    for node in changed:
        for operand in _mutated(node):
            _refuse_constant(operand, node)
    if not changed:
        return program.logged(program.graph, "functionalise: nothing in place")
    module = fx.GraphModule(dict(program.constants), program.graph)
    fakes = [node.meta["val"] for node in placeholders(program.graph)]
    functional = dispatch_functionalize(fx.Interpreter(module).run)
    with torch.no_grad(), preserve_node_meta():
        traced = make_fx(functional, tracing_mode="fake", _allow_non_fake_inputs=True)(*fakes)
    graph = traced.graph
    graph.set_codegen(CodeGen())
    constants = {
        str(node.target): getattr(traced, str(node.target))
        for node in graph.nodes
        if node.op == "get_attr"
    }
    line = f"functionalise: {len(changed)} in-place operators removed"
    done = program.logged(graph, line)
    return Program(**{**vars(done), "constants": constants})


def _mutated(node: fx.Node) -> list[fx.Node]:
    """The operands that a node changes in place."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return []
    schema = target._schema
    if schema.name in ("aten::native_batch_norm", "aten::cudnn_batch_norm"):
        statistics: list[Any] = [a for a in node.args[3:5] if isinstance(a, fx.Node)]
        return statistics if any(node.args[5:6]) else []
    return [
        value
        for argument, value in zip(schema.arguments, node.args, strict=False)
        if argument.alias_info is not None
        and argument.alias_info.is_write
        and isinstance(value, fx.Node)
    ]


def _refuse_constant(operand: fx.Node, node: fx.Node) -> None:
    while is_cheap(operand) and operand.all_input_nodes:
        operand = operand.all_input_nodes[0]
    if operand.op == "get_attr":
        shape = tuple(node.meta["val"].shape) if hasattr(node.meta.get("val"), "shape") else "?"
        raise TraceError(
            f"the model function changes a tensor in place that it closed over ({node.target} on a "
            f"tensor of shape {shape}); a step is a pure function, so the change would be lost. "
            "Pass it as model state: apply, params, buffers = fzero.functionalize(module, "
            "buffers=True) and step_fn.init(params, buffers)."
        )
