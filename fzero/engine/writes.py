"""What callers do to a module between two updates, seen before the second."""

import operator
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from fzero.engine.stepper import Stepper
from fzero.errors import FzeroError
from fzero.inference import makes_normal
from fzero.layout import LeafLayout


class Writes:
    """What an engine relies on: that its parameters are the module's, as the engine left them.

    Args:
        module: the engine's.
        params: the module's parameters by index.
        leaves: how each is split.
        stepper: what trains them.
        lazy: whether they are gathered on use: there writing is refused at once.
    """

    def __init__(
        self,
        module: nn.Module,
        params: Mapping[int, Tensor],
        leaves: Sequence[LeafLayout],
        stepper: Stepper,
        *,
        lazy: bool,
    ) -> None:
        self.module = module
        self.params, self.leaves, self.stepper, self.lazy = params, leaves, stepper, lazy
        several = stepper.plan.axes.world > 1 and not lazy
        trained = [index for index, leaf in enumerate(leaves) if leaf.trainable and several]
        self.kinds = list(map(type, params.values()))
        self.watched = [(leaves[index].name, params[index]) for index in trained]
        self._note()

    def same_module(self) -> None:
        """Every parameter of the module is this engine's, under its name, and the other way round.

        Raises:
            FzeroError: one was replaced, renamed or taken away, or came after the engine was made.
        """
        if not self.lazy and any(map(Tensor.is_inference, self.params.values())):
            self._leave_inference()
        now = self._slots()
        same = len(now) == len(self.slots) and all(map(operator.is_, now, self.slots))
        if same and list(map(type, self.params.values())) == self.kinds:
            return
        ours = {id(param): index for index, param in self.params.items()}
        found = dict(self.module.named_parameters())
        new = [name for name, param in found.items() if id(param) not in ours]
        gone = ours.keys() - set(map(id, found.values()))
        lost = [self.leaves[ours[key]].name for key in gone]
        if new:
            raise FzeroError(
                f"the parameter {new[0]!r} has come into the module after its engine was made"
                f"{f' (and {len(new) - 1} more)' if new[1:] else ''}: a layer was replaced or "
                f"added, or weights were loaded with assign=True. {_SETTLED}"
            )
        if lost:
            raise FzeroError(
                f"the parameter {min(lost)!r} is no longer in the module: its layer was taken "
                f"away, or tied to another one after the engine was made. {_SETTLED}"
            )
        for index, kind in zip(self.params, self.kinds, strict=True):
            if type(self.params[index]) is not kind:
                raise FzeroError(
                    f"the parameter {self.leaves[index].name!r} was exchanged for another tensor, "
                    "as torch.utils.swap_tensors does, and load_state_dict after "
                    "torch.__future__.set_swap_module_params_on_conversion(True). Write to it "
                    "(p.data.copy_) or use engine.load_state_dict; at stage 3 that, or `with "
                    "engine.gathered(names, modifier_rank=0):`."
                )
        self._same_homes()
        # all that came or went has no parameters
        self._note()

    def is_lent(self) -> bool:
        """Whether none of its parameters is ours just now: `functionalize`d calls put theirs in."""
        pairs = zip(self.slots, self._slots(), strict=False)  # the module may have grown since
        ours = [(x, now) for x, now in pairs if isinstance(x, Tensor)]
        return bool(ours) and not any(x is now for x, now in ours)

    def versions(self) -> list[int]:
        """How often each parameter has been written that is to be the same on several ranks."""
        return [param._version for _, param in self.watched]

    def unwritten_since(self, versions: list[int]) -> None:
        """The module has left its trained parameters alone.

        Raises:
            FzeroError: its forward has changed one, and there are several ranks.
        """
        if versions != (now := self.versions()):
            changed = map(operator.ne, versions, now)
            name = next(self.watched[i][0] for i, differs in enumerate(changed) if differs)
            raise FzeroError(
                f"forward changed the parameter {name!r} in place (as Embedding(max_norm=...) "
                "does). Each rank would keep what its own batch made of it, and ranks would drift "
                "apart. Change parameters between steps, alike on every rank, or train on one."
            )

    def _note(self) -> None:
        self.modules = list(self.module.modules())
        self.slots = self._slots()

        self.homes, self.names = self._homes(), self._names()

    def _slots(self) -> list[Any]:
        # tables, not `named_parameters`, which builds a string for each: this runs in every forward
        tables = [x for module in self.modules for x in (module._modules, module._parameters)]
        return [*chain.from_iterable(tables), *chain.from_iterable(x.values() for x in tables)]

    def _homes(self) -> set[tuple[int, str, int]]:
        tables = [(module, module._parameters) for module in self.module.modules()]
        return {(id(module), key, id(x)) for module, table in tables for key, x in table.items()}

    def _names(self) -> dict[str, int]:
        return {name: id(x) for name, x in self.module.named_parameters(remove_duplicate=False)}

    def _same_homes(self) -> None:
        """Each parameter has its name, or is in its module, which may lie in another now."""
        now, before = self._names(), self.names
        if now.items() >= before.items():
            return
        if self.homes <= self._homes() and all(before.get(x, now[x]) == now[x] for x in now):
            return
        ours = {id(param): self.leaves[index].name for index, param in self.params.items()}
        new = sorted(name for name in now if now[name] != before.get(name))
        name = new[0] if new else min(before.keys() - now.keys())
        raise FzeroError(
            f"the parameter {ours[(now if new else before)[name]]!r} "
            f"{'has become' if new else 'is no longer'} {name!r} in the module after its engine "
            "was made: it was renamed (torch.nn.utils.prune and parametrizations do so), or put "
            f"elsewhere. States and checkpoints go by the names of before. {_AGAIN}"
        )

    def see(self) -> None:
        """An update would reach the module's parameters, and those that are to be trained.

        Raises:
            FzeroError: as `same_module` and `take`; or a parameter is to be trained and was frozen
                when the engine was made.
        """
        self.same_module()
        for index, param in self.params.items():
            leaf = self.leaves[index]
            if param.requires_grad and not leaf.trainable:
                raise FzeroError(
                    f"the parameter {leaf.name!r} has requires_grad=True, and had False when the "
                    "engine was made, or Config(frozen=...) names it: there is no room for its "
                    "optimizer state. Make the engine while it requires a gradient, and freeze it "
                    "then, with requires_grad_(False), until it is to be trained."
                )
        self.take()

    def _leave_inference(self) -> None:
        """An average that was made under inference_mode may have come by `p.data = x`."""
        if not torch.is_inference_mode_enabled():  # where an evaluation may read it
            self.take()

    @makes_normal
    def take(self) -> None:
        """What `p.data = x` has put in a parameter's place is trained from now on.

        In memory of its own: callers swap values in and out by such assignments (averages, for an
        evaluation), and keep what they took out.

        Raises:
            FzeroError: it has another shape, dtype or device.
        """
        for index, param in () if self.lazy else self.params.items():
            leaf, own = self.leaves[index], self.stepper.locals[index]
            if _lies(param) == _lies(own):
                continue
            if (param.shape, param.dtype, param.device) != (own.shape, own.dtype, own.device):
                raise FzeroError(
                    f"the parameter {leaf.name!r} is no longer in the engine's memory: "
                    "module.to(...), .half() or p.data = ... replaced it by "
                    f"{_said(param)}, where the engine trains {_said(own)}. Move or cast the "
                    "module before the engine is made; dtypes are Config(precision=...)'s."
                )
            param.data = param.data.clone(memory_format=torch.contiguous_format)
            self.stepper.replace(index, param.data)

    def ours(self) -> None:
        """The engine has written: autograd is to refuse graphs made with the values of before."""
        torch.autograd.graph.increment_version(list(self.params.values()))


def _lies(x: Tensor) -> tuple[Any, ...]:
    """Where and how a tensor lies in memory: as another, if both are one."""
    return x.data_ptr(), x.dtype, x.shape, x.stride()


def _said(x: Tensor) -> str:
    return f"{tuple(x.shape)} of {x.dtype} on {x.device}"


_AGAIN = (
    "Change the module before, or make another engine of it; engine.full_params() has what was "
    "trained."
)
_SETTLED = f"What is trained is settled when the engine is made: no update would reach it. {_AGAIN}"
