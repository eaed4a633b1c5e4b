"""A module from a function that builds it, without its values: those come as shards.

The function runs once on fake tensors (`fzero.state.builder`). Buffers are then made in full.
Parameters are made one after the other and cut; until the engine has its own in their slots, the
module holds parameters of the right shape, all elements of each in one place of memory.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from fzero import tree
from fzero.errors import ConfigError, ShardError
from fzero.functional.functionalize import parameters
from fzero.functional.slots import ParameterSlots
from fzero.state.builder import Recording, record


class Built(NamedTuple):
    """A module whose parameters have no values yet.

    Args:
        module: with its buffers.
        params: what makes the parameters' values, by name.
    """

    module: nn.Module
    params: Recording


def build(builder: Callable[[], Any]) -> Built:
    """Run `builder` without memory; its parameters' values can be replayed.

    Raises:
        ConfigError: it returned something else than a module.
        ShardError: the module keeps tensors that are neither parameters nor buffers.
        TraceError: see `fzero.state.builder.record`.

    Examples:
        >>> built = build(lambda: nn.Linear(2000, 3000))
        >>> built.module.weight.shape, built.module.weight.untyped_storage().nbytes()
        (torch.Size([3000, 2000]), 4)
    """
    found: list[nn.Module] = []

    def run() -> dict[str, dict[str, Tensor]]:
        module = builder()
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"Engine(model): model is a function, which returned a {type(module).__name__}; it "
                "must return the torch.nn.Module that it builds."
            )
        found.append(module)
        return {"buffers": dict(module.named_buffers()), "params": parameters(module)}

    recording = record(run, "module, fzero.Engine(build())")
    (module,) = found
    slots = ParameterSlots(module)
    _fill_buffers(module, recording)
    slots.install({name: _stand_in(x) for name, x in slots.tensors().items()})
    _refuse_others(module)
    return Built(module, _part(recording, "params"))


def _part(recording: Recording, what: str) -> Recording:
    """The same recording, of which only one dict's leaves are replayed."""
    shown: Any = recording.tree()
    # leaves are in the order of the keys
    first = sum(len(tree.leaves(shown[key])) for key in sorted(shown) if key < what)
    leaves, spec = tree.flatten(shown[what])
    last = first + len(leaves)
    views = {i - first: view for i, view in recording.views.items() if first <= i < last}
    return replace(recording, spec=spec, leaves=leaves, views=views)


def _fill_buffers(module: nn.Module, recording: Recording) -> None:
    part = _part(recording, "buffers")
    if not part.leaves:
        return
    values: dict[int, Tensor] = {}
    states = [generator.get_state() for generator, _ in recording.starts]
    part.replay(lambda i, x: values.update({i: x.detach().clone()}))
    for (generator, _), state in zip(recording.starts, states, strict=True):
        generator.set_state(state)  # the parameters draw from it again
    filled = tree.unflatten(part.spec, [values[i] for i in range(len(part.leaves))])
    new = {id(fake): filled[name] for name, fake in module.named_buffers()}
    for owner in module.modules():
        for key, fake in owner._buffers.items():
            if id(fake) in new:
                owner._buffers[key] = new[id(fake)]


def _stand_in(fake: Tensor) -> nn.Parameter:
    """A parameter of the same shape, dtype and device, without its memory."""
    one = torch.empty((), dtype=fake.dtype, device=fake.device)
    new = nn.Parameter(one.expand(fake.shape), fake.requires_grad)
    own = vars(torch.empty_like(fake)).keys()  # what any fake tensor has
    for name, value in vars(fake).items():
        if name not in own and not name.startswith("_"):  # what the user noted on it
            setattr(new, name, value)
    if fake._backward_hooks:
        new._backward_hooks = fake._backward_hooks
    return new


def _refuse_others(module: nn.Module) -> None:
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            if name not in ("_parameters", "_buffers", "_modules") and any(_fakes_in(value)):
                where = f"{prefix}.{name}" if prefix else name
                raise ShardError(
                    f"Engine(build): the module keeps a tensor in its attribute {where!r}, which "
                    "is neither a parameter nor a buffer and has no values where a module is "
                    "built by a function. Register it: self.register_buffer(name, tensor, "
                    "persistent=False)."
                )


def _fakes_in(value: Any, depth: int = 3) -> Iterator[bool]:
    if isinstance(value, Tensor):
        yield isinstance(value, FakeTensor)
    elif depth and isinstance(value, (list, tuple)):
        for item in value:
            yield from _fakes_in(item, depth - 1)
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from _fakes_in(item, depth - 1)
