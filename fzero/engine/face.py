"""`engine.optimizer`: a `torch.optim.Optimizer` as schedulers and loggers know one."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from fzero.errors import BackwardError


class Stepped(Protocol):
    """What a face shows: an engine."""

    lr: Any

    def step(self) -> None: ...
    def zero_grad(self, set_to_none: bool = True) -> None: ...
    def parameters(self) -> Any: ...


class Group(dict[str, Any]):
    """A param group whose learning rate is the engine's own."""

    def __init__(self, engine: "weakref.ref[Stepped]", given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self.engine = engine

    def __getitem__(self, key: str) -> Any:
        engine = self.engine()
        return engine.lr if key == "lr" and engine is not None else super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As of a dict."""
        return self[key] if key in self else default  # noqa: SIM401

    def __setitem__(self, key: str, value: Any) -> None:
        engine = self.engine()
        if key == "lr" and engine is not None:
            engine.lr = value
        super().__setitem__(key, value)


class EngineOptimizer(torch.optim.Optimizer):
    """See `Engine.optimizer`."""

    def __init__(self, engine: Stepped) -> None:
        self._engine = weakref.ref(engine)
        super().__init__(list(engine.parameters()), {"lr": engine.lr})
        self.param_groups = [Group(self._engine, group) for group in self.param_groups]

    def _alive(self) -> Stepped:
        engine = self._engine()
        if engine is None:
            raise BackwardError("engine.optimizer was used after its engine was gone.")
        return engine

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore
        """`engine.step()`, after `closure()` if there is one; what that returned.

        It is called once, as by torch's optimizers but LBFGS: it runs forward and backward.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._alive().step()
        return loss

    def stepped(self) -> None:
        """`engine.step()` was called itself: torch's schedulers warn where no `step()` was."""
        self._opt_called = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """`engine.zero_grad()`."""
        self._alive().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The groups, without the optimizer's state, which is `engine.state`'s."""
        (group,) = self.param_groups
        own = {k: group[k] for k in group if k != "params"}
        return {"state": {}, "param_groups": [{**own, "params": list(range(len(group["params"])))}]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the groups' numbers, the learning rate among them."""
        (group,) = self.param_groups
        for key, value in state_dict["param_groups"][0].items():
            if key != "params":
                group[key] = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused but for the first, which is made here."""
        if self.param_groups:
            self._refuse()
        super().add_param_group(param_group)

    def _refuse(self) -> NoReturn:
        raise BackwardError(
            "engine.optimizer.add_param_group: an engine's parameters are settled when it is made. "
            "Give groups rates of their own with fzero.optim.multi_transform."
        )

    def __reduce__(self) -> NoReturn:
        raise BackwardError(
            "engine.optimizer was to be copied or pickled; save engine.state, and its state_dict()."
        )

    def __repr__(self) -> str:
        (group,) = self.param_groups
        params: list[nn.Parameter] = group["params"]
        return f"EngineOptimizer({len(params)} parameters, lr={group['lr']})"
