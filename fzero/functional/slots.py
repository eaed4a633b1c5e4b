"""Where a module's tensors sit: every slot of every module, and other attributes that show them.

[Note: slots] A slot is one entry `module._parameters[key]` or `module._buffers[key]`. A tensor may
sit in many slots (tied weights), and a module may have many names but has its slots once, so the
swap goes by slot and never by name: `torch.func.functional_call` goes by name and leaves the
passed tensors behind in a module that is registered twice.
"""

import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from fzero.errors import ShardError, TraceError
from fzero.functional.memory import refuse_shared
from fzero.functional.owners import STATISTICS
from fzero.functional.turns import Turn, Turns, turn_of
from fzero.numerics.precision import LOW, class_name

Params = dict[str, Tensor]


Buffers = dict[str, Tensor]


# Of a module: its children, the keys of its parameters (those that are there) and of its buffers,
# to notice a module that was rebuilt.
Structure = tuple[list[nn.Module | None], list[str], list[str]]


class Slots(NamedTuple):
    """One tensor of the module: its name, its shape, and every slot that holds it."""

    name: str
    shape: torch.Size
    entries: tuple[tuple[int, str, str], ...]  # (module index, "_parameters" | "_buffers", key)

    def tensor(self, plan: "SlotTable") -> Tensor:
        index, table, key = self.entries[0]
        return plan.modules[index].__dict__[table][key]


class SlotTable(NamedTuple):
    made_by_functionalize = (
        True  # says nothing that the module doesn't: fzero.functional.outside skips it
    )

    root: nn.Module
    modules: tuple[nn.Module, ...]
    prefixes: tuple[str, ...]
    structure: tuple[Structure, ...]
    params: tuple[Slots, ...]
    buffers: tuple[Slots, ...]
    # [Note: caches] Attributes that hold parameters a second time, as `nn.LSTM._flat_weights`
    # does: (module index, attribute, template). They must show the passed tensors too.
    caches: tuple[tuple[int, str, Any], ...]
    parametrized: bool
    turn: Turn | Turns  # of whoever changes the slots: [Note: turns]


def plan_slots(root: nn.Module) -> SlotTable:
    prefixes, modules = zip(*root.named_modules(), strict=True)
    turn = turn_of((module.__dict__ for module in modules), f"a {kind_of(root)}")
    with turn:
        return _planned(root, prefixes, modules, turn)


def _planned(
    root: nn.Module, prefixes: tuple[str, ...], modules: tuple[nn.Module, ...], turn: Turn | Turns
) -> SlotTable:
    found: dict[int, tuple[str, str, torch.Size, list[tuple[int, str, str]]]] = {}
    for table in ("_parameters", "_buffers"):
        for index, (prefix, module) in enumerate(zip(prefixes, modules, strict=True)):
            if isinstance(module, torch.jit.ScriptModule):
                raise TraceError(
                    f"{site_of(prefix)} is a torch.jit module, whose parameters cannot be swapped. "
                    "Pass the original nn.Module instead."
                )
            for key, tensor in module.__dict__[table].items():
                if tensor is None:
                    continue
                name = f"{prefix}.{key}" if prefix else key
                if is_lazy(tensor):
                    raise ShardError(
                        f"{name!r} has no shape yet: {site_of(prefix)} is a lazy "
                        f"{kind_of(module)}. Run one forward first, so that every shape is known."
                    )
                entry = found.setdefault(id(tensor), (table, name, tensor.shape, []))
                entry[3].append((index, table, key))

    slots = [(t, Slots(name, shape, tuple(entries))) for t, name, shape, entries in found.values()]
    names = {ident: entry[1] for ident, entry in found.items()}
    # the tables of a module are its slots, not caches of them
    base = nn.Module().__dict__.keys()
    caches = [
        (index, attr, template)
        for index, module in enumerate(modules)
        for attr, value in module.__dict__.items()
        if attr not in base and (template := template_of(value, names)) is not None
    ]
    plan = SlotTable(
        root=root,
        modules=modules,
        prefixes=prefixes,
        structure=tuple(structure_of(module.__dict__) for module in modules),
        params=tuple(s for table, s in slots if table == "_parameters"),
        buffers=tuple(s for table, s in slots if table == "_buffers"),
        caches=tuple(caches),
        parametrized=any(parametrize.is_parametrized(module) for module in modules),
        turn=turn,
    )
    params, buffers = ([(s.name, s.tensor(plan)) for s in t] for t in (plan.params, plan.buffers))
    refuse_shared(params, buffers, list(_attributes(plan, names)))
    return plan


def _attributes(plan: SlotTable, names: Mapping[int, str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors that modules hold beside their slots, with their names."""
    base = nn.Module().__dict__.keys()
    for prefix, module in zip(plan.prefixes, plan.modules, strict=True):
        hooks = module._forward_pre_hooks.values()
        # torch.nn.utils.spectral_norm and its like write an attribute anew before each forward
        written = {getattr(hook, "name", None) for hook in hooks}
        if isinstance(module, nn.RNNBase):  # which keeps its weights there, as each was set last
            written.add("_flat_weights")
        for attr, value in module.__dict__.items():
            if attr not in base and attr not in written:
                where = f"{prefix}.{attr}" if prefix else attr
                yield from ((where, x) for x in _tensors_in(value) if id(x) not in names)


def _tensors_in(value: Any, depth: int = 3) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth and type(value) in (list, tuple, dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item, depth - 1)


def owners_of_slots(plan: SlotTable, slots: Slots) -> set[str]:
    """The classes of the modules that hold a parameter, and STATISTICS."""
    modules = [plan.modules[index] for index, _, _ in slots.entries]
    found = {class_name(type(module)) for module in modules}
    dtype = slots.tensor(plan).dtype
    if dtype not in LOW and any(_has_statistics(module, dtype) for module in modules):
        found.add(STATISTICS)
    return found


def _has_statistics(module: nn.Module, dtype: torch.dtype) -> bool:
    # Private, but what every norm with statistics is one of; a user's may be a subclass.
    is_norm = isinstance(module, nn.modules.batchnorm._NormBase)
    return is_norm and module.running_mean is not None and module.running_mean.dtype == dtype


def structure_of(attrs: dict[str, Any]) -> Structure:
    params = [key for key, value in attrs["_parameters"].items() if value is not None]
    return list(attrs["_modules"].values()), params, list(attrs["_buffers"])


def template_of(value: Any, names: Mapping[int, str], depth: int = 3) -> Any:
    """Where `value` holds a named tensor: a name, or {position: template}; None if nowhere."""
    if isinstance(value, Tensor):
        return names.get(id(value))
    if isinstance(value, weakref.ref):
        return template_of(value(), names, 0)
    if depth == 0 or type(value) not in (list, tuple, dict):
        return None
    items = value.items() if isinstance(value, dict) else enumerate(value)
    inner = {at: t for at, item in items if (t := template_of(item, names, depth - 1)) is not None}
    return inner or None


def fill_template(value: Any, template: Any, tensors: Mapping[str, Tensor]) -> Any:
    """`value` with the passed tensors where `template` says; containers are new."""
    if isinstance(template, str):
        tensor = tensors[template]
        return weakref.ref(tensor) if isinstance(value, weakref.ref) else tensor
    items = value.copy() if isinstance(value, dict) else list(value)
    for at, inner in template.items():
        items[at] = fill_template(items[at], inner, tensors)
    return tuple(items) if isinstance(value, tuple) else items


def other_names(plan: SlotTable, slots: tuple[Slots, ...]) -> dict[str, str]:
    first = {(id(plan.modules[index]), key): s.name for s in slots for index, _, key in s.entries}
    return {
        f"{prefix}.{key}" if prefix else key: name
        for prefix, module in plan.root.named_modules(remove_duplicate=False)
        for (ident, key), name in first.items()
        if ident == id(module)
    }


def kind_of(module: nn.Module) -> str:
    return type(module).__name__


def site_of(prefix: str) -> str:
    return f"module {prefix!r}" if prefix else "the module"


class ParameterSlots:
    """Every slot of a module that holds a parameter, to put other tensors there.

    >>> import torch
    >>> linear = nn.Linear(2, 1)
    >>> slots = ParameterSlots(linear)
    >>> slots.install({name: torch.zeros_like(p) for name, p in slots.tensors().items()})
    >>> linear.weight
    tensor([[0., 0.]])
    """

    def __init__(self, module: nn.Module) -> None:
        self._plan = plan_slots(module)

    def tensors(self) -> Params:
        """The parameters by name, each once."""
        return {slot.name: slot.tensor(self._plan) for slot in self._plan.params}

    def other_names(self) -> dict[str, str]:
        """For each further name of a tied parameter, the one it goes by here."""
        return other_names(self._plan, self._plan.params)

    def install(self, tensors: Mapping[str, Tensor]) -> None:
        """Put these tensors where the parameters of their names are."""
        plan = self._plan
        for name, _, entries in plan.params:
            for index, table, key in entries:
                plan.modules[index].__dict__[table][key] = tensors[name]
        if plan.caches:
            every = {**{s.name: s.tensor(plan) for s in plan.buffers}, **tensors}
            for index, attr, template in plan.caches:
                attrs = plan.modules[index].__dict__
                attrs[attr] = fill_template(attrs[attr], template, every)
