"""Whether tensors fit the slots of a module, and the module the slots that were found in it."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from fzero.errors import ShardError, TraceError
from fzero.functional.slots import (
    Buffers,
    Slots,
    SlotTable,
    kind_of,
    other_names,
    site_of,
    structure_of,
)


def check_fit(
    plan: SlotTable, tensors: Mapping[str, Tensor], slots: tuple[Slots, ...], what: str
) -> None:
    """Raise a ShardError unless these are the tensors of these slots, by name and shape."""
    if not isinstance(tensors, Mapping):
        raise ShardError(
            f"apply takes {what} as a dict from name to tensor; got {shown(tensors)}. Pass the "
            f"{what} that functionalize returned, or a dict with the same names."
        )
    # each call comes by here: names and shapes are looked at once, and a text is made if one is
    # wrong
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
            lines.append(f"{what}[{name!r}]: {shown(tensors[name])} is not a tensor")
        elif tensors[name].shape != shape:
            found = tuple(tensors[name].shape)
            lines.append(f"{what}[{name!r}]: shape {found}, the module needs {tuple(shape)}")
    text = lines[:10] + ([f"... and {len(lines) - 10} more"] if len(lines) > 10 else [])
    return (
        f"These {what} don't fit {kind_of(plan.root)}:\n  "
        + "\n  ".join(text)
        + f"\nRule: apply takes exactly the {len(slots)} names that functionalize returned, as "
        "full tensors of the same shapes. For shards, call fzero.unshard first."
    )


def check_structure(plan: SlotTable) -> None:
    """Raise if the module has other submodules, parameters or buffers than when it was seen."""
    for index, (module, structure) in enumerate(zip(plan.modules, plan.structure, strict=True)):
        if structure_of(module.__dict__) != structure:
            raise rebuilt(plan, index, "its submodules, parameters or buffers")
    _check_ties(plan)
    if plan.parametrized and getattr(parametrize, "_cache_enabled", 0):
        raise TraceError(
            "apply was called inside torch.nn.utils.parametrize.cached(), which would hand out "
            "values computed from other parameters. Open cached() inside the module's forward."
        )


def _check_ties(plan: SlotTable) -> None:
    """Raise if other slots share a parameter than did when the module was seen."""
    names: dict[int, str] = {}
    for name, _, entries in plan.params:
        (index, table, key), *others = entries
        param = plan.modules[index].__dict__[table][key]
        for at, table, key in others:
            other = plan.modules[at].__dict__[table][key]
            # `module.to("meta")`, after which it is code alone, makes a new one for each slot
            if other is not param and not (param.is_meta and other.is_meta):
                raise rebuilt(plan, at, f"{key!r}, which was tied to {name!r},")
        # what is no parameter was put there by a call around this one
        if isinstance(param, nn.Parameter) and names.setdefault(id(param), name) != name:
            raise rebuilt(plan, index, f"{key!r}, which is now tied to {names[id(param)]!r},")


def rebuilt(plan: SlotTable, index: int, what: str) -> ShardError:
    """The error about a module that changed since its slots were found."""
    return ShardError(
        f"{site_of(plan.prefixes[index])} ({kind_of(plan.modules[index])}) changed {what} since "
        "functionalize saw it, so the params no longer describe it. Call functionalize again "
        "after changing the module."
    )


def check_device(plan: SlotTable, params: Mapping[str, Tensor], own: Buffers) -> None:
    """Raise for buffers without values beside params that have some."""
    # beside parameters on meta only shapes are asked for, and those it has
    meta = [name for name, buffer in own.items() if buffer.device.type == "meta"]
    first = next(iter(params.values()), None) if isinstance(params, Mapping) else None
    if meta and isinstance(first, Tensor) and first.device.type != "meta":
        raise ShardError(
            f"Buffer {meta[0]!r} of {kind_of(plan.root)} is on the meta device and has no values, "
            f"while the params are on {first.device}. Use functionalize(module, buffers=True) and "
            "pass real buffers, or build the module's buffers on a real device."
        )


def shown(value: Any) -> str:
    """What a value is, for a message."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
