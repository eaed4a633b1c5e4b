"""Remove in-place operators.

[Note: writes nobody else sees] Most writes go into a value that was just made and that no view
looks at: `mean.add_(eps)` inside RMSNorm. There the operator out of place is the same, and who read
the value afterwards reads the new one. If any other is left, the graph is recorded a second time
with functional tensors: a second recording, because `torch.func.functionalize` can't wrap autograd,
and because C++ functionalisation leaves `native_batch_norm`'s hidden mutation of its running
statistics.
"""

import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.functional_tensor import (
    FunctionalTensor,
    PythonFunctionalizeAPI,
    disable_functional_mode,
    dispatch_functionalize,
)
from torch.fx.graph import CodeGen
from torch.fx.traceback import preserve_node_meta
from torch.utils._pytree import tree_iter

from fzero.errors import STATEFUL, FzeroError, TraceError, first_line
from fzero.numerics.fakes import recorded_on
from fzero.program.dynamic import marked
from fzero.program.graph import (
    copy_graph,
    has_effect,
    is_op,
    memory_of,
    operands,
    order_of,
    output_node,
    placeholders,
    tensors_of,
    written_operands,
)
from fzero.program.passes.rewrite import call, infer, is_cheap, is_gather
from fzero.program.program import Program
from fzero.program.promises import PROMISE, note
from fzero.program.strides import alike
from fzero.program.symbols import quiet


def functionalise(program: Program) -> Program:
    """The same Program without in-place operators. Changes of inputs in place do not leave it.

    Raises:
        TraceError: the function changes a tensor in place that it closed over; the change would be
            lost.
    """
    changed = [node for node in program.graph.nodes if written_operands(node)]
    for node in changed:
        # now: functional tensors would take the write without a word, and it would be lost
        for operand in written_operands(node):
            _refuse_constant(operand, node)
    if not changed:
        return program.logged(program.graph, "functionalise: nothing in place")
    line = f"functionalise: {len(changed)} in-place operators removed"
    graph = _writes_apart(program.graph)
    if not any(map(written_operands, graph.nodes)):
        note(graph)
        return program.logged(graph, line)
    try:
        traced = _again(fx.GraphModule(dict(program.constants), graph))
    except FzeroError:
        raise
    except Exception as error:
        raise TraceError(
            f"the model function's in-place operators ({changed[0].target} is the first) can't be "
            f"taken out of its Program: {type(error).__name__}: {error}. "
            "Write them out of place (x = x + y instead of x += y, torch.where instead of an "
            "assignment to a part), or use Config(executor='eager'), which runs any Python."
        ) from error
    graph = traced.graph
    # make_fx leaves a calling convention of pytrees; a Program's inputs are flat
    graph.set_codegen(CodeGen())
    program = _marked_again(program, graph)
    _restore_outputs(graph, operands(output_node(program.graph)))
    note(graph)
    # The second recording names constants anew.
    constants = {
        str(node.target): getattr(traced, str(node.target))
        for node in graph.nodes
        if node.op == "get_attr"
    }
    done = program.logged(graph, line)
    return Program(**{**vars(done), "constants": constants})


def _again(module: fx.GraphModule) -> fx.GraphModule:
    """A recording, recorded a second time, with functional tensors."""
    fakes = [node.meta["val"] for node in placeholders(module.graph)]
    functional = dispatch_functionalize(_Again(module).run)
    # no_grad: backward is in the graph already
    with torch.no_grad(), preserve_node_meta():
        return recorded_on(fakes, functional)


def _marked_again(program: Program, graph: fx.Graph) -> Program:
    """The Program, with what is known of `graph`, its second recording: see [Note: dynamic dims].

    Its numbers are those of other operators (of a write into a slice, those of what puts the slice
    back), so the recording with symbols is made a second time as well.
    """
    known = program.dynamic
    if known is None or known.twin is None:
        return program
    made = None
    try:
        with quiet():
            twin = _again(fx.GraphModule(known.twin, _writes_apart(known.twin.graph)))
        made = marked(graph, twin, known.env, known.dims)
    except Exception as error:  # then it is recorded for each size
        line = f"dynamic: no more: {type(error).__name__}: {first_line(error)}"
        program = program.logged(program.graph, line)
    return replace(program, dynamic=made)


def _writes_apart(graph: fx.Graph) -> fx.Graph:
    """A copy in which writes into values that nobody else looks at are made out of place.

    See [Note: writes nobody else sees].
    """
    graph = copy_graph(graph)
    for node in [node for node in graph.nodes if _meets_itself(node)]:
        _write_one_by_one(node)
    order = order_of(graph)
    on: dict[int, list[fx.Node]] = {}
    for node in order:
        for key in set(memory_of(node)):
            on.setdefault(key, []).append(node)
    for nodes in on.values():
        made, *writes = nodes
        if writes and made.op == "call_function" and all(map(_writes_alone, writes)):
            _rename(made, writes, order)
    return graph


def _meets_itself(node: fx.Node) -> bool:
    """Whether what a list operator writes may be elsewhere in its lists, too: what comes later
    reads it, or writes it again. Functional tensors would have the values of before."""
    if not str(node.target).startswith("aten._foreach_"):
        return False
    given = [x for x in tree_iter(node.args) if isinstance(x, fx.Node)]
    times = Counter(key for x in given for key in memory_of(x))
    return any(times[key] > 1 for x in written_operands(node) for key in memory_of(x))


def _write_one_by_one(node: fx.Node) -> None:
    """As kernels of lists do, in order."""
    target: Any = node.target
    for i in range(len(node.args[0])):  # pyright: ignore
        args = [[x[i]] if isinstance(x, list | tuple) else x for x in node.args]
        with node.graph.inserting_before(node):
            new = node.graph.call_function(target, tuple(args), dict(node.kwargs))
        new.meta = {k: v for k, v in node.meta.items() if k != PROMISE}
    node.graph.erase_node(node)


def _writes_alone(node: fx.Node) -> bool:
    """Whether a node returns its first operand, written over, and touches nothing else."""
    written = written_operands(node)
    return bool(written) and written == [node.args[0]] and _twin(node.target) is not None


def _twin(target: Any) -> Any:
    """The operator that returns what `target` writes: `aten.add.Tensor` of `aten.add_.Tensor`."""
    namespace, name = target._schema.name.split("::")
    packet = getattr(torch.ops.aten, name[:-1], None)
    if namespace != "aten" or not name.endswith("_") or packet is None:
        return None
    # by what they take: that of `bernoulli_.float` is `bernoulli.p`
    for twin in (getattr(packet, overload) for overload in packet.overloads()):
        schema = twin._schema
        if not schema.is_mutable and len(schema.returns) == 1 and _takes(twin) == _takes(target):
            return twin
    return None


def _takes(target: Any) -> list[tuple[str, str]]:
    return [(x.name, str(x.type)) for x in target._schema.arguments]


def _rest(node: fx.Node) -> list[Any]:
    """What is given after the first operand, with defaults that the twin may not have."""
    left = node.target._schema.arguments[len(node.args) :]  # pyright: ignore
    defaults = [x.default_value for x in left if not x.kwarg_only and x.name not in node.kwargs]
    return [*node.args[1:], *defaults]


def _rename(made: fx.Node, writes: list[fx.Node], order: dict[fx.Node, int]) -> None:
    """Give each write a value of its own; who came later reads that.

    From the first on that would lie otherwise in memory, or have another dtype, they stay as they
    are.
    """
    graph, now = made.graph, made
    for node in writes:
        twin = _twin(node.target)
        with graph.inserting_before(node):
            name = twin._schema.name.split("::")[1]  # as make_fx names it
            operands = (now, *_rest(node))
            new = graph.create_node("call_function", twin, operands, node.kwargs, name=name)
        new.meta = {k: v for k, v in node.meta.items() if k not in ("val", PROMISE)}
        if not alike(*tensors_of(infer(new)), *tensors_of(made)):
            graph.erase_node(new)
            return
        for reader in [x for x in now.users if order.get(x, -1) > order[node]]:
            reader.replace_input_with(now, new)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        now = new


class _Again(fx.Interpreter):
    """Runs the graph's operators on functional tensors."""

    def run_node(self, n: fx.Node) -> Any:
        """The result of a node. What it wrote into keeps its strides.

        Of `x.cumsum_(0)` is left `y = x.cumsum(0)`, which chooses strides of its own: all that
        reads `x` from there on would read another layout than was recorded.
        """
        if is_op(n, "aten::sym_size", "aten::sym_stride", "aten::sym_numel"):
            return n.meta["val"]  # asked later, after `transpose_`, it may be another size
        result = super().run_node(n)
        for operand in written_operands(n):
            for x, said in zip(_tensors(self.env[operand]), tensors_of(operand), strict=True):
                below = PythonFunctionalizeAPI()
                (value,) = below.unwrap_tensors((x,))
                if isinstance(x, FunctionalTensor) and not alike(value, said):
                    with disable_functional_mode(), below.redispatch_to_next():
                        value = torch.ops.fzero.restored(value, said.stride())
                    # as functionalisation itself does after a write: `x` is `value` from here on
                    below.replace(x, value)
                    below.commit_update(x)
                    below.sync(x)
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operator that is there for its effect alone (an assertion, say) has nothing to make
        functional, and functional tensors want tokens for it: it runs on what they hold."""
        if not has_effect(target):
            return super().call_function(target, args, kwargs)
        below = PythonFunctionalizeAPI()
        args, kwargs = below.unwrap_tensors(args), below.unwrap_tensors(kwargs)  # pyright: ignore
        with disable_functional_mode(), below.redispatch_to_next():
            return target(*args, **kwargs)


def _restore_outputs(graph: fx.Graph, recorded: list[fx.Node]) -> None:
    """Lay the results out as they were recorded."""
    output = output_node(graph)
    for new, old in zip(operands(output), recorded, strict=True):
        if not all(map(alike, tensors_of(new), tensors_of(old))):
            (said,) = tensors_of(old)
            with graph.inserting_before(output):
                copy = call(graph, torch.ops.fzero.restored.default, new, said.stride())
            output.replace_input_with(new, copy)


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in tree_iter(value) if isinstance(x, Tensor)]


def written_inputs(program: Program, cast_to: Mapping[str, torch.dtype]) -> list[str]:
    """The inputs that the function changes in place, themselves or as it was given them.

    Args:
        program: as it was recorded.
        cast_to: names of the inputs that are looked for, and the dtype in which the function gets
            each.
    """
    pairs = zip(placeholders(program.graph), program.inputs, strict=False)
    names = {node: name for node, name in pairs if name in cast_to}
    found = []
    for node in program.graph.nodes:
        for operand in written_operands(node):
            dtype, is_copy = operand.meta["val"].dtype, False
            while operand not in names:
                source = _same_memory(operand)
                if source is None and is_op(operand, "aten::_to_copy"):
                    source, is_copy = operand.all_input_nodes[0], True
                if source is None:
                    break
                operand = source
            name = names.get(operand)
            # a cast may have been made before the function got it
            if name is not None and (not is_copy or cast_to[name] == dtype):
                found.append(name)
    return list(dict.fromkeys(found))


def _same_memory(node: fx.Node) -> fx.Node | None:
    """The node whose memory this one is in, or would be if a gather moved nothing; None: its own.

    Views, what they are taken apart into, and what operators in place return.
    """
    if node.target is operator.getitem or is_gather(node) or is_op(node, "aten::_unsafe_view"):
        return node.all_input_nodes[0]
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.returns:
        return None
    alias = target._schema.returns[0].alias_info
    if alias is None:
        return None
    for i, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.before_set == alias.before_set:
            value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            return value if isinstance(value, fx.Node) else None
    return node.all_input_nodes[0]  # of a view in several parts


def _refuse_constant(operand: fx.Node, node: fx.Node) -> None:
    # a write into a part of a constant is one into the constant
    while is_cheap(operand) and operand.all_input_nodes:
        operand = operand.all_input_nodes[0]
    if operand.op == "get_attr":
        shape = tuple(node.meta["val"].shape) if hasattr(node.meta.get("val"), "shape") else "?"
        raise TraceError(
            f"the model function changes a tensor in place that it closed over ({node.target} on a "
            f"tensor of shape {shape}); a step is a pure function, so the change would be lost. "
            "Take it as an argument and return the new one. A step has model state for that: "
            f"{STATEFUL}. A module's comes of apply, params, state = fzero.functionalize(module, "
            "buffers=True); pass the state that model_fn is given to apply(params, state, ...)."
        )
