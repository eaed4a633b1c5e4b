"""`stage`: a part of the model whose parameters are gathered for it alone.

The eager executor can't see what a model function will do next, so it can't free a parameter after
its last use in forward, and autograd keeps it until backward. A staged part is one node of
autograd's graph that keeps the shards and its inputs instead, and does its work again in backward.

    forward     gather the subtree in one bucket, run fn without a graph, keep shards and inputs
    backward    gather again, run fn, differentiate, reduce-scatter the gradients in one bucket
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge

from fzero import tree
from fzero.distributed.collectives import all_gather, replicate
from fzero.eager.gathered import Gathered
from fzero.eager.lazy import LazyLeaf, changed_in_place
from fzero.errors import ConfigError, FzeroError
from fzero.functional.held import held_by_nobody, held_over
from fzero.numerics.casts import edges, edges_in
from fzero.numerics.rng import generator_of, preserved

P = ParamSpec("P")
R = TypeVar("R")


def stage(fn: Callable[P, R]) -> Callable[P, R]:
    """`fn(params_subtree, *inputs)` as a unit whose parameters are gathered for it alone.

    Under `Config(executor="eager", stage=3)` the subtree's leaves are gathered in one bucket when
    `fn` is called, freed when it returns, and gathered again in backward, where `fn` runs a second
    time with the same random numbers. Everywhere else `fn` is simply called: the values are the
    same either way.

    Args:
        fn: a function of a subtree of the parameters and of any pytrees. Whatever needs a gradient
            must be an argument of it; its result is a pytree of tensors and constants.

    Returns:
        A function with the arguments and results of `fn`.

    Raises:
        ConfigError: `fn` is no function.
        FzeroError: in a step: `fn` changes an argument in place, or uses a tensor that needs a
            gradient and is no argument.

    Examples:
        >>> import fzero
        >>> @fzero.stage
        ... def block(params, x):
        ...     return torch.tanh(x @ params["w"])
        >>> def model_fn(params, x):
        ...     for layer in params["layers"]:
        ...         x = block(layer, x)
        ...     return x.mean()
        >>> step_fn = fzero.make_train_step(
        ...     model_fn, fzero.optim.sgd(0.1), fzero.Config(executor="eager")
        ... )
        >>> params, opt_state = step_fn.init({"layers": [{"w": torch.eye(2)}] * 3})
        >>> params, opt_state = step_fn(params, opt_state, torch.ones(1, 2))
        >>> round(opt_state.metrics["loss"].item(), 4)
        0.5663

    References: the recomputation is that of Chen, Xu, Zhang, Guestrin, Training Deep Nets with
    Sublinear Memory Cost, arXiv:1604.06174.
    """
    if not callable(fn):
        raise ConfigError(
            f"stage got a {type(fn).__name__}, and takes a function: stage(block)(params, x), not "
            "stage(block(params, x))."
        )

    @functools.wraps(fn, updated=())  # a module's attributes are not the wrapper's
    def staged(*args: P.args, **kwargs: P.kwargs) -> R:
        leaves, spec = tree.flatten((args, kwargs))
        # a recording sees full leaves, and its Program gathers by itself
        lazy = next((x for x in leaves if isinstance(x, LazyLeaf)), None)
        if lazy is None:
            return fn(*args, **kwargs)
        assert isinstance(lazy.source, Gathered)  # the eager executor makes no other
        call = _Call(fn, leaves, spec, lazy.source, _surroundings(leaves))
        # shards in place of full leaves, so that autograd saves and differentiates what stays
        tensors = [_tracked(x) for x in leaves if isinstance(x, Tensor)]
        return call.result(_Stage.apply(call, *tensors))

    return staged


def _tracked(x: Tensor) -> Tensor:
    """The tensor that autograd sees in place of an argument."""
    return x.shard if isinstance(x, LazyLeaf) else x


@dataclass
class _Call:
    """One call of a staged function.

    Args:
        fn: the function.
        leaves: of its arguments; tensors among them are passed anew to each `run`.
        spec: rebuilds the arguments.
        source: gathers the lazy ones.
        again: a context that makes a second run draw the same numbers in the same precision.
        out_leaves: of its result, None where there is a tensor.
        out_spec: rebuilds the result.
    """

    fn: Callable[..., Any]
    leaves: list[Any]
    spec: tree.Spec
    source: Gathered
    again: Callable[[], contextlib.AbstractContextManager[None]]
    out_leaves: list[Any] = field(default_factory=list)
    out_spec: tree.Spec | None = None

    def __post_init__(self) -> None:
        tensors = [x for x in self.leaves if isinstance(x, Tensor)]
        self.lazy = {i: x for i, x in enumerate(tensors) if isinstance(x, LazyLeaf)}
        self.leaves = [_HERE if isinstance(x, Tensor) else x for x in self.leaves]

    def gather(self) -> dict[int, Tensor]:
        """The full leaves, by their index among the tensors."""
        return dict(zip(self.lazy, self.source.gather(list(self.lazy.values())), strict=True))

    def run(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The function on full tensors; the tensors of its result."""
        # the second run, in backward, must start from the same arguments
        versions = [x._version for x in tensors]
        given = iter(tensors)
        args, kwargs = tree.unflatten(
            self.spec, [next(given) if x is _HERE else x for x in self.leaves]
        )
        results, self.out_spec = tree.flatten(self.fn(*args, **kwargs))
        self.out_leaves = [_HERE if isinstance(x, Tensor) else x for x in results]
        for i, (x, version) in enumerate(zip(tensors, versions, strict=True)):
            if x._version != version:
                raise self._changed(i, x)
        return tuple(x for x in results if isinstance(x, Tensor))

    def result(self, tensors: tuple[Tensor, ...]) -> Any:
        """The result as `fn` gave it."""
        given = iter(tensors)
        assert self.out_spec is not None
        return tree.unflatten(
            self.out_spec, [next(given) if x is _HERE else x for x in self.out_leaves]
        )

    def _changed(self, index: int, x: Tensor) -> FzeroError:
        if index in self.lazy:
            return changed_in_place(self.lazy[index].leaf.name)
        return FzeroError(
            f"the staged function {_name(self.fn)} changed an argument of shape {tuple(x.shape)} "
            "in place; it runs again in backward, and would start from the changed value. Compute "
            "a new tensor (x + y instead of x.add_(y))."
        )


_HERE = object()  # where a tensor goes


class _Stage(Function):
    @staticmethod
    def forward(call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        full = call.gather()
        with held_over() as held:
            results = call.run([full.get(i, x) for i, x in enumerate(tensors)])
            held.warn("a part under fzero.stage")
        # autograd wants an argument that comes back to be another tensor
        return tuple(x.view_as(x) if any(x is y for y in tensors) else x for x in results)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call, *tensors = inputs
        ctx.save_for_backward(*tensors)
        # None tells which outputs nothing depends on: zeros would be pulled back through `fn`
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[x for x in output if not _can_have_gradient(x)])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        wanted = [i for i, need in enumerate(ctx.needs_input_grad[1:]) if need]
        # grad mode is on in a backward whose result will be differentiated
        differentiate = _differentiably if torch.is_grad_enabled() else _once
        grads: list[Tensor | None] = [None] * len(ctx.saved_tensors)
        results = differentiate(ctx.call, ctx.saved_tensors, wanted, cotangents)
        for i, grad in zip(wanted, results, strict=True):
            grads[i] = grad
        return (None, *grads)


def _once(
    call: _Call,
    tensors: Sequence[Tensor],
    wanted: Sequence[int],
    cotangents: Sequence[Tensor | None],
) -> Sequence[Tensor]:
    """Gradients of the wanted tensors, shards in place of full ones, without a graph."""
    # detached: the second run has a graph of its own, that ends at the arguments
    fresh: dict[int, Tensor] = {i: x.detach() for i, x in enumerate(tensors)}
    fresh.update(call.gather())
    for i in wanted:
        fresh[i].requires_grad_()
    with torch.enable_grad(), call.again():
        results = call.run([fresh[i] for i in range(len(tensors))])
    inputs = [fresh[i] for i in wanted]
    _refuse_captured(call, results, inputs)
    # what the graph does not need is free before backward takes memory
    del fresh
    grads = _pull_back(results, inputs, cotangents)
    # full parameters go before the buckets of their gradients take memory
    del results, inputs
    lazy = [index for index, i in enumerate(wanted) if i in call.lazy]
    leaves = [call.lazy[wanted[index]].leaf for index in lazy]
    full = [grads[index] for index in lazy]
    for index in lazy:
        grads[index] = _NOTHING  # the full gradient goes as soon as its bucket has gone
    handle = call.source.transport.reduce(full, leaves, scatter=True, over=False)
    for index, shard, leaf in zip(lazy, handle.wait(), leaves, strict=True):
        grads[index] = shard.to(leaf.dtype)
    return grads


def _differentiably(
    call: _Call,
    tensors: Sequence[Tensor],
    wanted: Sequence[int],
    cotangents: Sequence[Tensor | None],
) -> Sequence[Tensor]:
    """The same as a function that autograd can differentiate again; it keeps what that takes."""
    # views: one tensor may have been computed from another, and is no function of it here
    fresh = [x.view_as(x) for x in tensors]
    full = list(fresh)
    for i, lazy in call.lazy.items():
        axes, leaf = call.source.transport.axes, lazy.leaf
        full[i] = all_gather(replicate(fresh[i], axes.replicate, leaf.name), leaf, axes.shard)
    with call.again():
        results = call.run(full)
    return _pull_back(results, [fresh[i] for i in wanted], cotangents, create_graph=True)


def _pull_back(
    results: Sequence[Tensor],
    inputs: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
    *,
    create_graph: bool = False,
) -> list[Tensor]:
    """The vector-Jacobian product; zeros where there is no path."""
    pairs = [
        (x, cotangent)
        for x, cotangent in zip(results, cotangents, strict=True)
        if cotangent is not None and x.requires_grad
    ]
    if not pairs:
        return [torch.zeros_like(x) for x in inputs]
    outputs, vectors = zip(*pairs, strict=True)
    return list(
        torch.autograd.grad(
            outputs, inputs, vectors, create_graph=create_graph, materialize_grads=True
        )
    )


_NOTHING = torch.empty(0, device="cpu")


def _refuse_captured(call: _Call, results: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Raise if the results depend on a tensor that needs a gradient and would get none here."""
    seen = {get_gradient_edge(x).node for x in inputs}
    nodes = [x.grad_fn for x in results if x.grad_fn is not None]
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            name = f" {leaf.leaf.name!r}" if isinstance(leaf, LazyLeaf) else ""
            raise FzeroError(
                f"the staged function {_name(call.fn)} uses a tensor{name} of shape "
                f"{tuple(leaf.shape)} that needs a gradient and is not among its arguments, or "
                "something computed from it; it would get none. Pass it as an argument: "
                "stage(fn)(params, x, other)."
            )
        nodes += [following for following, _ in node.next_functions if following is not None]


def _can_have_gradient(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", type(fn).__qualname__)


# ------------------------------------------------------------------------------- running again
def _surroundings(
    leaves: Sequence[Any],
) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Random numbers and autocasting as they are now, for a second run."""
    # the CPU always: indices and masks are often drawn there for models of another device
    devices = {x.device for x in leaves if isinstance(x, Tensor)} | {torch.device("cpu")}
    generators = [generator_of(device) for device in sorted(devices, key=str)]
    states = [generator.get_state() for generator in generators]
    kinds = sorted(
        {device.type for device in devices if torch.amp.is_autocast_available(device.type)}
    )
    casts: list[Callable[[], contextlib.AbstractContextManager[Any]]] = [
        functools.partial(
            torch.autocast,
            kind,
            dtype=torch.get_autocast_dtype(kind),
            enabled=torch.is_autocast_enabled(kind),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )
        for kind in kinds
    ]
    casts.append(functools.partial(edges_in, edges()))

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        with contextlib.ExitStack() as stack, preserved(generators), held_by_nobody():
            for cast in casts:
                stack.enter_context(cast())
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
            yield

    return again
