"""Programs that serve batches of other lengths: which of their numbers follow the sizes of inputs.

[Note: dynamic dims] A function is recorded for the shapes of one call. When a second call differs
in the sizes of some dims alone, the function is recorded twice: as ever, and once more with symbols
in place of these sizes. Node by node the two are the same graph, and where the one has a number the
other says how it follows from the sizes. If the first is recorded again, with functional tensors,
so is the other, and they are compared anew. Passes see the first graph alone, and carry along what
is known of each node. In the end every node must be accounted for: recorded, with the numbers that
it was recorded with, or made by a pass from values whose shapes do not follow the sizes. Then the
generated code asks for the numbers of each call. All that Python asked of the symbols while it was
recorded (`if x.shape[1] > 16`) is a guard: sizes that would have been answered otherwise are not
served, and are recorded as ever. Where anything is in doubt, so is everything.
"""

import operator
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import fx

from fzero.program.graph import is_op, output_node, placeholders, tensors_of
from fzero.program.sites import SITE

InputDim = tuple[int, int]
"""A dim of an input: (index, dim)."""
Path = tuple[Any, ...]
"""Where an argument of a node is: ("args", 1, 0)."""
DYNAMIC = "dynamic"
"""In `meta["custom"]`, which survives that a graph is recorded again: the node's `Mark`."""


class Mark(NamedTuple):
    """What is known of a node that was recorded with symbols.

    Args:
        target: its operator.
        rest: its arguments that are no values, as text.
        numbers: where it has a number that follows the sizes, and the number's place in the table.
        follows: whether the shape of what it makes does.
        layouts: shape and strides of each tensor that it makes: a number, or minus one less the
            place in the table of one that follows the sizes.
    """

    target: str
    rest: str
    numbers: tuple[tuple[Path, int], ...]
    follows: bool
    layouts: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


@dataclass
class Dynamic:
    """How a Program follows the sizes of dims of its inputs.

    Args:
        dims: these dims.
        recorded: their sizes while it was recorded.
        symbols: what stands for each.
        table: the numbers that follow them, each once.
        guards: what must be true of the sizes.
        ranges: the least and the largest that each may be.
        open: whether it may serve other sizes; nothing opens it again.
        results: one flag an output: whether its shape follows the sizes.
        twin: the recording with symbols, as long as both may be recorded a second time.
        env: where torch keeps what it knows of the symbols, as long.
    """

    dims: tuple[InputDim, ...]
    recorded: tuple[int, ...]
    symbols: tuple[Any, ...]
    table: list[Any]
    guards: tuple[Any, ...]
    ranges: tuple[tuple[Any, Any], ...]
    open: bool = True
    results: tuple[bool, ...] = ()
    twin: fx.GraphModule | None = None
    env: Any = None
    _known: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    _seen: set[tuple[int, ...]] = field(default_factory=set)

    def admits(self, sizes: Sequence[int]) -> bool:
        """Whether calls with these sizes run as it was recorded."""
        if not self.open:
            return False
        if not all(low <= x <= high for x, (low, high) in zip(sizes, self.ranges, strict=True)):
            return False
        given = dict(zip(self.symbols, map(int, sizes), strict=True))
        return all(guard.xreplace(given) == True for guard in self.guards)  # noqa: E712

    def sizes_of(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        """The sizes of a call."""
        return tuple(inputs[index].shape[dim] for index, dim in self.dims)

    def is_new(self, sizes: tuple[int, ...]) -> bool:
        """Whether it never ran with these sizes; from then on it has."""
        new = sizes not in self._seen
        self._seen.add(sizes)
        return new

    def layouts(
        self, node: fx.Node, sizes: tuple[int, ...]
    ) -> list[tuple[list[int], list[int]]] | None:
        """Shape and strides of each tensor that a node makes, with these sizes; None: unknown."""
        mark = mark_of(node)
        if mark is None or len(mark.layouts) != len(tensors_of(node)):
            return None
        table = self.numbers(*sizes)

        def known(numbers: tuple[int, ...]) -> list[int]:
            return [table[-1 - x] if x < 0 else x for x in numbers]

        return [(known(shape), known(strides)) for shape, strides in mark.layouts]

    def numbers(self, *sizes: int) -> tuple[int, ...]:
        """The table for these sizes."""
        found = self._known.get(sizes)
        if found is None:
            given = dict(zip(self.symbols, sizes, strict=True))
            found = self._known[sizes] = tuple(int(x.xreplace(given)) for x in self.table)
        return found


def marked(graph: fx.Graph, twin: fx.GraphModule, env: Any, dims: Sequence[InputDim]) -> Dynamic:
    """Note of each node of a recording how it follows the sizes of these dims of inputs.

    Args:
        graph: recorded for one call.
        twin: the same function, recorded with symbols in their place.
        env: where torch keeps what it knows of the symbols.
        dims: these.

    Raises:
        ValueError: the two differ in more than numbers.
    """
    if env.deferred_runtime_asserts:
        raise ValueError("a number is known only when it runs")
    inputs = [x.meta["val"] for x in placeholders(twin.graph)]
    sizes = [inputs[index].shape[dim] for index, dim in dims]
    # as they were made: of two that a guard says are equal, torch shows one for both
    symbols = tuple(x.node._expr if isinstance(x, torch.SymInt) else None for x in sizes)
    if not all(getattr(x, "is_symbol", False) for x in symbols) or len({*symbols}) < len(symbols):
        raise ValueError("a size has no symbol of its own")
    if any(env.var_to_range[x].is_singleton() for x in symbols):
        raise ValueError(
            f"of {_shown(symbols)} it takes one size: {_shown(g.expr for g in env.guards)}"
        )
    made = Dynamic(
        tuple(dims),
        tuple(tensors_of(placeholders(graph)[index])[0].shape[dim] for index, dim in dims),
        symbols,
        [],
        tuple(guard.expr for guard in env.guards),
        tuple((env.var_to_range[x].lower, env.var_to_range[x].upper) for x in symbols),
        twin=twin,
        env=env,
    )
    if any(guard.free_symbols - {*symbols} for guard in made.guards):
        raise ValueError("something else than these sizes decides")
    _match(graph, twin.graph, made)
    if made.numbers(*made.recorded) and not made.admits(made.recorded):
        raise ValueError("what it was recorded for is not admitted")
    return made


def _match(graph: fx.Graph, symbolic: fx.Graph, made: Dynamic) -> None:
    known: dict[Any, int] = {}

    def number(x: Any) -> int:
        """The place in the table of what follows the sizes."""
        expression = x.node.expr
        if not expression.free_symbols <= {*made.symbols}:
            raise ValueError(f"{expression}: a number that something else decides")
        if expression not in known:
            known[expression] = len(made.table)
            made.table.append(expression)
        return known[expression]

    def layout(sizes: Iterable[Any]) -> tuple[int, ...]:
        return tuple(-1 - number(x) if isinstance(x, torch.SymInt) else x for x in sizes)

    twin: dict[fx.Node, fx.Node] = {}
    for mine, other in _side_by_side(graph, symbolic, twin):
        numbers: list[tuple[Path, int]] = []
        # an alias and the slice of all there is have one operand, and it is the same
        alike = _kind(mine) == _kind(other)
        for path, (a, b) in _pairs(mine, other) if alike else ():
            b = b.meta.get("val", b) if isinstance(b, fx.Node) and _is_number(b) else b
            if isinstance(b, fx.Node):
                if twin.get(b) is not a:
                    raise ValueError(f"{mine} reads {a}, with symbols {b}")
            elif isinstance(b, torch.SymInt):
                place = number(b)
                if made.table[place].xreplace(_values(made)) != a:
                    raise ValueError(f"{mine} has {a} where {b} is meant")
                numbers.append((path, place))
            elif type(a) is not type(b) or a != b:
                raise ValueError(f"{mine} has {a!r}, with symbols {b!r}")
        follows = _follows(other)
        if mine.op == "call_function":
            layouts = [(layout(x.shape), layout(x.stride())) for x in tensors_of(other)]
            mark = Mark(str(mine.target), _rest(mine), tuple(numbers), follows, tuple(layouts))
            mine.meta["custom"] = {**mine.meta.get("custom", {}), DYNAMIC: mark}
        elif numbers or (mine.op == "get_attr" and follows):
            raise ValueError(f"{mine.op} has numbers that follow the sizes")


class Follows(Protocol):
    """What a Program is here."""

    @property
    def graph(self) -> fx.Graph:
        """Its nodes."""
        ...

    @property
    def dynamic(self) -> Dynamic | None:
        """How it follows sizes."""
        ...


P = TypeVar("P", bound=Follows)


def kept_dynamic(program: P) -> P:
    """A Program that passes are done with; if one stands in the way, it follows sizes no more."""
    made: Any = program
    if made.dynamic is None:
        return program
    why = settled(made.graph, made.dynamic)
    made.dynamic.twin = made.dynamic.env = None  # as large as all else that is known of a Program
    if why is None:
        return program
    return replace(made, dynamic=None, log=(*made.log, f"dynamic: no more: {why}"))


def settled(graph: fx.Graph, made: Dynamic) -> str | None:
    """Why a graph, as passes left it, may not serve other sizes; None if it may.

    Args:
        graph: made of a graph that was `marked`.
        made: what that gave.
    """
    given = {index for index, _ in made.dims}
    follows: dict[fx.Node, bool] = {x: i in given for i, x in enumerate(placeholders(graph))}
    for node in graph.nodes:
        if node.op != "call_function":
            follows.setdefault(node, False)
            continue
        mark = mark_of(node)
        if mark is not None and _is_kept(node, mark, made):
            follows[node] = mark.follows
            continue
        follows[node] = any(follows[x] for x in node.all_input_nodes)
        if follows[node] and not _is_general(node):
            return f"{node.name} is of a pass, and its numbers may follow the sizes"
    for node in graph.nodes:
        if "bucket" in node.meta and follows[node]:
            return f"{node.name} carries what follows the sizes"
    results: Any = output_node(graph).args[0]
    made.results = tuple(isinstance(x, fx.Node) and follows[x] for x in results)
    return None


def mark_of(node: fx.Node) -> Mark | None:
    """What is known of a node; None if a pass made it."""
    return node.meta.get("custom", {}).get(DYNAMIC)


def _is_kept(node: fx.Node, mark: Mark, made: Dynamic) -> bool:
    """Whether a node is as it was marked."""
    recorded = made.numbers(*made.recorded)
    for path, number in mark.numbers:
        try:
            if at(node, path) != recorded[number]:
                return False
        except (LookupError, TypeError):
            return False
    # with a generator of its own it is another overload of the same
    return SITE in node.meta or (str(node.target) == mark.target and _rest(node) == mark.rest)


def _is_general(node: fx.Node) -> bool:
    """Whether what a node makes is said without a number, and is written nowhere else."""
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
        return False
    rest = _leaves((node.args, node.kwargs))
    return not any(isinstance(x, int) and not isinstance(x, bool) for x in rest)


def at(node: fx.Node, path: Path) -> Any:
    """The argument of a node at a path."""
    value: Any = {"args": node.args, "kwargs": node.kwargs}
    for key in path:
        value = value[key]
    return value


def _is_number(node: fx.Node) -> bool:
    """Whether a node of a recording with symbols makes a size, or a number of sizes."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool)) or is_op(
        node, "aten::sym_size", "aten::sym_stride", "aten::sym_numel", "aten::sym_storage_offset"
    )


def _side_by_side(
    graph: fx.Graph, symbolic: fx.Graph, twin: dict[fx.Node, fx.Node]
) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The nodes of two recordings in pairs; `twin` gets the one's node for each of the other's.

    Where sizes are numbers torch leaves out slices of all there is, or has an alias instead.
    """
    theirs = iter(x for x in symbolic.nodes if not _is_number(x))
    for mine in graph.nodes:
        for other in theirs:
            same = _same(other)
            if _kind(mine) == _kind(other) and (same is None or _same(mine) is not None):
                twin[other] = mine
                yield mine, other
                break
            if same is None:
                raise ValueError(f"{mine.target}, with symbols {other.target}")
            if is_op(mine, "aten::alias") and twin[same] is mine.args[0]:
                twin[other] = mine
                yield mine, other
                break
            twin[other] = twin[same]
        else:
            raise ValueError(f"{mine.target} is not there with symbols")
    if (left := next(theirs, None)) is not None:
        raise ValueError(f"{left.target} is there with symbols alone")


def _kind(node: fx.Node) -> tuple[str, Any]:
    """What a node does."""
    # a linear layer's last view is the one or the other, by torch's version; they take the same
    view = is_op(node, "aten::view", "aten::_unsafe_view")
    return node.op, "view" if view else node.target if node.op == "call_function" else None


def _same(node: fx.Node) -> fx.Node | None:
    """The operand that a slice of all there is, or what undoes one, has the values of."""
    if is_op(node, "aten::slice"):
        source, _, *cut = (*node.args, *[0] * (2 - len(node.args)))
    elif is_op(node, "aten::slice_backward"):
        source, _, _, *cut = node.args
    elif is_op(node, "aten::slice_scatter"):
        _, source, _, *cut = (*node.args, *[0] * (3 - len(node.args)))
    else:
        return None
    start, end, step = (*cut, *[None] * (3 - len(cut)))
    every = start in (None, 0) and end in (None, sys.maxsize) and step in (None, 1)
    return source if every and isinstance(source, fx.Node) else None


def _follows(node: fx.Node) -> bool:
    return any(
        isinstance(size, torch.SymInt) for x in tensors_of(node) for size in (*x.shape, *x.stride())
    )


def _rest(node: fx.Node) -> str:
    return str([x for x in _leaves((node.args, node.kwargs)) if not isinstance(x, fx.Node)])


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for x in value:
            yield from _leaves(x)
    elif isinstance(value, Mapping):
        for x in value.values():
            yield from _leaves(x)
    else:
        yield value


def _pairs(a: fx.Node, b: fx.Node) -> Iterator[tuple[Path, tuple[Any, Any]]]:
    """The arguments of two nodes side by side, each with its path."""
    yield from _walk(("args",), a.args, b.args)
    yield from _walk(("kwargs",), a.kwargs, b.kwargs)


def _walk(path: Path, a: Any, b: Any) -> Iterator[tuple[Path, tuple[Any, Any]]]:
    if isinstance(a, (list, tuple)):
        if not isinstance(b, (list, tuple)) or len(a) != len(b):
            raise ValueError(f"{a} where symbols have {b}")
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _walk((*path, i), x, y)
    elif isinstance(a, Mapping):
        if not isinstance(b, Mapping) or a.keys() != b.keys():
            raise ValueError(f"{a} where symbols have {b}")
        for key in a:
            yield from _walk((*path, key), a[key], b[key])
    else:
        yield path, (a, b)


def _values(made: Dynamic) -> dict[Any, int]:
    return dict(zip(made.symbols, made.recorded, strict=True))


def substituted(value: Any, path: Path, numbers: Mapping[Path, Any]) -> Any:
    """An argument with what stands at these paths in it.

    >>> substituted([1, [2, 3]], ("args",), {("args", 1, 0): "n"})
    [1, ['n', 3]]
    """
    if path in numbers:
        return numbers[path]
    if isinstance(value, (list, tuple)):
        made = [substituted(x, (*path, i), numbers) for i, x in enumerate(value)]
        return made if isinstance(value, list) else tuple(made)
    return value


def _shown(expressions: Iterable[Any]) -> str:
    return ", ".join(map(str, expressions))
