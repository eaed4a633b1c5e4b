"""Activation checkpointing: compute a function's intermediate values again in backward.

[Note: regions] While a function is staged out nothing has to be recomputed yet. `remat` only marks
the nodes that its function records as a *region*; the pass `fzero.program.passes.remat` copies what
backward needs of a region to where it needs it. A node's mark is the path of regions around it,
outermost first, kept in `meta["custom"]`, which survives a second recording of the graph.
"""

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, ParamSpec, TypeVar

from torch import Tensor, fx
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.node import map_arg
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)
from torch.utils.flop_counter import flop_registry

from fzero.errors import ConfigError
from fzero.functional.transforms import in_transform

P = ParamSpec("P")
R = TypeVar("R")

Op = OpOverload | OpOverloadPacket
Policy = Callable[..., Any] | Collection[Op] | Op | str
# (operator, args, kwargs, result) -> whether the result is kept
Saves = Callable[[OpOverload, tuple[Any, ...], dict[str, Any], Any], bool]


def remat(fn: Callable[P, R], policy: Policy | None = None) -> Callable[P, R]:
    """`fn`, whose intermediate values are not kept for backward but computed again there.

    Gradients are those of `fn`, bit for bit: a recomputation draws the random numbers that the
    first one drew. Inputs and outputs of `fn` are kept, so that of a stack of rematerialised blocks
    only one is alive at a time. Calls may nest.

    In a train step the Program recomputes. Outside, under plain autograd,
    `torch.utils.checkpoint` does. Under an eager `torch.func` transform `fn` runs as it is: tensors
    that it closes over, such as a module's parameters, can't be told from constants there, and
    `torch.func` keeps all of a derivative's values alive in any case.

    Args:
        fn: a function or module of any arguments; it may close over tensors that need gradients.
        policy: what is kept nevertheless. "nothing" (as None); "everything"; "dots": products of
            matrices, and convolutions and attention; `save_only("a", "b")`: what
            `checkpoint_name(x, "a")` named; operators (`[torch.ops.aten.mm]`); or a function from
            an `OpOverload` to a bool or `torch.utils.checkpoint.CheckpointPolicy`.

    Returns:
        A function with the arguments and results of `fn`.

    Raises:
        ConfigError: `fn` is no function, or `policy` none of the above.

    Examples:
        >>> import torch
        >>> def block(w, x):
        ...     return torch.tanh(x @ w)
        >>> w, x = torch.eye(2, requires_grad=True), torch.ones(1, 2)
        >>> remat(block)(w, x).sum().backward()
        >>> again = remat(block, policy=[torch.ops.aten.mm])(w, x)
        >>> bool((torch.autograd.grad(again.sum(), w)[0] == w.grad).all())
        True

    References: Chen, Xu, Zhang, Guestrin, Training Deep Nets with Sublinear Memory Cost,
    arXiv:1604.06174. The name and the meaning are `jax.checkpoint`'s.
    """
    if not callable(fn):
        raise ConfigError(
            f"remat got a {type(fn).__name__}, and takes a function or a module: "
            "remat(block)(x), not remat(block(x))."
        )
    saves = None if policy is None else saves_of(policy)

    @functools.wraps(fn, updated=())  # a module's attributes are not the wrapper's
    def rematerialised(*args: P.args, **kwargs: P.kwargs) -> R:
        if is_recording():
            with region(saves):
                return fn(*args, **kwargs)
        if in_transform():
            return fn(*args, **kwargs)
        call = functools.partial(fn, **kwargs)  # checkpoint has keywords of its own
        context_fn = noop_context_fn if saves is None else functools.partial(_contexts, saves)
        return checkpoint(call, *args, use_reentrant=False, context_fn=context_fn)  # pyright: ignore

    return rematerialised


def is_recording() -> bool:
    """Whether operators of this thread are being recorded into a graph."""
    return get_proxy_mode() is not None


# ---------------------------------------------------------------------------------- regions
class Region(NamedTuple):
    """A region that a node was recorded in.

    Args:
        name: the same for all its nodes.
        saved: whether the region's policy keeps this node's value.
    """

    name: str
    saved: bool = False


Path = tuple[Region, ...]


@contextlib.contextmanager
def region(saves: Saves | None = None) -> Iterator[None]:
    """Mark what is recorded meanwhile as one region; see [Note: regions]."""
    before = _last_recorded()
    yield
    name = "" if before is None else before.name  # where a region starts is its own
    for node in _recorded_since(before):
        saved = saves is not None and _is_saved(node, saves)
        path = (Region(name, saved), *regions_of(node))
        node.meta["custom"] = {**node.meta.get("custom", {}), _MARK: path}


@contextlib.contextmanager
def ruled(saves: Saves) -> Iterator[None]:
    """Let `saves` say what a region with the policy `RULED` keeps of what is recorded meanwhile.

    Of several around a node the innermost says it.
    """
    before = _last_recorded()
    yield
    for node in _recorded_since(before):
        custom = node.meta.get("custom", {})
        if _RULE not in custom:
            node.meta["custom"] = {**custom, _RULE: _is_saved(node, saves)}


def _last_recorded() -> fx.Node | None:
    mode = get_proxy_mode()
    assert mode is not None
    return next(iter(reversed(mode.tracer.graph.nodes)), None)


def _recorded_since(before: fx.Node | None) -> Iterator[fx.Node]:
    mode = get_proxy_mode()
    assert mode is not None
    nodes = mode.tracer.graph.nodes
    node = next(iter(nodes), None) if before is None else before.next
    while node is not None and node.op != "root":
        yield node
        node = node.next


def regions_of(node: fx.Node) -> Path:
    """The regions that a node was recorded in, outermost first."""
    return node.meta.get("custom", {}).get(_MARK, ())


_MARK, _NAME, _RULE = "fzero.remat", "fzero.name", "fzero.rule"


def RULED(op: OpOverload, args: Any, kwargs: Any, out: Any) -> bool:
    """The policy of a region that keeps what `ruled` says inside of it."""
    return False


def _is_saved(node: fx.Node, saves: Saves) -> bool:
    if saves is RULED:
        return node.meta.get("custom", {}).get(_RULE, False)
    if isinstance(saves, SaveOnly):
        return not saves.names.isdisjoint(node.meta.get("custom", {}).get(_NAME, ()))
    if not isinstance(node.target, OpOverload):  # a part of a result goes with the whole
        return any(_is_saved(x, saves) for x in node.all_input_nodes if x.op == "call_function")
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    return saves(node.target, args, kwargs, node.meta.get("val"))  # pyright: ignore


# --------------------------------------------------------------------------------- policies
class SaveOnly(NamedTuple):
    """A policy that keeps what has one of these names; see `save_only`."""

    names: frozenset[str]

    def __call__(self, op: OpOverload, args: Any, kwargs: Any, out: Any) -> bool:
        """No operator is kept for what it is."""
        return False


def save_only(*names: str) -> SaveOnly:
    """A policy of `remat`: keep what `checkpoint_name` gave one of these names, and nothing else.

    Args:
        names: one or more.

    Raises:
        ConfigError: no names, or what is no name.

    Examples:
        >>> sorted(save_only("attention", "mlp").names)
        ['attention', 'mlp']
    """
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"save_only got {names!r}; it takes one or more names, as strings.")
    return SaveOnly(frozenset(names))


def checkpoint_name(x: Tensor, name: str) -> Tensor:
    """`x`, with a name by which a policy of `remat` keeps it: see `save_only`.

    Names count where a step is recorded. Under plain autograd a policy of names keeps nothing: by
    the time that a value has its name, it has been computed.

    Args:
        x: a tensor that a rematerialised function computes; use the result in its place.
        name: not empty; several values may have one name.

    Returns:
        A view of all of `x`.

    Raises:
        ConfigError: `name` is no name, or `x` no tensor.

    Examples:
        >>> import torch
        >>> def block(w, x):
        ...     return torch.tanh(checkpoint_name(x @ w, "product"))
        >>> w, x = torch.eye(2, requires_grad=True), torch.ones(1, 2)
        >>> remat(block, policy=save_only("product"))(w, x).sum().backward()
        >>> w.grad.shape
        torch.Size([2, 2])

    References: the name and the meaning are `jax.ad_checkpoint.checkpoint_name`'s.
    """
    if not isinstance(x, Tensor) or not isinstance(name, str) or not name:
        raise ConfigError(
            f"checkpoint_name got a {type(x).__name__} and {name!r}; it takes a tensor and a name."
        )
    view = x.view_as(x)
    mode = get_proxy_mode()
    node = None if mode is None else next(iter(reversed(mode.tracer.graph.nodes)), None)
    # the view is recorded, and with it which node has made what it is of
    if node is not None and node.op == "call_function" and len(node.all_input_nodes) == 1:
        made = node.all_input_nodes[0]
        custom = made.meta.get("custom", {})
        made.meta["custom"] = {**custom, _NAME: (*custom.get(_NAME, ()), name)}
    return view


def _is_dot(op: OpOverload, args: Any, kwargs: Any, out: Any) -> bool:
    # torch counts the FLOPs of what multiplies matrices; of attention not on every device
    return op.overloadpacket in flop_registry or "scaled_dot_product" in op.name()


_NAMED: Mapping[str, Saves] = MappingProxyType(
    {
        "nothing": lambda op, args, kwargs, out: False,
        "everything": lambda op, args, kwargs, out: True,
        "dots": _is_dot,
    }
)


def saves_of(policy: Policy) -> Saves:
    """A policy as a function of one node's operator, arguments and result.

    Raises:
        ConfigError: it is none.
    """
    if isinstance(policy, SaveOnly):
        return policy
    if isinstance(policy, str) and policy in _NAMED:
        return _NAMED[policy]
    if isinstance(policy, Op):
        policy = [policy]
    if callable(policy):
        return lambda op, args, kwargs, out: verdict(policy(op))
    if not isinstance(policy, Collection) or not all(isinstance(op, Op) for op in policy):
        raise ConfigError(
            f"remat got policy={policy!r}; it must be a function from an OpOverload to a bool, or "
            "the operators whose results are kept, such as [torch.ops.aten.mm], save_only(names), "
            f"or one of {', '.join(map(repr, _NAMED))}."
        )
    saved = set(policy)
    return lambda op, args, kwargs, out: op in saved or op.overloadpacket in saved


def verdict(answer: Any) -> bool:
    """Whether a policy's answer for one operator means that its result is kept.

    What a policy would offload to the host is kept where it is.
    """
    if isinstance(answer, CheckpointPolicy):
        return "RECOMPUTE" not in answer.name
    if isinstance(answer, bool):
        return answer
    raise ConfigError(
        f"a remat policy answered {answer!r}; it must return a bool (True: keep the result) or a "
        "torch.utils.checkpoint.CheckpointPolicy."
    )


def _contexts(saves: Saves) -> Any:
    """`saves` as `torch.utils.checkpoint` takes it."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = isinstance(op, OpOverload) and saves(op, args, kwargs, None)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
