"""A call that a graph holds as one node, whatever Python it runs: an *island*.

[Note: islands] While a function is recorded an island is not looked into: its node says what comes
out, and when the Program runs, it runs as plain PyTorch. For backward it leaves a *tape*: the graph
that autograd made of it. Recorded, a tape is an empty tensor, so that everything which moves values
about (derivatives, functionalisation, rematerialisation) carries it like any other; when the
Program runs it is the graph itself. An island stands in a region of its own, so backward runs it
again instead of keeping its tape: what it needs is gathered and counted like all else.

Higher-order operators are torch's way to have arbitrary arguments in a graph, and private. The
public alternative, `torch.library.custom_op`, takes no Python object, and so would need a table of
functions in the process. `check_islands` records one and looks at what came of it.
"""

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    disable_proxy_modes_tracing,
    make_fx,
    track_tensor_tree,
)

from fzero.errors import FzeroError, TraceError
from fzero.functional.apart import apart
from fzero.functional.differentiate import pulled_back
from fzero.functional.transforms import in_forward_mode


class Form(NamedTuple):
    """Shape, dtype and device of a dense tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: Tensor) -> "Form":
        """Of a tensor."""
        return cls(tuple(x.shape), x.dtype, x.device)

    def empty(self) -> Tensor:
        """A tensor of this form."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def __repr__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"


@dataclass(frozen=True, eq=False)
class Island:
    """One call of an opaque function, as a function of tensors.

    Args:
        name: of the function, for listings and messages.
        fn: `(tensors) -> tensors`.
        inputs: forms of the tensors that it takes.
        outputs: forms of those that it returns.
        wanted: for each input, whether backward asks for its gradient.
    """

    name: str
    fn: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    inputs: tuple[Form, ...]
    outputs: tuple[Form, ...]
    wanted: tuple[bool, ...]

    def __repr__(self) -> str:
        return re.sub(r"\W+", "_", self.name)  # stands in source that torch compiles

    @property
    def taped(self) -> bool:
        """Whether there is a backward."""
        return any(self.wanted)

    def run(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """What it returns, and a tape if it is taped.

        Raises:
            TraceError: it returned something else than when it was recorded.
            FzeroError: it changed an argument in place.
        """
        given = [x.detach() for x in tensors]
        leaves = [x.requires_grad_() if w else x for x, w in zip(given, self.wanted, strict=True)]
        versions = [x._version for x in leaves]
        with torch.set_grad_enabled(self.taped):
            found = list(self.fn(leaves))
        if [x._version for x in leaves] != versions:
            raise FzeroError(
                f"the opaque function {self.name} changed an argument in place, which other "
                "operators read. Compute a new tensor instead."
            )
        self._check(found)
        storages = {x.untyped_storage()._cdata for x in tensors}
        results = [_own(x.detach(), storages) for x in found]
        return (*results, Tape(found, leaves)) if self.taped else tuple(results)

    def _check(self, found: Sequence[Tensor]) -> None:
        forms = tuple(map(Form.of, found))
        if forms != self.outputs:
            raise TraceError(
                f"the opaque function {self.name} returned {shown(forms)}, and when it was "
                f"recorded {shown(self.outputs)}: shapes and dtypes of what it returns must "
                "follow from those of its arguments. Put what depends on values inside, and return "
                "a result of fixed shape; or tell its shapes with fzero.opaque(fn, like=...)."
            )

    def pull(self, tape: "Tape", grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The gradients of the wanted inputs."""
        pairs = zip(_floating(tape.outputs), grads, strict=True)
        reached = [(x, g.to(x.dtype)) for x, g in pairs if x.requires_grad]
        wanted = [x for x, w in zip(tape.inputs, self.wanted, strict=True) if w]
        if not reached:
            return tuple(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in wanted)
        with torch.enable_grad():
            found = pulled_back([x for x, _ in reached], wanted, [g for _, g in reached])
        return tuple(
            torch.zeros_like(x, memory_format=torch.contiguous_format)
            if g is None
            else g.to_dense().contiguous()
            if g.is_sparse
            else g.contiguous()
            for x, g in zip(wanted, found, strict=True)
        )


class Tape(NamedTuple):
    """What an island's backward reads: its results, on autograd's graph, and the graph's leaves."""

    outputs: list[Tensor]
    inputs: list[Tensor]


def _own(x: Tensor, storages: set[int]) -> Tensor:
    """`x`, dense, in memory that no input is in."""
    x = x.contiguous()
    return x.clone() if x.untyped_storage()._cdata in storages else x


def _floating(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x for x in tensors if x.is_floating_point()]


def shown(forms: Sequence[Form]) -> str:
    """Forms, for messages."""
    return ", ".join(map(repr, forms)) or "nothing"


# ------------------------------------------------------------------------------------ operators
class _Operator(HigherOrderOperator):
    """An operator whose first argument is an `Island`.

    Args:
        name: its own.
        runs: what it does when a Program runs. Called instead of the operator, in which autograd
            would be switched off.
    """

    def __init__(self, name: str, runs: Callable[..., tuple[Any, ...]]) -> None:
        super().__init__(name)
        self.runs = runs

    def __call__(self, island: Island, *tensors: Any) -> tuple[Any, ...]:
        return super().__call__(island, *tensors)  # pyright: ignore


def _made(
    name: str,
    fake: Callable[[Island], tuple[Tensor, ...]],
    runs: Callable[..., tuple[Any, ...]],
) -> _Operator:
    operator = _Operator(name, runs)

    @operator.py_impl(torch._C.DispatchKey.Autograd)
    def _(island: Island, *tensors: Any) -> tuple[Any, ...]:
        # derivatives are taken above, by autograd Functions
        with torch._C._AutoDispatchBelowAutograd():
            return operator(island, *tensors)

    @operator.py_impl(FakeTensorMode)
    def _(mode: FakeTensorMode, island: Island, *tensors: Any) -> tuple[Tensor, ...]:
        with mode:
            return fake(island)

    @operator.py_impl(ProxyTorchDispatchMode)
    def _(mode: ProxyTorchDispatchMode, island: Island, *tensors: Any) -> Any:
        tracer = mode.tracer
        nodes = [tracer.unwrap_proxy(x).node for x in tensors]  # pyright: ignore
        given: Any = (island, *nodes)
        # not create_proxy, which takes the arguments apart that it knows, and refuses all others
        node = tracer.create_node("call_function", operator, given, {}, operator.name())
        with disable_proxy_modes_tracing():
            found = operator(island, *tensors)
        return track_tensor_tree(found, tracer.proxy(node), constant=None, tracer=tracer)

    @operator.py_functionalize_impl
    def _(ctx: Any, island: Island, *tensors: Any) -> Any:
        with ctx.redispatch_to_next():
            return ctx.wrap_tensors(operator(island, *ctx.unwrap_tensors(tensors)))

    return operator


def _fake_results(island: Island) -> tuple[Tensor, ...]:
    found = tuple(form.empty() for form in island.outputs)
    return (*found, torch.empty(0, dtype=torch.uint8, device="cpu")) if island.taped else found


def _fake_grads(island: Island) -> tuple[Tensor, ...]:
    return tuple(x.empty() for x, w in zip(island.inputs, island.wanted, strict=True) if w)


def _run(island: Island, *tensors: Tensor) -> tuple[Any, ...]:
    return island.run(tensors)


def _pull(island: Island, tape: Tape, *grads: Tensor) -> tuple[Tensor, ...]:
    return island.pull(tape, grads)


RUN = _made("fzero_opaque", _fake_results, _run)
PULL = _made("fzero_opaque_backward", _fake_grads, _pull)


# ---------------------------------------------------------------------------------- derivatives
class _Called(torch.autograd.Function):
    """The island as autograd, and every `torch.func` transform, sees it."""

    @staticmethod
    def forward(island: Island, *tensors: Tensor) -> Any:
        return tuple(RUN(island, *tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.island = inputs[0]
        *results, tape = output
        ctx.floats = [x.is_floating_point() for x in results]
        ctx.mark_non_differentiable(tape, *[x for x in results if not x.is_floating_point()])
        # the arguments only so that a second derivative comes by `_Pulled`, and is refused there
        ctx.save_for_backward(tape, *inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        tape, *arguments = ctx.saved_tensors
        floating = [g for g, f in zip(grads[:-1], ctx.floats, strict=True) if f]
        given = (ctx.island, tape, len(floating), *floating, *arguments)
        found = iter(_Pulled.apply(*given))  # pyright: ignore
        return (None, *[next(found) if w else None for w in ctx.island.wanted])


class _Pulled(torch.autograd.Function):
    """The island's backward, which has none of its own."""

    @staticmethod
    def forward(island: Island, tape: Tensor, count: int, *tensors: Tensor) -> Any:
        return tuple(PULL(island, tape, *tensors[:count]))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.island = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise _one_derivative(ctx.island, "second derivative")


def _one_derivative(island: Island, asked: str) -> TraceError:
    return TraceError(
        f"the opaque function {island.name} has no {asked}: it has its gradient alone. Take it out "
        "of fzero.opaque if it can be recorded, or use Config(executor='eager')."
    )


def record(island: Island, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Put the island into the graph that is being recorded."""
    if in_forward_mode():
        raise _one_derivative(island, "forward-mode derivative")
    if not island.taped:
        return tuple(RUN(island, *tensors))
    results = _Called.apply(island, *tensors)
    return tuple(results[:-1])  # pyright: ignore


class _Runs(fx.Interpreter):
    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().call_function(getattr(target, "runs", target), args, kwargs)


@functools.cache
def check_islands() -> None:
    """Raise unless an island of one line is seen to become two nodes that compute its gradient.

    Raises:
        TraceError: this torch does otherwise.
    """
    form = Form((2,), torch.float32, torch.device("cpu"))
    like = {"dtype": form.dtype, "device": form.device}  # whatever a caller's defaults are
    island = Island("probe", lambda xs: [xs[0] * 3], (form,), (form,), (True,))

    def gradient(x: Tensor) -> Any:
        _, pull = torch.func.vjp(lambda x: record(island, [x])[0].sum(), x)  # pyright: ignore
        return pull(x.new_ones(()))

    def probe() -> bool:
        graph = make_fx(gradient, tracing_mode="fake")(torch.ones(2, **like))
        targets = [node.target for node in graph.graph.nodes]
        (found,) = _Runs(graph).run(torch.ones(2, **like))
        return targets.count(RUN) == targets.count(PULL) == 1 and bool((found == 3).all())

    try:
        fits = apart(probe)
    except Exception:  # whatever a torch of another make raises
        fits = False
    if not fits:
        raise TraceError(
            f"torch {torch.__version__} records higher-order operators in a way that fzero.opaque "
            "does not know. Use a torch that fzero's README names, or Config(executor='eager')."
        )
