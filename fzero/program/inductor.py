"""Running a Program whose stretches torch's inductor has compiled; the rest is generated code.

A stretch is compiled when the Program first runs, once for all that do the same. Its kernels are
kept in inductor's cache on disk, where the next process finds them. What can't be compiled runs
generated, and the Program's log says which and why. See [Note: stretches].
"""

import contextlib
import functools
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fzero.errors import ConfigError, first_line, users_line
from fzero.program.codegen import Boxed, Executable, compile_program
from fzero.program.graph import placeholders, tensors_of
from fzero.program.program import Program
from fzero.program.stretches import makes_memory, stretches_of, with_stretches
from fzero.program.strides import agree, restored


def compile_stretches(program: Program, tell: Callable[[str], None]) -> Executable:
    """`compile_program`, with stretches that inductor compiles when it first runs.

    Args:
        program: what is to run.
        tell: is given a line for the log, then.

    Raises:
        ConfigError: at the first run: inductor compiles nothing here.
    """
    run: Executable | None = None

    def run_compiled(*inputs: Any) -> list[Any]:
        nonlocal run
        if run is None:
            graph, line = compiled_graph(program)
            tell(line)
            run = compile_program(replace(program, graph=graph))
        return run(*inputs)

    return run_compiled


def compiled_graph(program: Program) -> tuple[fx.Graph, str]:
    """The Program's graph with a call in the place of each stretch, and a line for its log."""
    refuse_without_compiler()
    stretches = stretches_of(program.graph)
    known: dict[str, Compiled | str] = {}
    made: dict[fx.Node, Boxed] = {}
    refused: Counter[str] = Counter()
    for stretch in stretches:
        graph = stretch.graph()
        text = _described(graph)
        if text not in known:
            known[text] = compiled(graph)
        found = known[text]
        if isinstance(found, str):
            refused[f"{stretch.layer or 'outside of modules'}: {found}"] += 1
        else:
            made[stretch.last] = Boxed(_Checked(found, graph, stretch.layer))
    fitting = [stretch for stretch in stretches if stretch.last in made]
    count = sum(len(stretch.operators) for stretch in fitting)
    total = sum(map(makes_memory, program.graph.nodes))
    kinds = sum(not isinstance(x, str) for x in known.values())
    line = f"inductor: {count} of {total} operators in {len(made)} stretches of {kinds} kinds"
    if refused:
        line += "; generated: " + "; ".join(f"{n} x {why}" for why, n in refused.items())
    return with_stretches(program.graph, fitting, lambda stretch: made[stretch.last]), line


Compiled = Callable[[list[Any]], Sequence[Tensor]]
"""From a list, which it empties as it goes, to the results."""


class _Checked:
    """A compiled stretch, which is looked at when it first runs: see `fzero.program.codegen`."""

    def __init__(self, run: Compiled, graph: fx.Graph, layer: str) -> None:
        self.run, self.graph, self.layer = run, graph, layer
        (outputs,) = next(iter(reversed(graph.nodes))).args
        self.wanted: list[Tensor] = [x.meta["val"] for x in outputs]  # pyright: ignore
        self.looked = False
        self.restored: list[int] = []  # the results that lie otherwise than recorded

    def __call__(self, given: list[Any]) -> Sequence[Tensor]:
        if not self.looked:
            return self._first(given)
        results = self.run(given)
        if self.restored:
            results = list(results)
            for i in self.restored:
                results[i] = restored(results[i], self.wanted[i].stride())
        return results

    def _first(self, given: list[Any]) -> Sequence[Tensor]:
        inputs = list(given)  # it empties what it is given
        results: Sequence[Tensor] = ()
        # its own assertions are about sizes and strides of what operators return
        with contextlib.suppress(AssertionError):
            results = self.run(given)
        found = [(x.shape, x.dtype) for x in results]
        if found != [(x.shape, x.dtype) for x in self.wanted]:
            warnings.warn(
                f"what inductor made of a part of {self.layer or 'the model'} computes tensors of "
                "another shape, dtype or strides than were recorded: it runs generated.",
                stacklevel=users_line(),
            )
            self.run = generated(self.graph)
            results = self.run(inputs)
        pairs = zip(results, self.wanted, strict=True)
        self.restored = [
            i for i, (x, y) in enumerate(pairs) if not agree(y.shape, x.stride(), y.stride())
        ]
        self.looked = True
        return [restored(x, y.stride()) for x, y in zip(results, self.wanted, strict=True)]


def generated(graph: fx.Graph) -> Compiled:
    """A stretch as generated code."""
    names = tuple(node.name for node in placeholders(graph))
    run = compile_program(Program("stretch", graph, names, ()))

    def unpacked(given: list[Any]) -> Sequence[Tensor]:
        inputs = tuple(given)
        given.clear()
        return run(*inputs)

    return unpacked


def _described(graph: fx.Graph) -> str:
    """All that a stretch's code depends on, as text."""
    lines = []
    for node in graph.nodes:
        values = [
            (x.dtype, tuple(x.shape), x.stride(), x.storage_offset(), str(x.device))
            for x in tensors_of(node)
        ]
        lines.append(f"{node.name} {node.op} {node.target} {node.args} {node.kwargs} {values}")
    return "\n".join(lines)


# ------------------------------------------------------------------- what is torch's and private
def compiled(graph: fx.Graph) -> Compiled | str:
    """A stretch, compiled; or why it can't be, in one line.

    `compile_fx_inner` is what torch.compile ends in, behind dynamo and autograd: it takes a graph
    of operators that it lowers, asks the cache on disk, and gives a function of one list. What
    makes such operators of others is inductor's table of decompositions.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    settings = {"fx_graph_cache": True, "triton.cudagraphs": False, "size_asserts": True}
    try:
        # with symbols, though there are none: without them the cache on disk is passed by
        mode = FakeTensorMode(shape_env=ShapeEnv())
        # what is set is the process's: of two at a time one would put back what the other set
        with _ONE_AT_A_TIME, torch.no_grad(), config.patch(settings), tracing(TracingContext(mode)):
            module, inputs = _decomposed(graph, mode)
            result: Any = compile_fx_inner(module, inputs, is_inference=True)
        return result
    except Exception as error:  # whatever it meets in one stretch, the others can be compiled
        return f"{type(error).__name__}: {first_line(error)}"


_ONE_AT_A_TIME = threading.Lock()


def _decomposed(graph: fx.Graph, mode: FakeTensorMode) -> tuple[fx.GraphModule, list[Any]]:
    """A stretch in the operators that inductor lowers, with its inputs as fake tensors."""
    from torch._inductor.decomposition import select_decomp_table

    inputs = [_faked(mode, node.meta["val"]) for node in placeholders(graph)]
    run = fx.Interpreter(fx.GraphModule(torch.nn.Module(), graph)).run
    with mode:
        flat = torch.func.functionalize(run, remove="mutations")  # some write in place
        module = make_fx(flat, decomposition_table=select_decomp_table())(*inputs)
    output = next(iter(reversed(module.graph.nodes)))
    wanted = next(iter(reversed(graph.nodes))).args[0]
    # what it lays out as recorded; where it does not, a copy follows
    output.meta["user_visible_output_idxs"] = list(range(len(wanted)))
    output.meta["original_output_strides"] = [x.meta["val"].stride() for x in wanted]
    return module, inputs


def _faked(mode: FakeTensorMode, x: Tensor) -> Tensor:
    """A tensor like `x`, at the same place in memory of its own: places tell what is aligned."""
    extent = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) + 1
    with mode:
        memory = torch.empty(x.storage_offset() + extent, dtype=x.dtype, device=x.device)
        return memory.as_strided(x.shape, x.stride(), x.storage_offset())


@functools.cache
def why_not() -> str:
    """Why inductor compiles nothing in this process; "" if it does."""
    x = torch.arange(6.0, device="cpu").view(2, 3)
    with FakeTensorMode() as mode:
        program = make_fx(lambda x: ((x * 2).sin().sum(1),))(mode.from_tensor(x))
    found = compiled(program.graph)
    if isinstance(found, str):
        return found
    given = [x]
    (y,) = found(given)
    if given or not torch.allclose(y, (x * 2).sin().sum(1)):
        return "it does not do what it is known to do"
    return ""


def refuse_without_compiler() -> None:
    """Try the private API on a small graph.

    Raises:
        ConfigError: it does not compile, or computes something else.
    """
    if why := why_not():
        raise ConfigError(
            f"Config.executor='inductor': torch {torch.__version__} compiles nothing here ({why}). "
            "On a CPU it needs a C++ compiler (g++, or what CXX names), on a GPU triton. Or use "
            "Config(executor='traced')."
        )
