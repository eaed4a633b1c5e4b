"""An engine's `state_dict` and `load_state_dict`: full tensors under the module's own names.

[Note: a module's own ways] A module may save in another form than it has, by hooks or methods of
its own: projections that are fused and stored apart, names of an older release. So torch saves it,
with full parameters in the places of the engine's, and loads it in the same way if there is
anything of the kind. Else values go to shards without a full copy between.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fzero.distributed.agree import agree
from fzero.distributed.mesh import is_simulated
from fzero.engine import phases
from fzero.engine.driver import Driver
from fzero.engine.parts import Parts
from fzero.errors import ShardError
from fzero.functional.slots import ParameterSlots
from fzero.numerics.bits import same_bits
from fzero.state.agreement import checksum

_EXTRA = "_extra_state"  # torch's word, for what get_extra_state returns


class LoadedKeys(NamedTuple):
    """What `load_state_dict` has passed over: empty lists unless `strict=False`.

    Args:
        missing_keys: of the module, and not in what was loaded.
        unexpected_keys: the other way round.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


def state_dict(driver: Driver, parts: Parts, slots: ParameterSlots) -> dict[str, Any]:
    """Copies of all that the module's own `state_dict` has; see `Engine.state_dict`."""
    driver.writes.take()
    driver.writes.same_module()  # what it has is told by its own names
    with _full(driver, parts, slots, "state_dict") as full:
        own = driver.module.state_dict(keep_vars=True)
    copies = {id(x): x.detach() for x in full.values()}  # a tied one is one tensor here, too
    for key, x in own.items():
        if isinstance(x, Tensor):
            own[key] = copies[id(x)] if id(x) in copies else x.detach().clone()
    return own


@contextlib.contextmanager
def _full(
    driver: Driver, parts: Parts, slots: ParameterSlots, what: str
) -> Iterator[dict[str, Tensor]]:
    """Inside, the module's parameters are full copies, with all digits of their masters."""
    ours, leaves = slots.tensors(), driver.reducer.leaves
    full: dict[str, Tensor] = {
        leaves[index].name: nn.Parameter(x, driver.params[index].requires_grad)
        for index, x in parts.full_values(what).items()
    }
    slots.install(full)
    try:
        yield full
    finally:
        slots.install(ours)


def load(
    driver: Driver, parts: Parts, slots: ParameterSlots, state: Mapping[str, Any], *, strict: bool
) -> LoadedKeys:
    """Check everything, then copy; see `Engine.load_state_dict`."""
    driver.writes.take()
    driver.writes.same_module()
    phases.refuse_inside(driver.state, "load_state_dict()")
    phases.refuse_in_block(driver.state, "load_state_dict()")
    if not isinstance(state, Mapping):
        raise ShardError(
            f"engine.load_state_dict takes full tensors by name, and was given a "
            f"{type(state).__name__}. Pass what state_dict() returned, of an engine or a module."
        )
    _agree(driver, state)  # so that what is wrong is so on every rank
    if any(map(_has_ways_of_its_own, driver.module.modules())):
        keys = _load_by_torch(driver, parts, slots, state, strict=strict)
    else:
        keys = _load_by_name(driver, state, strict=strict)
    driver.writes.ours()
    if driver.units is not None:
        driver.units.reshard()
    return keys


def _load_by_name(driver: Driver, state: Mapping[str, Any], *, strict: bool) -> LoadedKeys:
    own, indices = driver.module.state_dict(keep_vars=True), _indices(driver)
    there = {id(own[key]) for key in state if key in own}
    keys = LoadedKeys(
        # one name of a tied parameter is enough
        [key for key, x in own.items() if key not in state and id(x) not in there],
        [key for key in state if key not in own],
    )
    _refuse(list(_misfits(own, state)), keys, strict=strict)
    pairs = [(own[key], x) for key, x in state.items() if key in own]
    driver.stepper.load({indices[id(p)]: x for p, x in pairs if id(p) in indices})
    buffers = {id(x): name for name, x in driver.module.named_buffers()}
    values = {buffers[id(b)]: x.to(b.dtype) for b, x in pairs if id(b) in buffers}
    driver.stepper.buffers.write(values)
    for key in state.keys() & own.keys():
        module, _, last = key.rpartition(".")
        if last == _EXTRA:
            driver.module.get_submodule(module).set_extra_state(state[key])
    return keys


def _has_ways_of_its_own(module: nn.Module) -> bool:
    """Whether a module saves or loads as torch's don't; see [Note: a module's own ways]."""
    hooks = "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_state_dict_hooks"
    if any(getattr(module, name) for name in hooks):
        return True
    methods = "load_state_dict", "_load_from_state_dict", "state_dict", "_save_to_state_dict"
    return any(
        name in module.__dict__ or not getattr(type(module), name).__module__.startswith(_TORCHS)
        for name in methods
    )


_TORCHS = "torch.nn.modules."


def _load_by_torch(
    driver: Driver, parts: Parts, slots: ParameterSlots, state: Mapping[str, Any], *, strict: bool
) -> LoadedKeys:
    module, leaves = driver.module, driver.reducer.leaves
    before = {name: x.detach().clone() for name, x in module.named_buffers()}
    try:
        with _full(driver, parts, slots, "load_state_dict"):
            found: Any = module.load_state_dict(state, strict=False)
            values = slots.tensors()  # a module may have put others there
        keys = LoadedKeys(*found) if found else LoadedKeys([], [])  # its own may return nothing
        # one name of a tied parameter is enough
        ties = {name: name for name in values} | slots.other_names()
        there = {ties[name] for name in ties.keys() - {*keys.missing_keys}}
        missing = [key for key in keys.missing_keys if ties.get(key) not in there]
        keys = keys._replace(missing_keys=missing)
        _refuse(
            [
                f"{leaf.name!r} is {tuple(values[leaf.name].shape)}, and must be {leaf.shape}"
                for leaf in leaves
                if leaf.name in values and tuple(values[leaf.name].shape) != tuple(leaf.shape)
            ],
            keys,
            strict=strict,
        )
    except BaseException as error:
        driver.stepper.buffers.write(before)
        if isinstance(error, RuntimeError):  # torch's word for what doesn't fit
            raise ShardError(f"engine.load_state_dict: {error} Nothing was loaded.") from error
        raise
    driver.stepper.load({index: values[leaves[index].name] for index in driver.params})
    driver.stepper.buffers.write({name: x.detach() for name, x in module.named_buffers()})
    return keys


def _refuse(wrong: list[str], keys: LoadedKeys, *, strict: bool) -> None:
    if strict:
        wrong += [f"{key!r} is missing" for key in keys.missing_keys]
        wrong += [f"the module has no {key!r}" for key in keys.unexpected_keys]
    if wrong:
        more = f"; and {len(wrong) - 5} more" if wrong[5:] else ""
        raise ShardError(
            f"engine.load_state_dict: {'; '.join(wrong[:5])}{more}. Nothing was loaded. Pass full "
            "tensors under the names of engine.state_dict(); strict=False passes over names that "
            "are missing or unknown."
        )


def _indices(driver: Driver) -> dict[int, int]:
    return {id(param): index for index, param in driver.params.items()}


def _agree(driver: Driver, state: Mapping[str, Any]) -> None:
    """All ranks load the same: below stage 3 each would keep its own, and they would drift."""
    mesh = driver.stepper.plan.mesh
    if mesh.world_size == 1 or is_simulated(mesh):
        return
    driver.journal.enter("load_state_dict")
    items = [
        (key, f"{x.dtype} {tuple(x.shape)}: {checksum(x)}" if _has_bits(x) else type(x).__name__)
        for key, x in state.items()
    ]
    hint = "Load the same file on every rank."
    agree("engine.load_state_dict", items, mesh, driver.cfg.timeout, hint)


def _has_bits(x: Any) -> bool:
    if not isinstance(x, Tensor) or isinstance(x, DTensor):
        return False
    return x.layout == torch.strided and x.device.type != "meta" and not x.is_quantized


def _misfits(own: Mapping[str, Any], state: Mapping[str, Any]) -> Iterator[str]:
    """What can't be loaded, in words."""
    first: dict[int, str] = {}
    for key, x in state.items():
        mine = own.get(key)
        if not isinstance(mine, Tensor):
            continue
        other = first.setdefault(id(mine), key)
        if not _has_bits(x):
            what = f"{x.layout}, {x.device}" if type(x) is Tensor else f"a {type(x).__name__}"
            yield f"{key!r} is {what}, and must be a full tensor with values"
        elif x.shape != mine.shape:
            yield f"{key!r} is {tuple(x.shape)}, and must be {tuple(mine.shape)}"
        elif _kind(x) != _kind(mine):
            yield f"{key!r} is {x.dtype}, and must be {mine.dtype} or another of its kind"
        elif key != other and not same_bits(x, state[other]):
            yield f"{key!r} and {other!r} are one parameter, and have two values"


def _kind(x: Tensor) -> tuple[bool, bool]:
    return x.is_floating_point(), x.is_complex()
