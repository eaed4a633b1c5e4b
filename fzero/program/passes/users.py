"""A user's passes: where they run, and what they must leave as it is.

[Note: passes of users] A pass takes a Program and returns one. It runs where collectives are still
single operators of single leaves, or, as a `scheduled` one, on what will run. After each the
Program is verified, and the graph that it was given must be what it was: so a pass that is wrong is
an error that names it, before anything has run.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map

from fzero.distributed.collectives import gather_leaf
from fzero.distributed.mesh import Axis
from fzero.errors import ConfigError, FzeroError, TraceError, shown
from fzero.layout import LeafLayout
from fzero.program.foreign import note_foreign
from fzero.program.graph import placeholders, tensors_of
from fzero.program.origin import origin_of, raised_at, set_origin
from fzero.program.passes.rewrite import call, carried_by, fake_mode, substitute
from fzero.program.program import Pass, Program
from fzero.program.promises import promise_of, stand_in

Named = Sequence[tuple[str, Pass]]


class Scheduled:
    """A pass that runs last: collectives are in buckets, each is launched and awaited somewhere."""

    def __init__(self, fn: Pass) -> None:
        functools.update_wrapper(self, fn)
        self.fn = fn

    def __call__(self, program: Program) -> Program:
        return self.fn(program)

    def __repr__(self) -> str:
        return f"scheduled({self.fn!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scheduled) and self.fn == other.fn

    def __hash__(self) -> int:
        return hash((Scheduled, self.fn))


def scheduled(fn: Pass) -> Pass:
    """Let a pass run on what will run: after buckets and schedule, before it is compiled.

    Without it a pass sees each collective as one node of one leaf, which it may replace or move.

    Raises:
        ConfigError: `fn` can't be called.

    Examples:
        >>> import fzero
        >>> @fzero.passes.scheduled
        ... def count(program):
        ...     launches = sum("bucket" in node.meta for node in program.graph.nodes)
        ...     return program.logged(program.graph, f"{launches} launches")
        >>> fzero.Config(passes=[count]).passes[0].__name__
        'count'
    """
    if not callable(fn):
        given = "a Program" if isinstance(fn, Program) else shown(fn)
        raise ConfigError(
            f"scheduled: it takes a pass, and was given {given}. Call it on yours: "
            "passes.scheduled(my_pass)."
        )
    return Scheduled(fn)


def run_passes(program: Program, passes: Named, *, late: bool) -> Program:
    """The Program after those passes whose turn it is, each checked.

    Args:
        passes: each with the name that errors, the log and other ranks know it by.
        late: the turn of `scheduled` ones.

    Raises:
        TraceError: a pass is wrong; the message names it and what it did.
    """
    for name, fn in passes:
        if isinstance(fn, Scheduled) == late:
            program = _checked(name, fn, program)
    return program


def _checked(name: str, fn: Pass, program: Program) -> Program:
    before = _text(program.graph)
    where = f"the pass {name}, on the Program {program.name!r}"
    try:
        made: Any = fn(program)
    except Exception as error:
        said = f"it raised {type(error).__name__}: {str(error)[:500]}"
        at = raised_at(error)
        said = str(error) if isinstance(error, FzeroError) else said
        raise TraceError(f"{where}: {said}{f' (raised{at})' if at else ''}") from error
    if callable(made) and not isinstance(made, Program):
        raise TraceError(
            f"{where}: it returned a {type(made).__name__}, which is a pass itself. Call it, and "
            f"pass what it makes: {getattr(fn, '__name__', name)}(...)."
        )
    if not isinstance(made, Program):
        raise TraceError(
            f"{where}: it returned a {type(made).__name__}. A pass returns a Program: the one that "
            "it was given, or program.logged(graph, 'what was done')."
        )
    after = _text(program.graph)
    if after != before:
        line = next((a for a, b in zip(after, before, strict=False) if a != b), "its length")
        raise TraceError(
            f"{where}: it edited the graph that it was given ({line}), which others have too. Edit "
            "a copy: graph = fzero.passes.copy_graph(program.graph)."
        )
    changed = [x for x in _KEPT if getattr(made, x) != getattr(program, x)]
    if changed:
        raise TraceError(
            f"{where}: it changed program.{changed[0]}. A pass changes the graph, constants and "
            "log; inputs, outputs and what is said of them stay, for the step relies on them."
        )
    try:
        made.verify()
    except TraceError as error:
        raise TraceError(f"{where}: what it made is wrong: {error}") from error
    found = _text(made.graph)
    if found == before:
        return made
    note_foreign(made.graph)
    return made.logged(made.graph, f"pass {name}: {len(before)} -> {len(found)} nodes")


# what a step, and the checks, know of a Program beside its graph
_KEPT = (
    *("name", "inputs", "outputs", "times", "resident", "bucket_bytes", "growth"),
    *("early", "thrift", "next"),
    *("input_categories", "output_categories", "reduced_over"),
)


def _text(graph: fx.Graph) -> list[str]:
    return [f"{node.name} = {node.target}{node.args}{node.kwargs or ''}" for node in graph.nodes]


# ------------------------------------------------------------------------------ what passes need
def leaf_and_axis(node: fx.Node) -> tuple[LeafLayout, Axis]:
    """What one collective of one leaf carries, and over which ranks.

    Args:
        node: one that `is_gather` or `is_reduction` is true of.

    Returns:
        The leaf's layout, whose dtype is the one that travels, and the axis: `.size` ranks of the
        process group named `.group`.
    """
    _, leaf, axis = carried_by(node)
    return leaf, axis


def gather(shard: Tensor, leaf: LeafLayout, axis: Axis) -> Tensor:
    """All ranks' rows of `shard`, as one operator that goes into a bucket; for `inline`.

    Args:
        shard: this rank's rows, of any dtype; `leaf.bounds(rank)` says which.
        leaf: name, full shape and dim of what is gathered; its dtype is not read.
        axis: of `leaf_and_axis`.

    Returns:
        A tensor of `leaf.shape`.
    """
    return gather_leaf(shard, leaf, axis)


def inline(graph: fx.Graph, fn: Callable[..., Any], *args: Any) -> Any:
    """What `fn` does with the values of these nodes, as nodes where the graph inserts.

    Args:
        graph: a copy; `with graph.inserting_before(node)` says where.
        fn: a function of tensors, pure: it is recorded on tensors without values.
        args: nodes of tensors, and numbers.

    Returns:
        A node for each tensor that `fn` returns, in the same structure.

    Raises:
        TraceError: `fn` closes over a tensor.

    Examples:
        >>> import fzero, torch
        >>> def slowly(program):
        ...     graph = fzero.passes.copy_graph(program.graph)
        ...     for node in fzero.passes.calls(graph, "aten::tanh"):
        ...         with graph.inserting_before(node):
        ...             new = fzero.passes.inline(
        ...                 graph, lambda x: 2 / (1 + torch.exp(-2 * x)) - 1, node.args[0]
        ...             )
        ...         fzero.passes.replace_value(node, new)
        ...     return program.logged(graph, "tanh written out")
        >>> def model_fn(params, x):
        ...     return torch.tanh(x * params["w"]).sum()
        >>> step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(0.1)).with_pass(slowly)
        >>> state = step_fn.init({"w": torch.ones(3)})
        >>> "tanh written out" in step_fn.lower(*state, torch.ones(3)).log
        True
    """
    values = tree_map(lambda x: x.meta["val"] if isinstance(x, fx.Node) else x, args)
    places = [i for i, x in enumerate(args) if isinstance(x, fx.Node)]

    def flat(*tensors: Tensor) -> Any:
        arguments = list(values)
        for i, x in zip(places, tensors, strict=True):
            arguments[i] = x
        return fn(*arguments)

    given = [values[i] for i in places]
    with torch.no_grad(), fake_mode(given):
        recorded = make_fx(flat)(*given)
    nodes = {inner: args[i] for inner, i in zip(placeholders(recorded.graph), places, strict=True)}
    origin = origin_of(args[places[0]])
    for inner in recorded.graph.nodes:
        if inner.op == "get_attr":
            raise TraceError(
                f"fzero.passes.inline: {getattr(fn, '__name__', fn)} reads a tensor that it was "
                "not given. Pass nodes for all tensors; make constants inside of it."
            )
        if inner.op == "call_function":
            nodes[inner] = graph.node_copy(inner, nodes.__getitem__)
            set_origin(nodes[inner], origin)
        elif inner.op == "output":
            return tree_map(lambda x: nodes.get(x, x), inner.args[0])
    return None


def replace_value(node: fx.Node, new: fx.Node) -> None:
    """Let all that reads `node` read `new`, and erase `node`.

    `new` gets the memory layout of `node`. This says that it stands for that value: `verify` takes
    it as such, and does not ask how it is computed.

    Args:
        node: of a graph that may be edited.
        new: of the same shape and dtype, before all that reads `node`.

    Raises:
        TraceError: its shape or dtype is another.
    """
    (old,), (value,) = tensors_of(node), tensors_of(new)
    if (old.shape, old.dtype) != (value.shape, value.dtype):
        raise TraceError(
            f"fzero.passes.replace_value: {new.name} is {value.dtype} {tuple(value.shape)}, and "
            f"{node.name}, which it is to stand for, is {old.dtype} {tuple(old.shape)}."
        )
    if promise_of(new) is not None:  # a value of its own, which others may read as that
        with new.graph.inserting_after(new):
            new = call(new.graph, torch.ops.aten.alias.default, new)
    stand_in(new, node)
    if not node.users:
        node.graph.erase_node(node)
        return
    substitute(node, new)


def _check_operator(name: object) -> None:
    if _is_operator(name):
        return
    text = str(name).removeprefix("torch.ops.")
    space, _, rest = text.replace("::", ".").partition(".")
    near = f"{space}::{rest.partition('.')[0]}"
    hint = f" Did you mean {near!r}?" if _is_operator(near) else ""
    raise ConfigError(
        f"passes.calls: no operator is called {name!r}.{hint} Names are torch's, without the "
        "overload, as node.target._schema.name has them: 'aten::mm'."
    )


def _is_operator(name: object) -> bool:
    space, _, short = str(name).partition("::")
    found = isinstance(name, str) and short and getattr(getattr(torch.ops, space), short, None)
    return isinstance(found, torch._ops.OpOverloadPacket)


def calls(graph: fx.Graph, *names: str) -> list[fx.Node]:
    """The nodes that call an operator of one of these names, such as "aten::mm".

    Raises:
        ConfigError: no operator has that name.

    Examples:
        >>> import fzero, torch
        >>> program = fzero.jit(torch.tanh).lower(torch.ones(2))
        >>> [node.name for node in fzero.passes.calls(program.graph, "aten::tanh")]
        ['tanh']
        >>> fzero.passes.calls(program.graph, "aten.tanh")
        Traceback (most recent call last):
        ...
        fzero.errors.ConfigError: passes.calls: no operator is called 'aten.tanh'. Did you mean ...
    """
    for name in names:
        _check_operator(name)
    return [
        node
        for node in graph.nodes
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in names
    ]
