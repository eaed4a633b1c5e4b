"""The places of a module where its parameters sit, to put other tensors there for good."""

from collections.abc import Mapping

from torch import Tensor, nn

from fzero.functional.functionalize import Params, _fill, _make_plan, _other_names


class ParameterSlots:
    """Every place of a module where a parameter sits, to put other tensors there.

    >>> import torch
    >>> linear = nn.Linear(2, 1)
    >>> slots = ParameterSlots(linear)
    >>> slots.install({name: torch.zeros_like(p) for name, p in slots.tensors().items()})
    >>> linear.weight
    tensor([[0., 0.]])
    """

    def __init__(self, module: nn.Module) -> None:
        self._plan = _make_plan(module)

    def tensors(self) -> Params:
        """The parameters by name, each once."""
        return {slot.name: slot.tensor(self._plan) for slot in self._plan.params}

    def other_names(self) -> dict[str, str]:
        """For each further name of a tied parameter, the one it goes by here."""
        return _other_names(self._plan, self._plan.params)

    def install(self, tensors: Mapping[str, Tensor]) -> None:
        """Put these tensors where the parameters of their names are."""
        plan = self._plan
        for name, _, places in plan.params:
            for index, table, key in places:
                plan.modules[index].__dict__[table][key] = tensors[name]
        if plan.caches:
            every = {**{s.name: s.tensor(plan) for s in plan.buffers}, **tensors}
            for index, attr, template in plan.caches:
                attrs = plan.modules[index].__dict__
                attrs[attr] = _fill(attrs[attr], template, every)
