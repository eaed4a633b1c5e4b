"""`engine.optimizer`: a `torch.optim.Optimizer` as schedulers and loggers know one."""

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from fzero.engine.driver import Driver
from fzero.engine.own_part import agree_on, part_of, with_part
from fzero.engine.scaler import groups_for_scaler, is_asked_by_scaler
from fzero.errors import BackwardError, CheckpointError, FzeroError


class Stepped(Protocol):
    """What a face shows: an engine."""

    lr: Any
    momentum: Any
    state: Any

    def step(self) -> None: ...
    def zero_grad(self, set_to_none: bool = True) -> None: ...
    def parameters(self) -> Any: ...
    @property
    def device(self) -> torch.device: ...


_RATE = "engine.optimizer.param_groups[0]['lr']"
_FOR_ANY = (
    "Save it on every rank, in a file of its own; or for any rank, stage and world by "
    "fzero.checkpoint.save(path, *engine.state)."
)


class Group(MutableMapping[str, Any], dict[str, Any]):  # pyright: ignore
    """A param group whose learning rate, and momentum, are the engine's own.

    A dict, as torch's are, of which every way to read and write goes through the five methods here:
    a dict's own `update` and `items` would go past them.
    """

    def __init__(
        self,
        engine: "weakref.ref[Stepped]",
        driver: "weakref.ref[Driver]",
        given: Mapping[str, Any],
    ) -> None:
        dict.__init__(self, given)
        self.engine, self.driver = engine, driver

    def __getitem__(self, key: str) -> Any:
        engine = self.engine()
        if key == "lr" and engine is not None:
            rate = engine.lr  # where there is none it says so
            if isinstance(rate, dict):
                raise FzeroError(
                    f"engine.optimizer.param_groups[0]['lr']: the optimizer has the rates {rate}, "
                    "and a scheduler of torch's drives one. Set them by label, engine.lr = {label: "
                    "rate}, or give each label a schedule of fzero.optim."
                )
            return rate
        there = dict.__getitem__(self, key)
        return there if key != "momentum" or engine is None else engine.momentum

    def __contains__(self, key: object) -> bool:
        return any(key == x for x in self)

    def __setitem__(self, key: str, value: Any) -> None:
        engine, driver = self.engine(), self.driver()
        if key == "lr" and driver is not None:
            driver.stepper.set_rate(value, _RATE, " (a scheduler of torch does that)")
        elif key == "momentum" and key in self and engine is not None:
            engine.momentum = value
        elif key in _numbers_of_optimizers():
            raise BackwardError(
                f"engine.optimizer.param_groups[0][{key!r}] was assigned, and nothing would read "
                "it: of what an update takes 'lr' is set here, and 'momentum' of an optimizer made "
                "by inject_hyperparams(..., momentum=True). Give the optimizer a schedule, "
                f"or keep {key!r} in its state, where inject_hyperparams can: "
                f"engine.state[1].inner.hyperparams[{key!r}].fill_(value) counts at the next step."
            )
        dict.__setitem__(self, key, value)

    def __delitem__(self, key: str) -> None:
        dict.__delitem__(self, key)

    def __iter__(self) -> Iterator[str]:
        engine = self.engine()
        apart = engine is not None and dict.__contains__(self, "lr") and isinstance(engine.lr, dict)
        return iter([key for key in dict.__iter__(self) if key != "lr" or not apart])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __ior__(self, other: Any) -> "Group":
        self.update(other)
        return self

    def copy(self) -> dict[str, Any]:
        """What is there now, as a dict of its own."""
        return dict(self.items())

    def __repr__(self) -> str:
        return repr(self.copy())


@functools.cache
def _numbers_of_optimizers() -> frozenset[str]:
    """What torch's optimizers keep in their groups to compute with, but for the rate."""
    classes = [x for x in vars(torch.optim).values() if isinstance(x, type)]
    names: set[str] = set()
    for one in classes:
        if issubclass(one, torch.optim.Optimizer) and one is not torch.optim.Optimizer:
            names.update(inspect.signature(one).parameters)
    return frozenset(names - {"params", "lr"})


class EngineOptimizer(torch.optim.Optimizer):
    """See `Engine.optimizer`."""

    def __init__(self, engine: Stepped, driver: Driver) -> None:
        self._engine, self._driver = weakref.ref(engine), weakref.ref(driver)
        numbers: dict[str, Any] = {}
        with contextlib.suppress(FzeroError):  # a GradScaler needs none
            numbers["lr"] = engine.lr
        if engine.momentum is not None:  # of Adam, too: of two betas the second is not set here
            numbers["momentum"] = engine.momentum
        super().__init__(list(engine.parameters()), numbers)
        groups = [Group(self._engine, self._driver, group) for group in self.param_groups]
        self.param_groups = groups  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """One group of all parameters; for a scaler see [Note: a scaler's gradients]."""
        if is_asked_by_scaler():
            return groups_for_scaler(self._unscale, self._alive().device)
        return self._groups

    @param_groups.setter
    def param_groups(self, groups: list[Any]) -> None:
        self._groups = groups

    def _unscale(self, factor: Tensor) -> bool:
        driver = self._driver()
        assert driver is not None, "it lives as long as its engine"
        return driver.unscale(factor)

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
        """The engine's `step` was called: schedulers, which ask for it, need not warn."""
        self._opt_called = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """`engine.zero_grad()`."""
        self._alive().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the optimizer's state, in copies, and the groups' numbers."""
        (group,) = self.param_groups
        own = {k: group[k] for k in group if k != "params"}
        numbers = {**own, "params": list(range(len(group["params"])))}
        return {**part_of(self._alive().state[1]), "param_groups": [numbers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `state_dict` gave on this rank; every rank must call it.

        Raises:
            BackwardError: it holds the state of another optimizer, which this has no place for.
            CheckpointError: it is that of another rank, or of an engine that is sharded otherwise.
            RankMismatchError: ranks load the states of different steps.
        """
        if not isinstance(state_dict, Mapping):
            raise BackwardError(
                "engine.optimizer.load_state_dict takes what engine.optimizer.state_dict() gave, "
                f"and was given a {type(state_dict).__name__}."
            )
        if "places" not in state_dict:
            raise BackwardError(
                "engine.optimizer.load_state_dict: it holds the state of another optimizer, for "
                f"{len(state_dict.get('state', ()))} parameters, and takes what "
                "engine.optimizer.state_dict() gave. Go on from a checkpoint: engine.state = "
                "fzero.checkpoint.load(path, *engine.state)."
            )
        before = part_of(self._alive().state[1])
        self.load_part(state_dict, _FOR_ANY)
        (group,) = self.param_groups
        for key, value in state_dict["param_groups"][0].items():
            if key == "params":
                continue
            try:
                group[key] = value
            except FzeroError as error:  # on all ranks, as their optimizers are made alike
                self.load_part(before, _FOR_ANY)
                raise CheckpointError(
                    f"optimizer.load_state_dict: it was saved with {key}={value}, and the "
                    "optimizer here has another, in no tensor of its state. Nothing was loaded. "
                    "Make it with the number that was saved, or by fzero.optim.inject_hyperparams. "
                    f"({error})"
                ) from error

    def load_part(self, part: Mapping[str, Any], instead: str) -> None:
        """Go on from what `part_of` gave; `instead` says what to do where it does not fit."""
        engine, driver = self._alive(), self._driver()
        assert driver is not None, "it lives as long as its engine"
        params, state = engine.state
        try:
            new = with_part(state, part)
        except CheckpointError as error:  # told once all ranks know
            new = error
        new = agree_on(driver, new, instead)
        engine.state = params, new._replace(model_state=None)  # buffers stay

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
        raise BackwardError("engine.optimizer was to be copied or pickled; save its state_dict().")

    def __repr__(self) -> str:
        (group,) = self.param_groups
        params: list[nn.Parameter] = group["params"]
        rate = f", lr={group['lr']}" if "lr" in group else ""
        return f"EngineOptimizer({len(params)} parameters{rate})"
