"""A module as a function of its parameters. See [Note: slots] in slots.py."""

import contextlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from fzero.errors import FzeroError, ShardError, TraceError
from fzero.functional.owners import noted
from fzero.functional.plain import check_plain, hook_on
from fzero.functional.slots import (
    Buffers,
    Params,
    Slots,
    SlotTable,
    fill_template,
    kind_of,
    other_names,
    owners_of_slots,
    plan_slots,
    site_of,
    structure_of,
)
from fzero.functional.torch_checkpoint import recomputing
from fzero.functional.transforms import Over, is_over
from fzero.numerics.casts import Edges, as_input, as_output, edges_in


@overload
def functionalize(
    module: nn.Module, *, buffers: Literal[False] = False
) -> tuple[Callable[..., Any], Params]: ...
@overload
def functionalize(
    module: nn.Module, *, buffers: Literal[True]
) -> tuple[Callable[..., Any], Params, Buffers]: ...
def functionalize(module: nn.Module, *, buffers: bool = False) -> Any:
    """A module as a pure function, and the parameters it takes.

    A call of `apply` leaves no trace in the module: attributes and containers that `forward`
    writes (`self.last = h`, `self.log.append(h)`) and hooks that it installs are put back
    afterwards, also after an exception. Calls may nest. Two threads must not call into one
    module at once.

    The returned tensors share memory with the module's and ask for no gradient (as in
    `torch.func`); pass copies to whatever writes to its inputs. Each of `params` knows the classes
    of the modules that hold it (see `Precision.lower_precision_safe_modules`). Activation
    checkpoints inside the module (`fzero.remat`, `torch.utils.checkpoint`) recompute with the
    tensors of their call.

    A parameter with `requires_grad=False` is in `params` like any other; a train step leaves it as
    it is if `Config(frozen=[n for n, p in module.named_parameters() if not p.requires_grad])`.

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
    plan = plan_slots(module)
    _check_params(plan)
    params = _detached(plan)

    def apply(params: Mapping[str, Tensor], /, *args: Any, **kwargs: Any) -> Any:
        _check_params(plan)
        # the call runs on copies: a change that is refused has not been made
        own = {s.name: _clone(s.tensor(plan)) for s in plan.buffers}
        _check_device(plan, params, own)
        before = {name: buffer._version for name, buffer in own.items()}
        args, kwargs = as_input((args, kwargs))
        with _no_mix(params), _swapped(plan, params, own, own), edges_in(Edges()):
            out = module(*args, **kwargs)
            new = _read_buffers(plan, own)
        for name, version in before.items():
            if new[name] is not own[name] or new[name]._version != version:
                raise TraceError(
                    f"The call changed buffer {name!r} of {kind_of(module)}, and its new value has "
                    "nowhere to go: a pure function returns what it changes. Use `apply, params, "
                    "buffers = functionalize(module, buffers=True)` and keep the buffers that "
                    "`apply(params, buffers, ...)` returns, or call `module.eval()` first."
                )
        return as_output(out)

    def apply_with_buffers(
        params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], /, *args: Any, **kwargs: Any
    ) -> tuple[Any, Buffers]:
        _check_params(plan)
        _check_fit(plan, buffers, plan.buffers, "buffers")
        cloned = {s.name: _clone(buffers[s.name]) for s in plan.buffers}
        args, kwargs = as_input((args, kwargs))
        with _no_mix(params), _swapped(plan, params, cloned, buffers), edges_in(Edges()):
            out = module(*args, **kwargs)
            new = _read_buffers(plan, cloned)
        return as_output(out), new

    if not buffers:
        return apply, params
    return apply_with_buffers, params, {s.name: s.tensor(plan).detach() for s in plan.buffers}


def parameters(module: nn.Module) -> Params:
    """What `functionalize` gives as `params`, whatever hooks the parameters have."""
    return _detached(plan_slots(module))


def _detached(plan: SlotTable) -> Params:
    return {s.name: noted(s.tensor(plan).detach(), owners_of_slots(plan, s)) for s in plan.params}


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


# --- one call ------------------------------------------------------------------------------------


@contextlib.contextmanager
def _swapped(
    plan: SlotTable,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    given: Mapping[str, Tensor],
) -> Iterator[None]:
    """The module with these tensors in its slots; as it was before on the way out.

    `buffers` are copies of `given`, which the module may change.
    """
    _check_fit(plan, params, plan.params, "params")
    _check_structure(plan)
    saved = _snapshot(plan.modules)
    try:
        for tensors, slots in ((params, plan.params), (buffers, plan.buffers)):
            for name, _, places in slots:
                for index, table, key in places:
                    plan.modules[index].__dict__[table][key] = tensors[name]
        if plan.caches:
            tensors = {**params, **buffers}
            for index, attr, template in plan.caches:
                attrs = plan.modules[index].__dict__
                try:
                    attrs[attr] = fill_template(attrs[attr], template, tensors)
                except (LookupError, TypeError):
                    raise _rebuilt(plan, index, f"its attribute {attr!r}") from None
        versions = {name: buffer._version for name, buffer in buffers.items()}
        call = _Call(plan, params, buffers, versions, given)
        _wrap_hooks(plan, call.again)
        with recomputing(call.again):
            yield
    finally:
        _restore(saved)


def _there(name: str, value: Tensor) -> Tensor:
    """`value` for a computation in backward, or what raises when it is read."""
    return Over(value, repr(name)) if is_over(value) else value


class _Call(NamedTuple):
    """What one call of `apply` put into the slots, and the buffers it was given."""

    plan: SlotTable
    params: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    versions: Mapping[str, int]
    given: Mapping[str, Tensor]

    def again(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn`, a part of this call, as it will be called back in backward.

        By then the slots hold the module's own tensors again, so it swaps for itself. The buffers
        are those of now; what a recomputation changes in them is lost, as it was done before. See
        [Note: called back] in `fzero.functional.callbacks`.
        """
        held = {
            name: self.given[name]
            if value is self.buffers[name] and value._version == self.versions[name]
            else _clone(value)
            for name, value in _read_buffers(self.plan, self.buffers).items()
        }

        def swapped(*args: Any, **kwargs: Any) -> Any:
            params, buffers = (
                {name: _there(name, value) for name, value in tensors.items()}
                for tensors in (self.params, held)
            )
            clones = {name: x if isinstance(x, Over) else _clone(x) for name, x in buffers.items()}
            with _swapped(self.plan, params, clones, buffers):
                return fn(*args, **kwargs)

        return swapped


def _wrap_hooks(plan: SlotTable, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let hooks on the modules' backward see the tensors of this call, too."""
    for module in plan.modules:
        attrs = module.__dict__
        for table in ("_backward_hooks", "_backward_pre_hooks"):
            if hooks := attrs.get(table):
                attrs[table] = OrderedDict((key, wrap(hook)) for key, hook in hooks.items())


_Saved = list[tuple[Any, Any]]
_CONTAINERS = frozenset({list, dict, set, deque, defaultdict, OrderedDict})  # hooks are in the last


def _snapshot(modules: tuple[nn.Module, ...]) -> _Saved:
    """Shallow copies of every module's attributes and of the plain containers among them.

    The containers stay the same objects during the call, since others may hold them too: a list
    of auxiliary losses that two modules share must still be one list.
    """
    saved: _Saved = []
    seen: set[int] = set()
    for module in modules:
        attrs = module.__dict__
        saved.append((attrs, attrs.copy()))
        for value in attrs.values():
            if type(value) in _CONTAINERS and id(value) not in seen:
                seen.add(id(value))
                saved.append((value, value.copy() if value else ()))
    return saved


def _restore(saved: _Saved) -> None:
    for target, copy in saved:
        if not copy:
            if target:
                target.clear()
        elif isinstance(target, dict):
            target.update(copy)
            if len(target) != len(copy) or list(target) != list(copy):
                target.clear()
                target.update(copy)
        elif isinstance(target, set):
            target.clear()
            target.update(copy)
        else:
            target.clear()
            target.extend(copy)


def _clone(tensor: Tensor) -> Tensor:
    # Inference tensors have no version counter, which is what tells a changed buffer.
    if torch.is_inference_mode_enabled() or tensor.is_inference():
        with torch.inference_mode(False):
            return tensor.clone()
    return tensor.clone()


def _read_buffers(plan: SlotTable, given: Mapping[str, Tensor]) -> Buffers:
    """The buffers after the call: changed in place, or replaced (`self.ema = 0.9 * self.ema`)."""
    new: Buffers = {}
    for name, shape, places in plan.buffers:
        held = [plan.modules[index].__dict__[table].get(key) for index, table, key in places]
        replaced = {id(value): value for value in held if value is not given[name]}
        value = next(iter(replaced.values())) if replaced else given[name]
        if len(replaced) > 1 or not isinstance(value, Tensor) or value.shape != shape:
            found = ", ".join(_show(v) for v in replaced.values())
            raise TraceError(
                f"The call replaced buffer {name!r} ({tuple(shape)}) by {found}. A buffer must "
                "stay one tensor of the same shape: reset it outside the call, or keep such "
                "state as an input and output of forward."
            )
        new[name] = value
    return new


# --- checks --------------------------------------------------------------------------------------


def _check_fit(
    plan: SlotTable, tensors: Mapping[str, Tensor], slots: tuple[Slots, ...], what: str
) -> None:
    if not isinstance(tensors, Mapping):
        raise ShardError(
            f"apply takes {what} as a dict from name to tensor; got {_show(tensors)}. Pass the "
            f"{what} that functionalize returned, or a dict with the same names."
        )
    if len(tensors) == len(slots):
        for name, shape, _ in slots:
            tensor = tensors.get(name)
            if not isinstance(tensor, Tensor) or tensor.shape != shape:
                break
        else:
            return
    raise ShardError(_misfit(plan, tensors, slots, what))


def _misfit(
    plan: SlotTable, tensors: Mapping[str, Any], slots: tuple[Slots, ...], what: str
) -> str:
    """What doesn't fit, one line for each name."""
    shapes = {s.name: s.shape for s in slots}
    unknown = [name for name in tensors if name not in shapes]
    tied = other_names(plan, slots) if unknown else {}
    lines = []
    for name in unknown:
        near = get_close_matches(str(name), shapes, n=2)
        hint = f"; near: {', '.join(map(repr, near))}" if near else ""
        if name in tied:
            hint = f"; it is tied to {tied[name]!r}: pass it under that name only"
        lines.append(f"{what}[{name!r}]: the module has no such name{hint}")
    for name, shape in shapes.items():
        if name not in tensors:
            lines.append(f"{what}[{name!r}]: missing; the module needs shape {tuple(shape)}")
        elif not isinstance(tensors[name], Tensor):
            lines.append(f"{what}[{name!r}]: {_show(tensors[name])} is not a tensor")
        elif tensors[name].shape != shape:
            found = tuple(tensors[name].shape)
            lines.append(f"{what}[{name!r}]: shape {found}, the module needs {tuple(shape)}")
    shown = lines[:10] + ([f"... and {len(lines) - 10} more"] if len(lines) > 10 else [])
    return (
        f"These {what} don't fit {kind_of(plan.root)}:\n  "
        + "\n  ".join(shown)
        + f"\nRule: apply takes exactly the {len(slots)} names that functionalize returned, as "
        "full tensors of the same shapes. For shards, call fzero.unshard first."
    )


def _check_params(plan: SlotTable) -> None:
    """Raise for a parameter whose class or hooks a function of plain tensors would lose."""
    named = [(slots.name, slots.tensor(plan)) for slots in plan.params]
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


def _check_structure(plan: SlotTable) -> None:
    for index, (module, structure) in enumerate(zip(plan.modules, plan.structure, strict=True)):
        if structure_of(module.__dict__) != structure:
            raise _rebuilt(plan, index, "its submodules, parameters or buffers")
    if plan.parametrized and getattr(parametrize, "_cache_enabled", 0):
        raise TraceError(
            "apply was called inside torch.nn.utils.parametrize.cached(), which would hand out "
            "values computed from other parameters. Open cached() inside the module's forward."
        )


def _rebuilt(plan: SlotTable, index: int, what: str) -> ShardError:
    return ShardError(
        f"{site_of(plan.prefixes[index])} ({kind_of(plan.modules[index])}) changed {what} since "
        "functionalize saw it, so the params no longer describe it. Call functionalize again "
        "after changing the module."
    )


def _check_device(plan: SlotTable, params: Mapping[str, Tensor], own: Buffers) -> None:
    meta = [name for name, buffer in own.items() if buffer.device.type == "meta"]
    first = next(iter(params.values()), None) if isinstance(params, Mapping) else None
    if meta and isinstance(first, Tensor) and first.device.type != "meta":
        raise ShardError(
            f"Buffer {meta[0]!r} of {kind_of(plan.root)} is on the meta device and has no values, "
            f"while the params are on {first.device}. Use functionalize(module, buffers=True) and "
            "pass real buffers, or build the module's buffers on a real device."
        )


def _show(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
