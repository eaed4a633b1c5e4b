"""Optimizers from elsewhere: TorchOpt's, or any object with `init` and `update`.

They were written without shards in mind. A DTensor would not do: `.item()` of its norm is this
rank's part, and operators are missing. So they are called with whole plain tensors, the same on
every rank, and of what they return every rank keeps its part. The tensors are copies: whatever
such an optimizer does to them, nothing has changed if it raises.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fzero import tree
from fzero.distributed.dtensor import shard_like, whole_tensor
from fzero.errors import ConfigError, first_line, shown
from fzero.inference import makes_normal
from fzero.optim.base import GlobalNorm, Optimizer, Params, PyTree, UpdateFn
from fzero.optim.clip import tree_global_norm
from fzero.optim.foreach import leaves_like
from fzero.optim.inplace import in_place


def as_optimizer(obj: Any) -> Optimizer:
    """An `Optimizer` with all its functions, from one of ours or from anything like it.

    What `update` accepts decides how it is called: params by keyword where it has that name,
    `inplace=False` and `global_norm` where it knows them (TorchOpt takes params by keyword only
    and works in place unless told otherwise).

    Args:
        obj: An `Optimizer`, or an object with `init(params)` and `update(grads, state, ...)`.

    Returns:
        An optimizer whose `apply_` is never None. `foreign` is True unless `obj` is an
        `Optimizer` that says otherwise; then DTensors are gathered for it, and its state is
        spread again.

    Raises:
        ConfigError: `init` or `update` is missing, or not callable; or, once it is called, one of
            optax wants arrays of JAX.

    Examples:
        >>> class Descent:
        ...     def init(self, params): return ()
        ...     def update(self, grads, state): return -0.1 * grads, state
        >>> opt = as_optimizer(Descent())
        >>> opt.update(torch.ones(1), opt.init(torch.ones(1)), torch.ones(1))
        (tensor([-0.1000]), ())
        >>> opt.foreign
        True
    """
    if isinstance(obj, Optimizer) and obj.apply_ is not None:
        return obj
    missing = [name for name in ("init", "update") if not callable(getattr(obj, name, None))]
    if missing or isinstance(obj, type):
        raise ConfigError(_complaint(obj, missing))
    init, update = _told_of_absent(obj.init), _told_of_absent(obj.update)
    if type(obj).__module__.partition(".")[0] == "optax":
        init, update = _on_tensors(init), _on_tensors(update)
    update = _adapted(update)
    init = _own_memory(init)
    if isinstance(obj, Optimizer) and not obj.foreign:
        return Optimizer(init, update, in_place(update), rates=obj.rates)
    update = _on_whole_leaves(update)
    whole = Optimizer(_init_on_whole_leaves(init), update, in_place(update), foreign=True)
    return whole._replace(rates=obj.rates) if isinstance(obj, Optimizer) else whole


def _on_tensors(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of optax: some compute with whatever has operators, most with JAX arrays."""

    @functools.wraps(fn)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except TypeError as error:
            raise ConfigError(
                "opt is one of optax, which computes on arrays of JAX, and was given tensors of "
                f"torch ({first_line(error)}). fzero.optim has optax's protocol and "
                "names: take fzero.optim.adamw(...) for optax.adamw(...)."
            ) from error

    return called


def _told_of_absent(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of others that loops over leaves, and may meet None where one is absent."""

    @functools.wraps(fn)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except (AttributeError, TypeError) as error:
            if args and (paths := tree.absent(args[0])):
                more = f" and at {len(paths) - 2} more places" if len(paths) > 2 else ""
                error.add_note(
                    f"The optimizer was given None at {', '.join(paths[:2])}{more}: leaves that "
                    "are not its own (Config(frozen=...), masked, multi_transform) are None in "
                    "their place, in params, gradients and updates. Pass over them (if x is not "
                    "None), or use a tree map, which does: fzero.tree_map."
                )
            raise

    return called


def _own_memory(init: Callable[[Params], PyTree]) -> Callable[[Params], PyTree]:
    @makes_normal
    def apart(params: Params) -> PyTree:
        # A state that starts as the params themselves must not change with them.
        shared = {id(leaf) for leaf in tree.leaves(params)}
        return tree.map(
            lambda x: x.clone() if isinstance(x, Tensor) and id(x) in shared else x,
            init(params),
        )

    return apart


def _init_on_whole_leaves(init: Callable[[Params], PyTree]) -> Callable[[Params], PyTree]:
    def whole(params: Params) -> PyTree:
        # What is as large as a parameter is spread as that one is: a rule that needs no names.
        like = {x.shape: x for x in tree.leaves(params) if isinstance(x, DTensor)}
        return tree.map(
            lambda x: shard_like(x, like.get(x.shape, x)) if isinstance(x, Tensor) else x,
            init(_whole(params)),
        )

    return whole


def _on_whole_leaves(update: UpdateFn) -> UpdateFn:
    def whole(
        grads: PyTree, state: PyTree, params: Params | None = None, **options: Any
    ) -> tuple[PyTree, PyTree]:
        leaves, spec = tree.flatten(grads)
        sharded = any(isinstance(x, DTensor) for x in leaves)
        if sharded and "global_norm" in options:
            options["global_norm"] = tree_global_norm  # the caller's sums over shards
        updates, new = update(_whole(grads), _whole(state), _whole(params), **options)
        if not sharded:
            return updates, new
        pairs = zip(leaves_like(spec, updates, "updates"), leaves, strict=True)
        parts = [shard_like(x, ref) if isinstance(x, Tensor) else x for x, ref in pairs]
        return tree.unflatten(spec, parts), new

    return whole


def _whole(values: PyTree) -> PyTree:
    return tree.map(lambda x: whole_tensor(x).clone() if isinstance(x, Tensor) else x, values)


def _adapted(update: Callable[..., Any]) -> UpdateFn:
    accepted = _parameters(update)
    kinds = [parameter.kind for parameter in accepted.values()]
    named = {
        name
        for name, parameter in accepted.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    by_keyword = "params" in named or (
        inspect.Parameter.VAR_KEYWORD in kinds and len(_positional(accepted)) < 3
    )
    by_position = len(_positional(accepted)) >= 3 or inspect.Parameter.VAR_POSITIONAL in kinds
    fixed = {"inplace": False} if "inplace" in named else {}

    def adapted(
        grads: PyTree,
        state: PyTree,
        params: Params | None = None,
        *,
        global_norm: GlobalNorm = tree_global_norm,
    ) -> tuple[PyTree, PyTree]:
        options: dict[str, Any] = dict(fixed)
        if "global_norm" in named:
            options["global_norm"] = global_norm
        if by_keyword:
            return update(grads, state, params=params, **options)
        if by_position:
            return update(grads, state, params, **options)
        return update(grads, state, **options)

    return adapted


def _parameters(update: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(update).parameters
    except (TypeError, ValueError):  # no signature, as some compiled functions have none
        return inspect.signature(lambda grads, state, params=None: None).parameters


def _positional(accepted: Mapping[str, inspect.Parameter]) -> list[inspect.Parameter]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter for parameter in accepted.values() if parameter.kind in kinds]


def _complaint(obj: Any, missing: list[str]) -> str:
    rule = "an optimizer has init(params) -> state and update(grads, state, params)"
    name = getattr(obj, "__qualname__", None) or shown(obj)
    kind = obj if isinstance(obj, type) else type(obj)
    if issubclass(kind, torch.optim.Optimizer):
        return (
            f"opt is a torch.optim.{kind.__name__}, which keeps its state to itself, but "
            f"{rule}. Pass fzero.optim.{kind.__name__.lower()}(...) or another of fzero.optim."
        )
    if isinstance(obj, type) or callable(obj):
        return f"opt is {name} itself, but {rule}. Call it first: {name}(...)."
    if kind.__module__.startswith("fzero.config"):
        return f"opt is {name}, but {rule}. A Config goes by its name, cfg=..., or comes after opt."
    if type(obj) in (list, tuple):
        return (
            f"opt is {name}, a {type(obj).__name__}, but {rule}. Several, one after another, are "
            "one by fzero.optim.chain(*transforms), which takes them one by one."
        )
    return f"opt is {name}, which lacks {' and '.join(missing)}, but {rule}."
