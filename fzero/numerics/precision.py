"""Which dtype computes, travels, is reduced, and is kept.

[Note: dtypes] A leaf is *kept* as a master (what the optimizer updates), *cast* to the param dtype
on the shard, so that the gather moves the narrow dtype, *computed* with in that dtype, and its
gradient is *reduced* over ranks in the reduce dtype. Leaves that are not floating are never cast.

[Note: autocast] Under autocast parameters are kept and computed with in float32 as far as this
library goes, and each operator of the model function chooses for itself. Only the parameters of the
modules that cast theirs in any case travel in the low dtype.
"""

import importlib
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from fzero.errors import ConfigError, fields_by_name

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LOW = (torch.bfloat16, torch.float16)


@fields_by_name
@dataclass(frozen=True)
class Precision:
    """The dtypes of a step. None leaves a dtype as it comes.

    Args:
        param: compute and gather dtype; the cast happens on the shard. Norms that keep statistics
            have weights as precise as these.
        reduce: dtype in which gradients are reduced over ranks (None: as computed).
        master: dtype of what the optimizer updates, at least as precise as `param` (None: the
            parameters themselves, in `param`). bfloat16 goes with a bfloat16 `param`, float16 with
            a float16 one.
        output: dtype of floating outputs of the model: of what the model function returns, and of
            what `fzero.functionalize`'s `apply` returns to it.
        autocast: bfloat16 or float16: parameters stay float32 and ops run as `torch.autocast`
            decides. Excludes a low `param`.
        lower_precision_safe_modules: with `autocast`, the module classes, or their dotted names,
            whose parameters are gathered (at stage 3) and reduced in the autocast dtype; exact
            classes, not subclasses. None: Linear and Conv1d to Conv3d. LeafDtypes as classes.
        optimizer: dtype of the optimizer's state, float32 or bfloat16; the latter needs bfloat16
            masters. None: float32 beside masters of 16 bits, else as the optimizer makes it.
        stochastic_rounding: round updated bfloat16 masters up or down with probabilities that make
            the mean exact, instead of to nearest; see `fzero.numerics.rounding`.

    Raises:
        ConfigError: a dtype outside float64, float32, bfloat16, float16, or a combination that
            would lose what one of the fields asks for. Both fields are named.

    Examples:
        >>> Precision(param=torch.bfloat16, reduce=torch.float32, master=torch.float32).kept
        torch.float32
        >>> Precision(param=torch.float32, master=torch.bfloat16)
        Traceback (most recent call last):
        ...
        fzero.errors.ConfigError: Precision.master=torch.bfloat16 cannot hold ...
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    master: torch.dtype | None = None
    output: torch.dtype | None = None
    autocast: torch.dtype | None = None
    lower_precision_safe_modules: tuple[type[nn.Module] | str, ...] | None = None
    optimizer: torch.dtype | None = None
    stochastic_rounding: bool = False

    def __post_init__(self) -> None:
        for field in ("param", "reduce", "master", "output"):
            _check_dtype(field, getattr(self, field), _FLOATS)
        _check_dtype("autocast", self.autocast, LOW)
        _check_dtype("optimizer", self.optimizer, (torch.float32, torch.bfloat16))
        if not isinstance(self.stochastic_rounding, bool):
            raise ConfigError(
                f"Precision.stochastic_rounding={self.stochastic_rounding!r}: must be True or "
                "False."
            )
        if self.lower_precision_safe_modules is not None:
            modules = _check_modules(self.lower_precision_safe_modules)
            # It is frozen; names are looked up once, here.
            object.__setattr__(self, "lower_precision_safe_modules", modules)
        self._check_master()
        self._check_autocast()

    def _check_master(self) -> None:
        if self.param and self.master and not holds(self.master, self.param):
            raise _clash(
                f"master={self.master} cannot hold what Precision.param={self.param} computes with",
                f"a master is at least as precise as param; use master={wider(self.param)}",
            )
        if {self.param, self.reduce} >= set(LOW):
            raise _clash(
                f"reduce={self.reduce} cannot hold gradients of Precision.param={self.param}",
                "bfloat16 and float16 lose range or digits into each other; use "
                f"reduce=torch.float32 or reduce={self.param}",
            )
        found = f"Precision.master={self.master}"
        if self.master is None and self.param is not None:
            found = f"Precision.param={self.param} (Precision.master=None: they are the masters)"
        if self.optimizer == torch.bfloat16 and self.kept != torch.bfloat16:
            raise _clash(
                f"optimizer={self.optimizer} needs bfloat16 masters, and there is {found}",
                "a state is at least as precise as what it updates; use "
                "optimizer=torch.float32, or param and master=torch.bfloat16",
            )
        if self.optimizer is not None and self.kept == torch.float64:
            raise _clash(
                f"optimizer={self.optimizer} cannot follow {found}",
                "a state is at least as precise as what it updates; leave optimizer out",
            )
        if self.stochastic_rounding and self.kept != torch.bfloat16:
            raise _clash(
                f"stochastic_rounding=True needs bfloat16 masters, and there is {found}",
                "others are updated without loss, or have no room for it; use param and "
                "master=torch.bfloat16, or leave stochastic_rounding out",
            )

    def _check_autocast(self) -> None:
        if self.autocast is not None:
            for field in ("param", "reduce", "master"):
                dtype = getattr(self, field)
                if dtype not in (None, torch.float32):
                    raise _clash(
                        f"autocast={self.autocast} excludes Precision.{field}={dtype}",
                        "under autocast parameters, masters and reductions stay float32 (safe "
                        f"modules apart); leave {field} out, or autocast",
                    )
        elif self.lower_precision_safe_modules is not None:
            raise _clash(
                "lower_precision_safe_modules is given, but Precision.autocast is None",
                "the list says what autocast may gather in its low dtype; set autocast too",
            )

    @property
    def kept(self) -> torch.dtype | None:
        """dtype of what the optimizer updates; None: as the parameters come."""
        return self.master or self.param

    @property
    def state(self) -> torch.dtype | None:
        """dtype of the optimizer's state; None: as the optimizer makes it."""
        return self.optimizer or (torch.float32 if self.kept in LOW else None)

    @property
    def needs_loss_scale(self) -> bool:
        """Whether gradients are computed in float16, whose small values vanish unscaled."""
        return torch.float16 in (self.param, self.autocast)

    @property
    def safe_modules(self) -> frozenset[str]:
        """`lower_precision_safe_modules`, or their default, as `class_name` spells them."""
        given = self.lower_precision_safe_modules
        classes = _SAFE if given is None else given
        return frozenset(class_name(c) for c in classes if isinstance(c, type))


_SAFE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def resolve(precision: "Precision | str | None") -> Precision:
    """What a user may write for a precision, as a `Precision`.

    Args:
        precision: None (every dtype as it comes), "bf16", "fp16", or a `Precision`.

    Returns:
        The `Precision`; both presets reduce in float32 and keep float32 masters.

    Raises:
        ConfigError: anything else.

    Examples:
        >>> resolve("bf16").param, resolve("bf16").master
        (torch.bfloat16, torch.float32)
        >>> resolve(None) == Precision()
        True
    """
    if precision is None:
        return Precision()
    if isinstance(precision, Precision):
        return precision
    presets = {"bf16": torch.bfloat16, "fp16": torch.float16}
    if isinstance(precision, str) and precision in presets:
        return Precision(presets[precision], reduce=torch.float32, master=torch.float32)
    hint = ""
    if isinstance(precision, str):
        spelled = precision.lower().replace("float", "fp").replace("bfp", "bf")
        near = get_close_matches(spelled, presets, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
    elif isinstance(precision, torch.dtype):
        hint = f" Did you mean Precision(param={precision})?"
    raise ConfigError(
        f"precision={precision!r}: must be None, 'bf16', 'fp16' or Precision(...).{hint}"
    )


# ------------------------------------------------------------------------------- helpers
def class_name(cls: type) -> str:
    """Where a class is defined, as one dotted name."""
    return f"{cls.__module__}.{cls.__qualname__}"


def is_floating(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def holds(high: torch.dtype, low: torch.dtype) -> bool:
    return torch.promote_types(high, low) == high


def wider(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check_dtype(field: str, value: Any, allowed: tuple[torch.dtype, ...]) -> None:
    if value is None or value in allowed:
        return
    names = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}
    hint = ""
    if isinstance(value, str):
        name = value.removeprefix("torch.")
        known = [str(dtype).removeprefix("torch.") for dtype in allowed]
        near = get_close_matches(names.get(name, name), known, n=1)
        hint = f" Did you mean torch.{near[0]}?" if near else ""
    raise ConfigError(
        f"Precision.{field}={value!r}: must be None or one of {', '.join(map(str, allowed))}.{hint}"
    )


def _check_modules(value: Any) -> tuple[type[nn.Module], ...]:
    return tuple(map(_module_class, value if isinstance(value, tuple | list) else (value,)))


def _module_class(given: Any) -> type[nn.Module]:
    found = _find(given) if isinstance(given, str) else given
    if isinstance(found, type) and issubclass(found, nn.Module):
        return found
    known = [f"torch.nn.{name}" for name in dir(nn) if isinstance(getattr(nn, name), type)]
    near = get_close_matches(given, known, n=1) if isinstance(given, str) else []
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"Precision.lower_precision_safe_modules: {given!r} is neither a module class nor the "
        "dotted name of one that can be imported. Write torch.nn.Linear or 'torch.nn.Linear'; a "
        f"class made inside a function has no such name, so pass the class.{hint}"
    )


def _find(name: str) -> Any:
    """What a dotted name stands for, or None."""
    parts = name.split(".")
    # The longest module first. What is left are attributes: of a nested class, several.
    for length in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except (ImportError, ValueError):
            continue
        for part in parts[length:]:
            found = getattr(found, part, None)
        return found
    return None


def _clash(found: str, rule: str) -> ConfigError:
    return ConfigError(f"Precision.{found}: {rule}.")
