"""Client optimizers: param groups that torch's schedulers write to, and ours that they become.

A client optimizer is `torch.optim`'s or DeepSpeed's own. It holds param groups and takes no step:
its numbers make one of `fzero.optim`, and its learning rates are copied into that one's state
before each update. Those are the numbers that a scheduler changes; a change of another number is
refused, as it would be lost.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fzero import optim
from fzero.compat.deepspeed.refused import OPTIMIZERS, refuse
from fzero.compat.deepspeed.settings import Section, number_of
from fzero.engine.own_part import part_of
from fzero.errors import CheckpointError, ConfigError, FzeroError
from fzero.tree import PyTree


class _Groups(torch.optim.Optimizer):
    """Param groups alone; the engine steps."""

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Refused: call `engine.step()`."""
        raise FzeroError(
            f"{type(self).__name__}.step() was called. Pass the optimizer to "
            "deepspeed.initialize, and call engine.step()."
        )


class FusedAdam(_Groups):
    """DeepSpeed's: AdamW unless `adam_w_mode=False`; without decay unless asked."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        ways = {"amsgrad": amsgrad, "adam_w_mode": adam_w_mode, "bias_correction": bias_correction}
        super().__init__(params, {**numbers, **ways})


class DeepSpeedCPUAdam(FusedAdam):
    """DeepSpeed's; where the state lives is the configuration's `offload_optimizer`."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(
            model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad
        )


class FusedLion(_Groups):
    """DeepSpeed's Lion."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})


class DeepSpeedCPULion(FusedLion):
    """DeepSpeed's; where the state lives is the configuration's `offload_optimizer`."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr, betas, weight_decay)


class FusedLamb(_Groups):
    """DeepSpeed's LAMB, as it is without ZeRO: a trust ratio, which has bounds, of each parameter.

    Raises:
        ConfigError: `eps_inside_sqrt`, `amsgrad` or `max_grad_norm`, which have no counterpart.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        no = {"eps_inside_sqrt": eps_inside_sqrt, "amsgrad": amsgrad}
        for name, value in {**no, "max_grad_norm": max_grad_norm}.items():
            if value:
                raise ConfigError(
                    f"FusedLamb({name}={value!r}) has no counterpart. Leave it out; gradients are "
                    "clipped by 'gradient_clipping' of the configuration."
                )
        numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        bounds = {"max_coeff": max_coeff, "min_coeff": min_coeff}
        super().__init__(params, {**numbers, **bounds, "bias_correction": bias_correction})


class Rule(NamedTuple):
    """How a param group becomes one of `fzero.optim`.

    Args:
        keys: of the group, those that decide beside `lr`.
        make: from the learning rate and the group.
        cycled: from the learning rate, the momentum and the group, where a scheduler may change
            both: SGD's momentum, the first of the betas otherwise.
    """

    keys: tuple[str, ...]
    make: Callable[[Any, Mapping[str, Any]], optim.Optimizer]
    cycled: Callable[[Any, Any, Mapping[str, Any]], optim.Optimizer] | None = None


def _adam(lr: Any, group: Mapping[str, Any]) -> optim.Optimizer:
    if not group.get("bias_correction", True):  # which Adam's kernels have
        return _chained(lr, _betas(group)[0], group)
    return (_adamw if _decouples(group) else _l2)(lr, group)


def _decouples(group: Mapping[str, Any]) -> bool:
    # torch's Adam and AdamW have decoupled_weight_decay, DeepSpeed's adam_w_mode
    return group.get("adam_w_mode", group.get("decoupled_weight_decay", False))


def _betas(group: Mapping[str, Any]) -> list[float]:
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ConfigError(f"betas = {betas!r}: must be two numbers.")
    return [number_of(f"betas[{i}]", beta) for i, beta in enumerate(betas)]


def _adamw(lr: Any, group: Mapping[str, Any]) -> optim.Optimizer:
    b1, b2 = _betas(group)
    decay, amsgrad = group["weight_decay"], group["amsgrad"]
    return optim.adamw(lr, b1, b2, group["eps"], weight_decay=decay, amsgrad=amsgrad)


def _l2(lr: Any, group: Mapping[str, Any]) -> optim.Optimizer:
    b1, b2 = _betas(group)
    decay, amsgrad = group["weight_decay"], group["amsgrad"]
    return optim.adam(lr, b1, b2, group["eps"], weight_decay=decay, amsgrad=amsgrad)


def _chained(lr: Any, b1: Any, group: Mapping[str, Any]) -> optim.Optimizer:
    """Adam or AdamW whose first beta may change from step to step, corrected or not."""
    b2, decay = _betas(group)[1], group["weight_decay"]
    correction = group.get("bias_correction", True)
    adam = optim.scale_by_adam(b1, b2, group["eps"], group["amsgrad"], correction)
    parts = [adam, optim.add_decayed_weights(decay)]
    parts = parts if _decouples(group) else parts[::-1]
    return optim.chain(*parts, optim.scale_by_learning_rate(lr))


def _sgd(lr: Any, group: Mapping[str, Any]) -> optim.Optimizer:
    return _sgd_cycled(lr, group["momentum"], group)


def _sgd_cycled(lr: Any, momentum: Any, group: Mapping[str, Any]) -> optim.Optimizer:
    nesterov, decay = group["nesterov"], group["weight_decay"]
    return optim.sgd(lr, momentum, nesterov, decay, group["dampening"])


def _lion(lr: Any, group: Mapping[str, Any]) -> optim.Optimizer:
    return _lion_cycled(lr, _betas(group)[0], group)


def _lion_cycled(lr: Any, b1: Any, group: Mapping[str, Any]) -> optim.Optimizer:
    return optim.lion(lr, b1, _betas(group)[1], group["weight_decay"])


def _lamb(lr: Any, group: Mapping[str, Any]) -> optim.Optimizer:
    """DeepSpeed's kernel: what its moments lack at the first steps is made up for by the rate.

    The paper's, and `optim.lamb`, correct the moments, before their norm is taken.
    """
    b1, b2 = _betas(group)

    def correction(step: Tensor) -> Tensor:
        done = step.double() + 1
        return (1 - b2**done).sqrt() / (1 - b1**done)

    steps = [optim.scale_by_learning_rate(lr)]
    if group["bias_correction"]:
        # one more step downhill would be one uphill; and it is no rate that anybody has set
        factor = optim.scale_by_learning_rate(correction)._replace(rates=lambda state: ())
        steps += [factor, optim.scale(-1.0)]
    return optim.chain(
        optim.scale_by_adam(b1, b2, group["eps"], bias_correction=False),
        optim.add_decayed_weights(group["weight_decay"]),
        optim.scale_by_trust_ratio(group["min_coeff"], group["max_coeff"]),
        *steps,
    )


_ADAM = ("betas", "eps", "weight_decay", "amsgrad")
_SGD = ("momentum", "nesterov", "weight_decay", "dampening")
_RULES: dict[type, Rule] = {
    torch.optim.AdamW: Rule(_ADAM, _adamw, _chained),
    torch.optim.Adam: Rule((*_ADAM, "decoupled_weight_decay"), _adam, _chained),
    torch.optim.SGD: Rule(_SGD, _sgd, _sgd_cycled),
    FusedAdam: Rule((*_ADAM, "adam_w_mode", "bias_correction"), _adam, _chained),
    DeepSpeedCPUAdam: Rule((*_ADAM, "adam_w_mode", "bias_correction"), _adam, _chained),
    FusedLion: Rule(("betas", "weight_decay"), _lion, _lion_cycled),
    DeepSpeedCPULion: Rule(("betas", "weight_decay"), _lion, _lion_cycled),
    FusedLamb: Rule(
        ("betas", "eps", "weight_decay", "max_coeff", "min_coeff", "bias_correction"), _lamb
    ),
}


def rule_of(client: torch.optim.Optimizer) -> Rule:
    """How the groups of `client` become ours.

    Raises:
        ConfigError: it is another optimizer, or asks for what ours has not.
    """
    rule = _RULES.get(type(client))  # not a subclass: its step may be another
    name = type(client).__name__
    if name in OPTIMIZERS:
        refuse(f"ops: {name}", OPTIMIZERS[name])
    if rule is None:
        raise ConfigError(
            f"initialize(optimizer={name}): an optimizer's step is not run on shards. Pass one of "
            f"{', '.join(sorted(known.__name__ for known in _RULES))}; or one of fzero.optim, or "
            "any object with its init and update."
        )
    for group in client.param_groups:
        for key in ("maximize", "differentiable"):
            if group.get(key):
                raise ConfigError(f"initialize(optimizer={name}): {key}=True has no counterpart.")
    return rule


def client_of(section: Section, groups: Sequence[Any]) -> torch.optim.Optimizer:
    """The optimizer of a configuration's section.

    Args:
        section: the configuration's.
        groups: parameters, or dicts with "params".

    Raises:
        ConfigError: there is no such optimizer, or it does not take these arguments.
    """
    params = dict(section.params)
    name = section.type
    if "max_grad_norm" in params:
        raise ConfigError(
            "optimizer.params.max_grad_norm: DeepSpeed takes it as 'gradient_clipping'. Move it."
        )
    params.pop("fp32_optimizer_states", None)
    kind: Any = _BY_NAME.get(name.lower())
    if name.lower() in ("adam", "adamw"):
        decoupled = params.pop("adam_w_mode", True) or name.lower() == "adamw"
        if params.pop("torch_adam", False):
            kind = torch.optim.AdamW if decoupled else torch.optim.Adam
        else:
            kind, params["adam_w_mode"] = FusedAdam, decoupled
    for known in OPTIMIZERS:
        if known.lower() == name.lower():
            refuse(f"optimizer type {name}", OPTIMIZERS[known])
    kind = kind or getattr(torch.optim, name, None)
    if kind is None:
        raise ConfigError(
            f"optimizer.type = {name!r}: must be Adam, AdamW, Lion, Lamb, or one of torch.optim."
        )
    try:
        return kind(groups, **params)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer.params of {name}: {error}.") from error


_BY_NAME: dict[str, type] = {"lion": FusedLion, "lamb": FusedLamb, "sgd": torch.optim.SGD}


class ClientGroups:
    """The groups of a client optimizer, and the one of `fzero.optim` that they make.

    Args:
        client: holds the groups.
        names: of the parameters, by id, as they were when the groups were made.
        cycles: whether a scheduler changes the momentum, too.

    Attributes:
        transform: for the Engine; the rate of each group is in its state.
        owners: which parameters are in a group, by name.
    """

    def __init__(
        self, client: torch.optim.Optimizer, names: Mapping[int, str], *, cycles: bool = False
    ) -> None:
        self.client, self.rule = client, rule_of(client)
        self.cycled = self.rule.cycled if cycles else None
        self.fixed = [self._numbers(group) for group in client.param_groups]
        self.owners: dict[str, str] = {}
        for label, group in self._labelled():
            for param in group["params"]:
                if id(param) not in names:
                    raise ConfigError(
                        f"initialize(optimizer=...): a parameter of shape {tuple(param.shape)} in "
                        "its groups is none of the model's. Make it of model.parameters()."
                    )
                self.owners[names[id(param)]] = label
        self.transform = self._transform()
        self.set: dict[str, float] = {label: _rate(label, g) for label, g in self._labelled()}
        self._set_momenta = self._momenta()

    def _labelled(self) -> Iterable[tuple[str, dict[str, Any]]]:
        return ((str(i), group) for i, group in enumerate(self.client.param_groups))

    def _numbers(self, group: Mapping[str, Any]) -> dict[str, Any]:
        numbers: dict[str, Any] = {key: group.get(key) for key in self.rule.keys}
        if self.cycled is not None:  # what is left is settled
            numbers.pop("momentum", None)
            numbers |= {"betas": numbers["betas"][1:]} if "betas" in numbers else {}
        return numbers

    def _transform(self) -> optim.Optimizer:
        def factory(label: str, group: Mapping[str, Any]) -> optim.Optimizer:
            lr = _rate(label, group)
            numbers = {
                k: v for k, v in group.items() if k != "params"
            }  # of now: later changes are told by `rates`
            make = self.rule.make
            if (cycled := self.cycled) is not None:
                both = optim.inject_hyperparams(lambda lr, b1: cycled(lr, b1, numbers))
                return both(lr=lr, b1=momentum_of(group))
            # the rate alone: a decay that is a tensor costs Adam its fused kernel
            return optim.inject_hyperparams(lambda lr: make(lr, numbers))(lr=lr)

        owners = self.owners
        return optim.multi_transform(
            {label: factory(label, group) for label, group in self._labelled()},
            lambda params: {name: owners.get(name, "0") for name in params},
        )

    def rates(self) -> dict[str, float]:
        """The rates that have changed since the last call, by label.

        Raises:
            ConfigError: another number of a group has changed, or a rate is no number.
        """
        changed: dict[str, float] = {}
        if len(self.client.param_groups) != len(self.fixed):
            raise ConfigError(
                "a param group was added after deepspeed.initialize; what is trained is settled "
                "then. Give all groups to the optimizer before."
            )
        for (label, group), fixed in zip(self._labelled(), self.fixed, strict=True):
            for key, now in self._numbers(group).items():
                if now != fixed[key]:
                    raise ConfigError(
                        f"param_groups[{label}][{key!r}] was changed from {fixed[key]!r} to "
                        f"{now!r} after deepspeed.initialize. Learning rates may change, and "
                        "momentum by a scheduler with cycle_momentum=True that initialize knows; "
                        "other numbers are settled when the engine is made."
                    )
            lr = _rate(label, group)
            if lr != self.set[label]:
                self.set[label] = changed[label] = lr
        return changed

    def write_momenta(self, inner: PyTree) -> None:
        """Write the momenta that a scheduler has changed into the optimizer's state."""
        now = self._momenta()
        if now != self._set_momenta:
            for label, b1 in now.items():
                inner.inner[label].hyperparams["b1"].fill_(b1)
            self._set_momenta = now

    def forget(self) -> None:
        """What was set is no longer there: the next step writes all rates and momenta."""
        self.set = dict.fromkeys(self.set, math.nan)
        self._set_momenta = {}

    def _momenta(self) -> dict[str, float]:
        groups = self._labelled() if self.cycled is not None else ()
        return {label: momentum_of(group) for label, group in groups}


def momentum_of(group: Mapping[str, Any]) -> float:
    """What a scheduler cycles against the rate."""
    return _betas(group)[0] if "betas" in group else number_of("momentum", group["momentum"])


def _rate(label: str, group: Mapping[str, Any]) -> float:
    return number_of(f"param_groups[{label}]['lr']", group["lr"])


class LossScaler:
    """The loss scale of now, and its rule, under the names of DeepSpeed's scalers.

    Scripts hold one and read it later, so it keeps no values of its own.

    Args:
        engine: a `DeepSpeedEngine`.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    @property
    def cur_scale(self) -> float:
        """The loss scale; 1 without one."""
        return self._engine.loss_scale()

    loss_scale = cur_scale

    @property
    def dynamic(self) -> bool:
        """Whether it changes."""
        return self._engine.dynamic_loss_scale()

    dynamic_loss_scale = dynamic

    @property
    def cur_iter(self) -> int:
        """Updates so far, skipped ones included."""
        return self._engine.global_steps

    @property
    def cur_hysteresis(self) -> int:
        """The scale backs off at an overflow when this is 1."""
        state = self._engine.inner.state[1].loss_scale
        return 1 if state is None else int(state.hysteresis)

    def __getattr__(self, name: str) -> Any:
        scaling = None if name not in _RULE else self._engine.settings.config.scaling
        if scaling is None:
            raise AttributeError(f"there is no loss scale, or it has no {name!r}.")
        return getattr(scaling, _RULE[name])


# DeepSpeed's names, of its scalers with and without ZeRO, and those of `fzero.LossScale`
_RULE = {
    "scale_window": "window",
    "scale_factor": "growth",
    "min_scale": "minimum",
    "min_loss_scale": "minimum",
    "delayed_shift": "hysteresis",
}


class DeepSpeedOptimizer(torch.optim.Optimizer):
    """What `initialize` returns as the optimizer: the client's groups, and the engine's step.

    Args:
        groups: of the client.
        engine: takes the step; a `DeepSpeedEngine`.
    """

    def __init__(self, groups: ClientGroups, engine: Any) -> None:
        # not the base's __init__: groups, and who holds them, are the client's
        self.groups, self.optimizer = groups, groups.client
        self._engine = engine
        self.defaults = groups.client.defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore
        """The client's."""
        return self.optimizer.param_groups

    @property
    def state(self) -> dict[Any, Any]:  # pyright: ignore
        """Empty: the state is sharded; see `deepspeed.utils.safe_get_full_optimizer_state`."""
        return {}

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped."""
        return not self._engine.was_step_applied()

    @property
    def cur_scale(self) -> float:
        """The loss scale; 1 without one."""
        return self._engine.loss_scale()

    loss_scale = cur_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale changes."""
        return self._engine.dynamic_loss_scale()

    @property
    def loss_scaler(self) -> LossScaler:
        """What tells the loss scale, now and later; `loss_scale_config` is its other name."""
        return LossScaler(self._engine)

    loss_scale_config = loss_scaler

    def needs_scaler(self) -> bool:
        """Whether a backward of your own needs `engine.scale(loss)`."""
        return self._engine.settings.config.scaling is not None

    def step(self, closure: Any = None) -> None:  # pyright: ignore
        """`engine.step()`."""
        self._engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """`engine.zero_grad()`."""
        self._engine.zero_grad()

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """`engine.backward(loss)`."""
        self._engine.backward(loss, retain_graph=retain_graph)

    def state_dict(self) -> dict[str, Any]:
        """The groups' numbers, and this rank's part of the state, by path; not the parameters."""
        numbers = [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]
        return {**part_of(self._engine.inner.state[1]), "param_groups": numbers}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `state_dict` gave on this rank, of an optimizer that is sharded alike.

        Raises:
            CheckpointError: it is another one's, or another rank's; nothing has changed.
            RankMismatchError: ranks load the states of different steps.
        """
        groups, own = state_dict["param_groups"], len(self.param_groups)
        if len(groups) != own:
            raise CheckpointError(
                f"optimizer.load_state_dict: there are {len(groups)} param groups, and {own} here. "
                f"{_FOR_ANY}"
            )
        self._engine.inner.optimizer.load_part(state_dict, _FOR_ANY)
        for group, theirs in zip(self.param_groups, groups, strict=True):
            group.update({k: v for k, v in theirs.items() if k != "params"})
        self.groups.forget()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused."""
        raise ConfigError(
            "optimizer.add_param_group after deepspeed.initialize: what is trained is settled then."
        )

    def __repr__(self) -> str:
        return (
            f"DeepSpeedOptimizer({type(self.optimizer).__name__}, {len(self.param_groups)} groups)"
        )


_FOR_ANY = "engine.save_checkpoint is for any rank, stage and world."


def as_groups(model: nn.Module, given: Any) -> list[Any]:
    """What `model_parameters` names: parameters or dicts; all that are to be trained if None."""
    if given is None:
        return [p for p in model.parameters() if p.requires_grad]
    if isinstance(given, Tensor):
        return [given]
    return list(given)
