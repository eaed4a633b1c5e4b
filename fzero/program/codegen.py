"""Running a Program: its graph as one straight-line Python function that frees what is used up.

What was recorded of a value's memory layout is true when it runs: see [Note: strides are part of a
value]. Inputs that lie otherwise are copied. An operator's fake kernel may be wrong about strides
(native_batch_norm of a transpose), so the first run looks at what each operator returns, and those
that were recorded wrongly are followed by a copy from then on.
"""

import contextlib
import itertools
import linecache
import operator
import traceback
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fzero.distributed import works
from fzero.errors import FzeroError, TraceError
from fzero.numerics.rng import generator_of
from fzero.program.bindings import Binding, binding_of
from fzero.program.categories import GRADIENTS
from fzero.program.dynamic import Dynamic, mark_of, substituted
from fzero.program.graph import (
    inputs_written_in_place,
    is_op,
    memory_of,
    placeholders,
    tensors_of,
    written_operands,
)
from fzero.program.heap import keep_freed, made_by
from fzero.program.joined import joined
from fzero.program.memory import reads
from fzero.program.origin import origin_of
from fzero.program.program import Program
from fzero.program.sites import SITE
from fzero.program.strides import agree, restored

Executable = Callable[..., list[Any]]


class _Name(NamedTuple):
    """A local of generated code."""

    name: str


class Boxed(NamedTuple):
    """What is called with one list that only it holds, so that it can let go of what is in it.

    Args:
        run: the function.
    """

    run: Callable[[list[Any]], Any]

    def __call__(self, given: list[Any]) -> Any:
        """Run it."""
        return self.run(given)


def compile_program(program: Program) -> Executable:
    """A function from the Program's inputs, in order, to the list of its outputs.

    Every local is dropped after its last use. Random numbers leave the generators as they were.

    Raises:
        TraceError: at the first run: an operator returned another shape or dtype than its fake
            kernel said.
    """
    devices = _random_devices(program)
    layouts = _Inputs(program)
    found: set[fx.Node] = set()
    function = _function(program, partial(_looked_at, _Look(found)))
    looked = False
    dynamic = program.dynamic

    def run(*inputs: Any) -> list[Any]:
        nonlocal function, looked
        if not looked:
            keep_freed(run, made_by(program.graph))  # not before: what is simulated never runs
        given, inputs = inputs, layouts.restore(inputs)
        runs, look = function, None
        if dynamic is not None and dynamic.is_new(sizes := dynamic.sizes_of(inputs)) and looked:
            # a fake kernel may be right about strides for the recorded sizes alone
            look = _Look(set(), dynamic, sizes)
            runs = _function(program, partial(_looked_at, look))
        try:
            with torch.no_grad(), _kept_generators(devices):
                results = runs(*inputs)
            if inputs is not given:
                layouts.write_back(inputs, given)
        except BaseException as error:
            wrote = _has_written(error, runs)
            told = _told(error, runs, program) if isinstance(error, Exception) else None
            setattr(told or error, _WROTE, (program, wrote))
            if told is not None:
                raise told from error
            raise
        if dynamic is not None and look is not None:
            dynamic.open = dynamic.open and not look.found
        if not looked:
            # the next call can come from inside of another thread's first: both find the same
            if found and program.dynamic is not None:
                program.dynamic.open = False  # what is restored has the strides of one size
            function, looked = _function(program, partial(_restored_after, frozenset(found))), True
        return results

    return run


def has_written(error: BaseException, program: Program) -> bool | None:
    """Whether a Program had begun to write over its inputs when it raised this.

    An operator that writes may have done so in part: then it had.

    Returns:
        None if it was not the Program that raised it.
    """
    raised, wrote = getattr(error, _WROTE, (None, None))
    return wrote if raised is program else None


_WROTE = "_fzero_wrote"


def _has_written(error: BaseException, runs: Executable) -> bool:
    """The same, of what was run: by the line of generated code that was reached."""
    code, first = runs.__code__, runs.__globals__[_FIRST_WRITE]  # pyright: ignore
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code is code]
    return first is not None and not (lines and lines[0] < first)


_FIRST_WRITE = "first_write"


def _told(error: Exception, runs: Executable, program: Program) -> TraceError | None:
    """Note on what an operator raised which one it was, and the user's line that it comes from.

    Returns:
        What to raise instead, if it is for operands' dtypes, which fake kernels let pass.
    """
    code = runs.__code__  # pyright: ignore
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code is code]
    if not lines or isinstance(error, FzeroError):
        return None
    name = linecache.getline(code.co_filename, lines[0]).partition(" = ")[0].strip()
    for node in program.graph.nodes:
        if node.name != name:
            continue
        given = [x for operand in node.all_input_nodes for x in tensors_of(operand)]
        of = ", ".join(f"{x.dtype} {tuple(x.shape)}" for x in given)
        where = origin_of(node).where  # none of what was typed in, or made by a transform
        recorded = f", which was recorded at {where}" if where else ""
        if isinstance(error, RuntimeError) and (why := _of_dtypes(given, str(error))):
            return TraceError(
                f"{node.target}{recorded}{',' * bool(where)} was given {of}, and {why}"
            )
        error.add_note(f"raised by {node.target} of {of}{recorded}")
    return None


def _of_dtypes(given: Sequence[Tensor], said: str) -> str:
    """Why an operator can't take these dtypes; empty if that is not what it failed for.

    Of floats that is told by themselves. Integers beside floats may be indices, and it may have
    failed for where they point to: then it says nothing of dtypes.
    """
    if len({x.dtype for x in given if x.is_floating_point()}) > 1:
        return (
            "its kernel takes operands of one dtype. Parameters come in the dtype of "
            "Config(precision=...), a batch as it is: cast it there, as in x.to(w.dtype). Only "
            "with a precision does fzero.functionalize cast what modules are called with, and "
            "never integers."
        )
    several = len({x.dtype for x in given}) > 1
    if several and any(x in said for x in ("dtype", "scalar type")):
        return (
            f"its kernel refuses one of them: {said.splitlines()[0].rstrip('.')}. Nothing casts "
            "integers: cast them where the batch comes in, as in x.to(w.dtype) or labels.long()."
        )
    return ""


_NUMBERS = itertools.count()
_FILENAME = "<fzero program "
Then = Callable[[fx.Node], Callable[[Any], Any] | None]
"""What is called on the result of a node, if anything."""


def _function(program: Program, then: Then) -> Executable:
    source, scope = generate(program, then)
    filename = f"{_FILENAME}{program.name} {next(_NUMBERS)}>"
    exec(compile(source, filename, "exec"), scope)
    function = scope["program"]
    _forget_gone()
    lines = _Lines(source.splitlines(keepends=True))
    # A frame in somebody's traceback holds the function, too: by its globals, where it is.
    lines.function = weakref.ref(function)
    # Without a time of change (None) linecache keeps it, so tracebacks show the generated line.
    linecache.cache[filename] = (len(source), None, lines, filename)
    return function


class _Lines(list[str]):
    """What linecache has of a generated function, and the function."""

    function: weakref.ref[Any]


def _forget_gone() -> None:
    """Drop lines of functions that are gone. Not as they go, which may be while linecache looks."""
    for name in [*linecache.cache]:
        entry = linecache.cache.get(name, ()) if name.startswith(_FILENAME) else ()
        lines = entry[2] if len(entry) > 2 else None
        if isinstance(lines, _Lines) and lines.function() is None:
            linecache.cache.pop(name, None)


class _Inputs:
    """How the inputs of a Program lie in memory, and those whose caller reads what it wrote."""

    def __init__(self, program: Program) -> None:
        values = [tensors_of(node) for node in placeholders(program.graph)]
        written = inputs_written_in_place(program.graph)
        self.tensors = [i for i, value in enumerate(values) if value]
        self.strides = [values[i][0].stride() for i in self.tensors]
        # nearly all inputs are dense, which is asked without a line of Python for each
        self.dense = [i for i in self.tensors if values[i][0].is_contiguous()]
        self.others = len(self.dense) < len(self.tensors)
        kept = _kept(program)
        self.written = [
            i
            for i, node in enumerate(placeholders(program.graph))
            if node in written and not kept.isdisjoint(memory_of(node))
        ]

    def restore(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """The inputs as they lay while recording: those that lie otherwise are copied."""
        if not self.others and all(map(Tensor.is_contiguous, map(given.__getitem__, self.dense))):
            return given
        laid_out = list(given)
        for i, strides in zip(self.tensors, self.strides, strict=True):
            laid_out[i] = restored(given[i], strides)
        same = all(x is y for x, y in zip(laid_out, given, strict=True))
        return given if same else tuple(laid_out)

    def write_back(self, copies: Sequence[Any], given: Sequence[Any]) -> None:
        """What the Program wrote into copies belongs into what was given."""
        for i in self.written:
            if copies[i] is not given[i]:
                given[i].copy_(copies[i])


class _Look(NamedTuple):
    """A run that looks at what each operator returns.

    Args:
        found: to which those are added that lay it out otherwise than was recorded.
        dynamic: of a run with other sizes than those recorded: how the Program follows them.
        sizes: these.
    """

    found: set[fx.Node]
    dynamic: Dynamic | None = None
    sizes: tuple[int, ...] = ()

    def layouts(self, node: fx.Node) -> list[tuple[Sequence[int], Sequence[int]] | None]:
        """Shape and strides of each value that a node has to make; None of what has neither."""
        values = [x if isinstance(x, Tensor) else None for x in _flat(node.meta["val"])]
        if self.dynamic is None:
            return [x if x is None else (x.shape, _strides_of(x)) for x in values]
        known = self.dynamic.layouts(node, self.sizes)
        follows = iter(known or ())
        return [None if x is None else next(follows, None) for x in values]

    def __call__(self, node: fx.Node, value: Any) -> Any:
        """What a node returned, laid out as it has to be."""
        layouts = self.layouts(node)
        for x, said, layout in zip(_flat(value), _flat(node.meta["val"]), layouts, strict=True):
            if layout is None or said.layout is not torch.strided:
                continue
            if x is None:  # a gradient that its output mask spares; fake kernels make it
                continue
            shape, strides = layout
            # norms of mixed dtypes keep their statistics in float32 on some devices, which their
            # fake kernels do not know: a float of another width changes no number read from it
            floats = x.is_floating_point() and said.is_floating_point()
            if tuple(x.shape) != tuple(shape) or (x.dtype != said.dtype and not floats):
                raise TraceError(
                    f"{node.target} returned {x.dtype} {tuple(x.shape)}, and its fake kernel said "
                    f"{said.dtype} {tuple(shape)} while the step was staged out: what was "
                    "recorded after it is wrong. Correct the operator's fake kernel "
                    "(torch.library.register_fake), or use Config(executor='eager')."
                )
            if not agree(x.shape, x.stride(), strides):
                self.found.add(node)
        wanted = [layout and layout[1] for layout in layouts]
        return _laid_out(wanted, value) if node in self.found else value


def _strides_of(x: Tensor) -> tuple[int, ...]:
    return x.stride() if x.layout is torch.strided else ()


def _looked_at(look: _Look, node: fx.Node) -> Callable[[Any], Any] | None:
    """Wherever a kernel runs that may differ from its fake one."""
    computes = isinstance(node.target, torch._ops.OpOverload) and bool(tensors_of(node))
    computes = computes and not is_op(node, *_IN_GRAD_MODE)  # its workspace is known to nobody else
    # what is on its way is looked at on arrival
    computes = computes and not is_op(node, *works.LAUNCHES)
    return partial(look, node) if computes else None


def _restored_after(found: Collection[fx.Node], node: fx.Node) -> Callable[[Any], Any] | None:
    return partial(_laid_out, _strides(node)) if node in found else None


def _strides(node: fx.Node) -> list[tuple[int, ...] | None]:
    values = _flat(node.meta["val"])
    return [x.stride() if isinstance(x, Tensor) else None for x in values]


def _laid_out(strides: Sequence[Sequence[int] | None], value: Any) -> Any:
    if isinstance(value, Tensor):
        return restored(value, strides[0])  # pyright: ignore
    pairs = zip(value, strides, strict=True)
    return [x if x is None or wanted is None else restored(x, wanted) for x, wanted in pairs]


def generate(program: Program, then: Then = lambda node: None) -> tuple[str, dict[str, Any]]:
    """The Python source of a Program, and the names that it uses."""
    scope: dict[str, Any] = {}
    bound: dict[Any, str] = {}
    taken = {_FIRST_WRITE, *(node.name for node in program.graph.nodes)}

    def bind(value: Any, hint: str) -> str:
        """A global that holds `value`."""
        # By identity: some can't be hashed. The scope keeps each alive, so no id is used twice.
        key = id(value)
        if key not in bound:
            bound[key] = name = fresh(f"{hint}_{len(bound)}")
            scope[name] = value
        return bound[key]

    def fresh(name: str) -> str:
        while name in taken:
            name += "_"
        return name

    def show(value: Any) -> str:
        if isinstance(value, (fx.Node, _Name)):
            return value.name
        if isinstance(value, (list, tuple)):
            inner = ", ".join(map(show, value))
            if isinstance(value, list):
                return f"[{inner}]"
            return f"({inner},)" if value else "()"
        # Exact types: the repr of a subclass, such as an IntEnum, is no expression.
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        # NaN and infinity have no literal.
        if type(value) is float and value == value and abs(value) != float("inf"):
            return repr(value)
        return bind(value, type(value).__name__.lower())

    last_use = _last_uses(program.graph)
    lines: list[str] = []
    parameters: list[str] = []
    kept = _kept(program)
    first_write: int | None = None
    dynamic = program.dynamic if program.dynamic is not None and program.dynamic.open else None
    table = [_Name(fresh(f"number_{i}")) for i, _ in enumerate(dynamic.table)] if dynamic else []
    if dynamic is not None and table:
        inputs = placeholders(program.graph)
        sizes = ", ".join(f"{inputs[i].name}.shape[{dim}]" for i, dim in dynamic.dims)
        lines.append(
            f"{', '.join(map(show, table))}, = {bind(dynamic.numbers, 'numbers')}({sizes})"
        )
    for node in program.graph.nodes:
        if first_write is None and any(
            not kept.isdisjoint(memory_of(x)) for x in written_operands(node)
        ):
            first_write = len(lines) + 2  # behind the line of `def`
        if node.op == "placeholder":
            parameters.append(node.name)
        elif node.op == "get_attr":
            lines.append(f"{node.name} = {bind(program.constants[str(node.target)], 'constant')}")
        elif is_op(node, "fzero::phase"):
            continue
        elif node.op == "output":
            lines.append(f"return {show(list(node.args[0]))}")
        elif isinstance(node.target, Boxed):
            # its operands go before it runs: from then on only the list has them
            dropped = "".join(f"{name} = " for name in last_use.pop(node, ()))
            lines.append(f"boxed = {show(node.args[0])}")
            lines.append(f"{dropped}None")
            lines.append(f"{node.name} = {bind(node.target.run, 'region')}(boxed)")
        else:
            lines.append(_statement(node, show, bind, then, table))
        if dead := last_use.get(node):
            lines[-1] += "; " + " = ".join(dead) + " = None"
    scope[_FIRST_WRITE] = first_write
    body = "\n    ".join(lines)
    return f"def program({', '.join(parameters)}):\n    {body}\n", scope


def _kept(program: Program) -> set[int]:
    """The memory of inputs that are more to the caller than what they become; gradients are not."""
    nodes = placeholders(program.graph)
    categories = itertools.chain(program.input_categories, itertools.repeat(""))
    pairs = zip(nodes, categories, strict=False)
    return {at for node, kind in pairs if kind != GRADIENTS for at in memory_of(node)}


def _statement(
    node: fx.Node,
    show: Callable[[Any], str],
    bind: Callable[[Any, str], str],
    then: Then,
    table: Sequence[Any],
) -> str:
    target: Any = node.target
    mark = mark_of(node) if table else None
    numbers = {path: table[number] for path, number in mark.numbers} if mark else {}
    if target is operator.getitem:
        return f"{node.name} = {show(node.args[0])}[{node.args[1]}]"
    binding = Binding(target)
    if isinstance(target, torch._ops.OpOverload):
        # else the overload's C++ function itself: one Python frame less a call
        binding = binding_of(node) or Binding(target._op)
    function = binding.function
    function = joined(node, function)
    function = getattr(function, "runs", function)  # an island: see its operator
    if is_op(node, *_IN_GRAD_MODE):
        function = _in_grad_mode(function)
    # Ours gives a work in flight where torch's gives a tensor, so only waits may read it.
    if is_op(node, *works.LAUNCHES) and all(is_op(user, _WAIT) for user in node.users):
        function = works.LAUNCHES[target._schema.name]
    elif is_op(node, _WAIT) and is_op(node.all_input_nodes[0], *works.LAUNCHES):
        function = works.wait  # which takes what torch's operators give, too
    name = bind(function, getattr(target, "__name__", "op").replace(".", "_").replace("<", "_"))
    args = substituted(node.args, ("args",), numbers) if numbers else node.args
    arguments = [show(x) for x in binding.arguments(args)]
    for key, value in node.kwargs.items():
        arguments.append(f"{key}={show(substituted(value, ('kwargs', key), numbers))}")
    call = f"{name}({', '.join(arguments)})"
    if not node.users:
        return call
    if (after := then(node)) is not None:
        call = f"{bind(after, 'laid_out')}({call})"
    return f"{node.name} = {call}"


_WAIT = "_c10d_functional::wait_tensor"


# Without grad mode, which Programs run outside of, it does not keep what its backward reads.
_IN_GRAD_MODE = ("aten::mkldnn_rnn_layer",)


def _in_grad_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> list[Tensor]:
        with torch.enable_grad():
            # detached: what autograd noted would keep the operands alive
            return [x.detach() for x in function(*args)]

    return run


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[str]]:
    """After which node each value is dropped."""
    seen: set[fx.Node] = set()
    result: dict[fx.Node, list[str]] = {}
    for node in reversed(graph.nodes):
        for operand in reads(node):
            if operand not in seen:
                seen.add(operand)
                # what is returned goes with the frame, and nothing follows a return
                if node.op != "output":
                    result.setdefault(node, []).append(operand.name)
    return result


def _random_devices(program: Program) -> list[torch.device]:
    """The devices whose generators the Program sets: where an operator can't have its own."""
    sites = [node for node in program.graph.nodes if SITE in node.meta]
    nodes = [node for node in sites if "generator" not in node.kwargs]
    values: Sequence[Any] = [node.meta.get("val") for node in nodes]
    found = {x.device for value in values for x in _flat(value) if isinstance(x, Tensor)}
    return sorted(found, key=str)


def _flat(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


@contextlib.contextmanager
def _kept_generators(devices: Sequence[torch.device]) -> Any:
    states = [generator_of(device).get_state() for device in devices]
    try:
        yield
    finally:
        for device, state in zip(devices, states, strict=True):
            generator_of(device).set_state(state)
