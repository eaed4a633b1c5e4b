"""A module as a function of its parameters. See [Note: slots] in slots.py."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fzero.errors import STATEFUL, FzeroError, ShardError, TraceError, arguments_by_name
from fzero.functional.differentiate import nodes_behind
from fzero.functional.fit import check_device, check_fit, check_structure
from fzero.functional.opaque import wrap_forwards
from fzero.functional.owners import noted, noted_untrained
from fzero.functional.plain import check_plain, hook_on
from fzero.functional.remat_modules import wrap_remat
from fzero.functional.slots import Buffers, Params, SlotTable, kind_of, owners_of_slots, plan_slots
from fzero.functional.swap import clone, read_buffers, swapped
from fzero.functional.transforms import levels_of
from fzero.numerics.casts import Edges, as_input, as_output, edges_in


@overload
def functionalize(
    module: nn.Module, *, buffers: Literal[False] = False
) -> tuple[Callable[..., Any], Params]: ...
@overload
def functionalize(
    module: nn.Module, *, buffers: Literal[True]
) -> tuple[Callable[..., Any], Params, Buffers]: ...
@arguments_by_name
def functionalize(module: nn.Module, *, buffers: bool = False) -> Any:
    """A module as a pure function, and the parameters it takes.

    A call of `apply` leaves no trace in the module: attributes and containers that `forward`
    writes (`self.last = h`, `self.log.append(h)`) and hooks that it installs are put back
    afterwards, also after an exception. In a step, and in any function that this library runs,
    attributes are put back when that function ends: it may read what its calls have left, such as
    a loss term in `self.losses`. Calls may nest. A module is in one thread's call at a time: a
    second thread waits until that is over. Where threads are to compute side by side, each has a
    module of its own: `functionalize(copy.deepcopy(module))`.

    The returned tensors share memory with the module's and ask for no gradient (as in
    `torch.func`); pass copies to whatever writes to its inputs. Each of `params` knows the classes
    of the modules that hold it (see `Precision.lower_precision_safe_modules`). Activation
    checkpoints inside the module (`fzero.remat`, `torch.utils.checkpoint`) recompute with the
    tensors of their call.

    A parameter with `requires_grad=False` is in `params` like any other; a train step leaves it as
    it is if `Config(frozen=[n for n, p in module.named_parameters() if not p.requires_grad])`;
    without any `frozen` it trains all, and warns if some asked for no gradient and others did.

    Args:
        module: any `nn.Module`, on any device, `meta` included. Its `training` flags are read at
            each call; its structure must stay as it is now.
        buffers: take buffers as an argument and return their new values. Without it the module's
            own buffers are read, and a call that changes one is refused.

    Returns:
        `(apply, params)` with `apply(params, *args, **kwargs) -> output`; or, with buffers,
        `(apply, params, buffers)` with `apply(params, buffers, *args, **kwargs) -> (output,
        new_buffers)`. `params` and `buffers` are flat dicts with the module's own names; a tensor
        under several names appears once, under the first. Buffers that are not persistent
        (`state_dict` leaves them out) are included.

    Raises:
        ShardError: a parameter has no shape yet (lazy modules), or is no plain tensor (a DTensor,
            another subclass); at a call: names or shapes that don't fit, or a module whose
            structure changed.
        TraceError: a `torch.jit` module; a parameter with a hook, which would never run; at a call:
            a hook that came since, or a buffer that changed while `buffers` was False.

    Examples:
        >>> import torch
        >>> apply, params = functionalize(nn.Linear(3, 2))
        >>> {name: tuple(p.shape) for name, p in params.items()}
        {'weight': (2, 3), 'bias': (2,)}
        >>> x = torch.ones(1, 3)
        >>> grads = torch.func.grad(lambda p: apply(p, x).sum())(params)
        >>> grads["bias"]
        tensor([1., 1.])

        >>> apply, params, state = functionalize(nn.BatchNorm1d(3), buffers=True)
        >>> out, new_state = apply(params, state, torch.ones(4, 3))
        >>> state["num_batches_tracked"].item(), new_state["num_batches_tracked"].item()
        (0, 1)
    """
    if not isinstance(module, nn.Module):
        raise ShardError(
            f"functionalize takes an nn.Module, and this is a {type(module).__name__} "
            f"({module!r:.60}). Pass the model itself: functionalize(model)."
        )
    plan = plan_slots(module)
    with plan.turn:
        _check_params(plan)
        params = _detached(plan)
        given = {s.name: s.tensor(plan).detach() for s in plan.buffers} if buffers else {}

    def apply(params: Mapping[str, Tensor], /, *args: Any, **kwargs: Any) -> Any:
        with plan.turn:
            return in_turn(params, args, kwargs)

    def in_turn(params: Mapping[str, Tensor], args: Any, kwargs: Any) -> Any:
        _check_params(plan)
        # the call runs on copies: a change that is refused has not been made
        own = {s.name: clone(s.tensor(plan)) for s in plan.buffers}
        check_device(plan, params, own)
        # versions and memories, not values: to compare those a device would be waited for
        before = {name: _state_of(buffer) for name, buffer in own.items()}
        args, kwargs = as_input((args, kwargs))
        with _no_mix(params), swapped(plan, params, own, own), edges_in(Edges()):
            wrap_forwards(plan)
            wrap_remat(plan)  # around what is opaque, too
            out = module(*args, **kwargs)
            new = read_buffers(plan, own)
        for name, state in before.items():
            if new[name] is not own[name] or _state_of(new[name]) != state:
                raise TraceError(
                    f"The call changed buffer {name!r} of {kind_of(module)}, and its new value has "
                    "nowhere to go: a pure function returns what it changes. Use `apply, params, "
                    "state = functionalize(module, buffers=True)` and keep the new state of "
                    "`out, state = apply(params, state, ...)`; in a step function it is the model "
                    f"state, {STATEFUL}. Or call `module.eval()` first."
                )
        return as_output(out)

    def apply_with_buffers(
        params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], /, *args: Any, **kwargs: Any
    ) -> tuple[Any, Buffers]:
        with plan.turn:
            return with_buffers_in_turn(params, buffers, args, kwargs)

    def with_buffers_in_turn(
        params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], args: Any, kwargs: Any
    ) -> tuple[Any, Buffers]:
        _check_params(plan)
        check_fit(plan, buffers, plan.buffers, "buffers")
        cloned = {s.name: clone(buffers[s.name]) for s in plan.buffers}
        args, kwargs = as_input((args, kwargs))
        with _no_mix(params), swapped(plan, params, cloned, buffers), edges_in(Edges()):
            wrap_forwards(plan)
            wrap_remat(plan)  # around what is opaque, too
            out = module(*args, **kwargs)
            new = read_buffers(plan, cloned)
        return as_output(out), new

    if not buffers:
        return apply, params
    return apply_with_buffers, params, given


def _state_of(buffer: Tensor) -> tuple[int, int]:
    """Its version, and its memory: `.data = ...` counts as no version."""
    *_, inner = levels_of(buffer)
    memory = inner.untyped_storage()._cdata if inner.layout is torch.strided else 0
    return buffer._version, memory


def parameters(module: nn.Module) -> Params:
    """What `functionalize` gives as `params`, whatever hooks the parameters have."""
    plan = plan_slots(module)
    with plan.turn:
        return _detached(plan)


def _detached(plan: SlotTable) -> Params:
    found: Params = {}
    for slots in plan.params:
        param = slots.tensor(plan)
        new = noted(param.detach(), owners_of_slots(plan, slots))
        found[slots.name] = noted_untrained(new, param)
    return found


@contextlib.contextmanager
def _no_mix(params: Mapping[str, Tensor]) -> Iterator[None]:
    """Say what to do where shards meet plain tensors."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        sharded = [name for name, x in params.items() if isinstance(x, DTensor)]
        if not sharded or isinstance(error, FzeroError) or "DTensor" not in str(error):
            raise
        raise ShardError(
            f"params[{sharded[0]!r}] is a DTensor, a parameter that is sharded over ranks, and "
            "apply takes full ones. Pass them through fzero.sharded: fzero.sharded(apply, cfg)"
            "(params, ...), which every rank must call, gathers each where it is used. (Or pass "
            "fzero.unshard(params), if one rank can hold all.)"
        ) from error


def _check_params(plan: SlotTable) -> None:
    """Raise for a parameter whose class or hooks a function of plain tensors would lose."""
    try:
        named = [(slots.name, slots.tensor(plan)) for slots in plan.params]
    except KeyError:  # a parameter has left its slot, as by a parametrization
        check_structure(plan)
        raise
    if any(param is None for _, param in named):
        check_structure(plan)
    # a call around this one has put others into the slots of a part of its module
    named = [(name, param) for name, param in named if isinstance(param, nn.Parameter)]
    for name, param in named:
        check_plain(name, param)
    refuse_hooks(named)
    if (called := _CALLED.get()) is not None:
        called.extend(named)


def refuse_hooks(params: Sequence[tuple[str, Tensor]]) -> None:
    """Raise a TraceError that names the first of these parameters that has a hook.

    Args:
        params: of modules that were functionalised, with their names.
    """
    for name, param in params:
        if not (param._backward_hooks or param._post_accumulate_grad_hooks):  # pyright: ignore
            continue
        if (how := hook_on(param)) is not None:
            raise TraceError(
                f"The parameter {name!r} has a hook ({how}), and a function of parameters "
                "differentiates the tensors that it is given: the hook would never run. Remove it "
                "from the module and put what it does into the model function (w * mask, or "
                "h.register_hook on what is computed in forward) or into the optimizer "
                "(Config(frozen=...), fzero.optim.masked); or train with fzero.Engine, which runs "
                "hooks of register_hook."
            )


def refuse_past(result: Tensor) -> None:
    """Raise a TraceError if what is differentiated depends on a module's own parameter.

    That is, on one of a module that was called through `apply` since `calls_noted`: its gradient
    would go to the module, whose values are those of before the training.
    """
    own = {id(x): name for name, x in _CALLED.get() or ()}
    for level in levels_of(result) if own else ():
        for node in nodes_behind(level):
            name = own.get(id(getattr(node, "variable", None)))
            if name is not None:
                raise TraceError(
                    f"the function reads the module's own parameter {name!r} beside apply(params, "
                    "...): it is not trained, and keeps the value that it had when functionalize "
                    f"saw it. Read params[{name!r}] instead, which is what is trained. A model "
                    "that is to stay as it was is read under torch.no_grad()."
                )


@contextlib.contextmanager
def calls_noted() -> Iterator[list[tuple[str, Tensor]]]:
    """The parameters of modules that are called meanwhile through `apply`, as they come.

    Who records such calls keeps them, and asks `refuse_hooks` before it runs what it recorded.
    """
    called: list[tuple[str, Tensor]] = []
    token = _CALLED.set(called)
    try:
        yield called
    finally:
        _CALLED.reset(token)


_CALLED: ContextVar[list[tuple[str, Tensor]] | None] = ContextVar("fzero_calls", default=None)
