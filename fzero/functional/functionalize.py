"""A module as a function of its parameters.

[Note: slots] A slot is one entry `module._parameters[key]` or `module._buffers[key]`. A tensor may
sit in many slots (tied weights), and a module may have many names but has its slots once, so the
swap goes by slot and never by name: `torch.func.functional_call` goes by name and leaves the
passed tensors behind in a module that is registered twice.
"""

import contextlib
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from fzero.errors import ShardError, TraceError
from fzero.functional.owners import noted
from fzero.functional.torch_checkpoint import recomputing
from fzero.numerics.precision import as_output, class_name, output_in

Params = dict[str, Tensor]
Buffers = dict[str, Tensor]


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
    writes (`self.last = h`, `self.log.append(h)`) are put back afterwards, also after an
    exception. Calls may nest. Two threads must not call into one module at once.

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
        ShardError: a parameter has no shape yet (lazy modules); at a call: names or shapes that
            don't fit, or a module whose structure changed.
        TraceError: a `torch.jit` module; at a call: a buffer changed and `buffers` was False.

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
    plan = _make_plan(module)
    params = {s.name: noted(s.tensor(plan).detach(), _owners(plan, s)) for s in plan.params}

    def apply(params: Mapping[str, Tensor], /, *args: Any, **kwargs: Any) -> Any:
        own = {s.name: _clone(s.tensor(plan)) for s in plan.buffers}
        _check_device(plan, params, own)
        before = {name: buffer._version for name, buffer in own.items()}
        with _swapped(plan, params, own, own), output_in(None):
            out = module(*args, **kwargs)
            new = _read_buffers(plan, own)
        for name, version in before.items():
            if new[name] is not own[name] or new[name]._version != version:
                raise TraceError(
                    f"The call changed buffer {name!r} of {_kind(module)}, and its new value has "
                    "nowhere to go: a pure function returns what it changes. Use `apply, params, "
                    "buffers = functionalize(module, buffers=True)` and keep the buffers that "
                    "`apply(params, buffers, ...)` returns, or call `module.eval()` first."
                )
        return as_output(out)

    def apply_with_buffers(
        params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], /, *args: Any, **kwargs: Any
    ) -> tuple[Any, Buffers]:
        _check_fit(plan, buffers, plan.buffers, "buffers")
        cloned = {s.name: _clone(buffers[s.name]) for s in plan.buffers}
        with _swapped(plan, params, cloned, buffers), output_in(None):
            out = module(*args, **kwargs)
            new = _read_buffers(plan, cloned)
        return as_output(out), new

    if not buffers:
        return apply, params
    return apply_with_buffers, params, {s.name: s.tensor(plan).detach() for s in plan.buffers}


# --- the plan: where each tensor lives -----------------------------------------------------------


class _Slots(NamedTuple):
    """One tensor of the module: its name, its shape, and every slot that holds it."""

    name: str
    shape: torch.Size
    places: tuple[tuple[int, str, str], ...]  # (module index, "_parameters" | "_buffers", key)

    def tensor(self, plan: "_Plan") -> Tensor:
        index, table, key = self.places[0]
        return plan.modules[index].__dict__[table][key]


class _Plan(NamedTuple):
    root: nn.Module
    modules: tuple[nn.Module, ...]
    prefixes: tuple[str, ...]
    # Per module: children, parameter keys and buffer keys, to notice a module that was rebuilt.
    structure: tuple[tuple[list[nn.Module | None], list[str], list[str]], ...]
    params: tuple[_Slots, ...]
    buffers: tuple[_Slots, ...]
    # [Note: caches] Attributes that hold parameters a second time, as `nn.LSTM._flat_weights`
    # does: (module index, attribute, template). They must show the passed tensors too.
    caches: tuple[tuple[int, str, Any], ...]
    parametrized: bool


def _make_plan(root: nn.Module) -> _Plan:
    prefixes, modules = zip(*root.named_modules(), strict=True)
    found: dict[int, tuple[str, str, torch.Size, list[tuple[int, str, str]]]] = {}
    for table in ("_parameters", "_buffers"):
        for index, (prefix, module) in enumerate(zip(prefixes, modules, strict=True)):
            if isinstance(module, torch.jit.ScriptModule):
                raise TraceError(
                    f"{_where(prefix)} is a torch.jit module, whose parameters cannot be swapped. "
                    "Pass the original nn.Module instead."
                )
            for key, tensor in module.__dict__[table].items():
                if tensor is None:
                    continue
                name = f"{prefix}.{key}" if prefix else key
                if is_lazy(tensor):
                    raise ShardError(
                        f"{name!r} has no shape yet: {_where(prefix)} is a lazy "
                        f"{_kind(module)}. Run one forward first, so that every shape is known."
                    )
                entry = found.setdefault(id(tensor), (table, name, tensor.shape, []))
                entry[3].append((index, table, key))

    slots = [(t, _Slots(name, shape, tuple(places))) for t, name, shape, places in found.values()]
    names = {ident: entry[1] for ident, entry in found.items()}
    base = nn.Module().__dict__.keys()
    caches = [
        (index, attr, template)
        for index, module in enumerate(modules)
        for attr, value in module.__dict__.items()
        if attr not in base and (template := _template(value, names)) is not None
    ]
    return _Plan(
        root=root,
        modules=modules,
        prefixes=prefixes,
        structure=tuple(_structure(module.__dict__) for module in modules),
        params=tuple(s for table, s in slots if table == "_parameters"),
        buffers=tuple(s for table, s in slots if table == "_buffers"),
        caches=tuple(caches),
        parametrized=any(parametrize.is_parametrized(module) for module in modules),
    )


def _owners(plan: _Plan, slots: _Slots) -> set[str]:
    """The classes of the modules that hold a tensor."""
    return {class_name(type(plan.modules[index])) for index, _, _ in slots.places}


def _structure(attrs: dict[str, Any]) -> tuple[list[nn.Module | None], list[str], list[str]]:
    return list(attrs["_modules"].values()), list(attrs["_parameters"]), list(attrs["_buffers"])


def _template(value: Any, names: Mapping[int, str], depth: int = 3) -> Any:
    """Where `value` holds a named tensor: a name, or {position: template}; None if nowhere."""
    if isinstance(value, Tensor):
        return names.get(id(value))
    if isinstance(value, weakref.ref):
        return _template(value(), names, 0)
    if depth == 0 or type(value) not in (list, tuple, dict):
        return None
    items = value.items() if isinstance(value, dict) else enumerate(value)
    inner = {at: t for at, item in items if (t := _template(item, names, depth - 1)) is not None}
    return inner or None


def _fill(value: Any, template: Any, tensors: Mapping[str, Tensor]) -> Any:
    """`value` with the passed tensors where `template` says; containers are new."""
    if isinstance(template, str):
        tensor = tensors[template]
        return weakref.ref(tensor) if isinstance(value, weakref.ref) else tensor
    items = value.copy() if isinstance(value, dict) else list(value)
    for at, inner in template.items():
        items[at] = _fill(items[at], inner, tensors)
    return tuple(items) if isinstance(value, tuple) else items


# --- one call ------------------------------------------------------------------------------------


@contextlib.contextmanager
def _swapped(
    plan: _Plan,
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
                    attrs[attr] = _fill(attrs[attr], template, tensors)
                except (LookupError, TypeError):
                    raise _rebuilt(plan, index, f"its attribute {attr!r}") from None
        versions = {name: buffer._version for name, buffer in buffers.items()}
        with recomputing(_Call(plan, params, buffers, versions, given).again):
            yield
    finally:
        _restore(saved)


class _Call(NamedTuple):
    """What one call of `apply` put into the slots, and the buffers it was given."""

    plan: _Plan
    params: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    versions: Mapping[str, int]
    given: Mapping[str, Tensor]

    def again(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn`, a part of this call, as it will be computed again in backward.

        By then the slots hold the module's own tensors again, so it swaps for itself. The buffers
        are those of now; what a recomputation changes in them is lost, as it was done before.
        """
        held = {
            name: self.given[name]
            if value is self.buffers[name] and value._version == self.versions[name]
            else _clone(value)
            for name, value in _read_buffers(self.plan, self.buffers).items()
        }

        def swapped(*args: Any, **kwargs: Any) -> Any:
            clones = {name: _clone(value) for name, value in held.items()}
            with _swapped(self.plan, self.params, clones, held):
                return fn(*args, **kwargs)

        return swapped


_Saved = list[tuple[Any, Any]]
_CONTAINERS = frozenset({list, dict, set, deque, defaultdict})


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
                saved.append((value, value.copy()))
    return saved


def _restore(saved: _Saved) -> None:
    for target, copy in saved:
        if isinstance(target, dict):
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


def _read_buffers(plan: _Plan, given: Mapping[str, Tensor]) -> Buffers:
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
    plan: _Plan, tensors: Mapping[str, Tensor], slots: tuple[_Slots, ...], what: str
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


def _misfit(plan: _Plan, tensors: Mapping[str, Any], slots: tuple[_Slots, ...], what: str) -> str:
    """What doesn't fit, one line for each name."""
    shapes = {s.name: s.shape for s in slots}
    unknown = [name for name in tensors if name not in shapes]
    tied = _other_names(plan, slots) if unknown else {}
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
        f"These {what} don't fit {_kind(plan.root)}:\n  "
        + "\n  ".join(shown)
        + f"\nRule: apply takes exactly the {len(slots)} names that functionalize returned, as "
        "full tensors of the same shapes. For shards, call fzero.unshard first."
    )


def _other_names(plan: _Plan, slots: tuple[_Slots, ...]) -> dict[str, str]:
    first = {(id(plan.modules[index]), key): s.name for s in slots for index, _, key in s.places}
    return {
        f"{prefix}.{key}" if prefix else key: name
        for prefix, module in plan.root.named_modules(remove_duplicate=False)
        for (ident, key), name in first.items()
        if ident == id(module)
    }


def _check_structure(plan: _Plan) -> None:
    for index, (module, structure) in enumerate(zip(plan.modules, plan.structure, strict=True)):
        if _structure(module.__dict__) != structure:
            raise _rebuilt(plan, index, "its submodules, parameters or buffers")
    if plan.parametrized and getattr(parametrize, "_cache_enabled", 0):
        raise TraceError(
            "apply was called inside torch.nn.utils.parametrize.cached(), which would hand out "
            "values computed from other parameters. Open cached() inside the module's forward."
        )


def _rebuilt(plan: _Plan, index: int, what: str) -> ShardError:
    return ShardError(
        f"{_where(plan.prefixes[index])} ({_kind(plan.modules[index])}) changed {what} since "
        "functionalize saw it, so the params no longer describe it. Call functionalize again "
        "after changing the module."
    )


def _check_device(plan: _Plan, params: Mapping[str, Tensor], own: Buffers) -> None:
    meta = [name for name, buffer in own.items() if buffer.device.type == "meta"]
    first = next(iter(params.values()), None) if isinstance(params, Mapping) else None
    if meta and isinstance(first, Tensor) and first.device.type != "meta":
        raise ShardError(
            f"Buffer {meta[0]!r} of {_kind(plan.root)} is on the meta device and has no values, "
            f"while the params are on {first.device}. Use functionalize(module, buffers=True) and "
            "pass real buffers, or build the module's buffers on a real device."
        )


def _kind(module: nn.Module) -> str:
    return type(module).__name__


def _where(prefix: str) -> str:
    return f"module {prefix!r}" if prefix else "the module"


def _show(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
