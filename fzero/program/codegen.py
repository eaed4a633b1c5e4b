"""Running a Program: its graph as one straight-line Python function that frees what is used up."""

import contextlib
import itertools
import linecache
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fzero.numerics.rng import generator_of
from fzero.program.graph import is_op
from fzero.program.memory import reads
from fzero.program.passes.seed import SITE
from fzero.program.program import Program

Executable = Callable[..., list[Any]]


def compile_program(program: Program) -> Executable:
    """A function from the Program's inputs, in order, to the list of its outputs.

    Every local is dropped after its last use. Random numbers leave the generators as they were.
    """
    source, scope = generate(program)
    filename = f"<fzero program {program.name} {next(_NUMBERS)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(source, filename, "exec"), scope)
    function = scope["program"]
    devices = _random_devices(program)

    def run(*inputs: Any) -> list[Any]:
        with torch.no_grad(), _kept_generators(devices):
            return function(*inputs)

    return run


_NUMBERS = itertools.count()


def generate(program: Program) -> tuple[str, dict[str, Any]]:
    """The Python source of a Program, and the names that it uses."""
    scope: dict[str, Any] = {}
    bound: dict[Any, str] = {}
    taken = {node.name for node in program.graph.nodes}

    def bind(value: Any, hint: str) -> str:
        """A global that holds `value`."""
        key = id(value)
        if key not in bound:
            name = f"{hint}_{len(bound)}"
            while name in taken:
                name += "_"
            bound[key] = name
            scope[name] = value
        return bound[key]

    def show(value: Any) -> str:
        if isinstance(value, fx.Node):
            return value.name
        if isinstance(value, (list, tuple)):
            inner = ", ".join(map(show, value))
            if isinstance(value, list):
                return f"[{inner}]"
            return f"({inner},)" if value else "()"
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        if type(value) is float and value == value and abs(value) != float("inf"):
            return repr(value)
        return bind(value, type(value).__name__.lower())

    last_use = _last_uses(program.graph)
    lines: list[str] = []
    parameters: list[str] = []
    for node in program.graph.nodes:
        if node.op == "placeholder":
            parameters.append(node.name)
        elif node.op == "get_attr":
            lines.append(f"{node.name} = {bind(program.constants[str(node.target)], 'constant')}")
        elif node.op == "output":
            lines.append(f"return {show(list(node.args[0]))}")
        else:
            lines.append(_statement(node, show, bind))
        if dead := last_use.get(node):
            lines[-1] += "; " + " = ".join(dead) + " = None"
    body = "\n    ".join(lines)
    return f"def program({', '.join(parameters)}):\n    {body}\n", scope


def _statement(node: fx.Node, show: Callable[[Any], str], bind: Callable[[Any, str], str]) -> str:
    target: Any = node.target
    if target is operator.getitem:
        return f"{node.name} = {show(node.args[0])}[{node.args[1]}]"
    # the overload's C++ function itself: one Python frame less a call
    function = target._op if isinstance(target, torch._ops.OpOverload) else target
    if is_op(node, *_IN_GRAD_MODE):
        function = _in_grad_mode(function)
    name = bind(function, getattr(target, "__name__", "op").replace(".", "_").replace("<", "_"))
    arguments = [show(x) for x in node.args]
    arguments += [f"{key}={show(value)}" for key, value in node.kwargs.items()]
    call = f"{name}({', '.join(arguments)})"
    return f"{node.name} = {call}" if node.users else call


# Without grad mode, which Programs run outside of, it does not keep what its backward reads.
_IN_GRAD_MODE = ("aten::mkldnn_rnn_layer",)


def _in_grad_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> list[Tensor]:
        with torch.enable_grad():
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
                if node.op != "output":
                    result.setdefault(node, []).append(operand.name)
    return result


def _random_devices(program: Program) -> list[torch.device]:
    """The devices whose generators the Program sets."""
    nodes = [node for node in program.graph.nodes if SITE in node.meta]
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
