"""Which dtype computes, travels, is reduced, and is kept.

[Note: dtypes] A leaf is *kept* as a master (what the optimizer updates), *cast* to the param dtype
on the shard, so that the gather moves the narrow dtype, *computed* with in that dtype, and its
gradient is *reduced* over ranks in the reduce dtype. Leaves that are not floating are never cast.
"""

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from fzero import tree
from fzero.errors import ConfigError
from fzero.tree import PyTree

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_LOW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Precision:
    """The dtypes of a step. None leaves a dtype as it comes.

    Args:
        param: compute and gather dtype; the cast happens on the shard.
        reduce: dtype in which gradients are reduced over ranks (None: as computed).
        master: dtype of the copy that the optimizer updates, at least as precise as `param`
            (None: the optimizer updates the parameters themselves).
        output: dtype of floating outputs of the model.
        autocast: bfloat16 or float16: parameters stay float32 and ops run as `torch.autocast`
            decides. Excludes a low `param`.
        lower_precision_safe_modules: with `autocast`, the module classes, or their dotted names,
            whose parameters are gathered and reduced in the autocast dtype. None: Linear and
            Conv1d to Conv3d.

    Raises:
        ConfigError: a dtype outside float64, float32, bfloat16, float16, or a combination that
            would lose what one of the fields asks for. Both fields are named.

    Examples:
        >>> Precision(param=torch.bfloat16, reduce=torch.float32, master=torch.float32).keeps_master
        True
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
    lower_precision_safe_modules: tuple[type | str, ...] | None = None

    def __post_init__(self) -> None:
        for field in ("param", "reduce", "master", "output"):
            _check_dtype(field, getattr(self, field), _FLOATS)
        _check_dtype("autocast", self.autocast, _LOW)
        if self.lower_precision_safe_modules is not None:
            modules = _check_modules(self.lower_precision_safe_modules)
            object.__setattr__(self, "lower_precision_safe_modules", modules)
        self._check_combinations()

    def _check_combinations(self) -> None:
        if (
            self.param
            and self.master
            and torch.promote_types(self.param, self.master) != (self.master)
        ):
            raise _clash(
                f"master={self.master} cannot hold what Precision.param={self.param} computes with",
                f"a master is at least as precise as param; use master={_wider(self.param)}",
            )
        low = {self.param, self.reduce} & set(_LOW)
        if len(low) == 2:
            raise _clash(
                f"reduce={self.reduce} cannot hold gradients of Precision.param={self.param}",
                "bfloat16 and float16 lose range or digits into each other; use "
                f"reduce=torch.float32 or reduce={self.param}",
            )
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
    def keeps_master(self) -> bool:
        """Whether masters are a copy of their own beside the parameters."""
        return self.master is not None and self.master != self.param

    @property
    def needs_loss_scale(self) -> bool:
        """Whether gradients are computed in float16, whose small values vanish unscaled."""
        return torch.float16 in (self.param, self.autocast)


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


def cast(params: PyTree, dtype: torch.dtype | None) -> PyTree:
    """Every floating leaf in `dtype`; other leaves, and all leaves if it is None, as they are.

    Differentiable: the gradient comes back in each leaf's own dtype.

    Args:
        params: a pytree of tensors of any shapes.
        dtype: the floating dtype, or None.

    Returns:
        The same tree; a leaf that has the dtype already is not copied.

    Examples:
        >>> out = cast({"w": torch.ones(2), "n": torch.tensor(3)}, torch.bfloat16)
        >>> out["w"].dtype, out["n"].dtype
        (torch.bfloat16, torch.int64)
    """
    if dtype is None:
        return params
    return tree.map(lambda leaf: leaf.to(dtype) if _is_floating(leaf) else leaf, params)


def masters(params: PyTree, precision: Precision) -> PyTree | None:
    """The copies that the optimizer updates, or None where the parameters themselves will do.

    Take them from the parameters as given, before any cast to `precision.param`.

    Args:
        params: a pytree of tensors of any shapes.
        precision: the dtypes.

    Returns:
        A tree of new tensors in the master dtype (leaves that are not floating as they are), or
        None if no leaf would differ from what is computed with.

    Raises:
        ConfigError: a leaf that the master dtype cannot hold, named by its path.

    Examples:
        >>> masters({"w": torch.ones(2)}, resolve("bf16"))["w"].dtype
        torch.float32
        >>> masters({"w": torch.ones(2)}, resolve(None)) is None
        True
    """
    master = precision.master
    if master is None:
        return None
    differs = False
    for path, leaf in zip(tree.paths(params), tree.leaves(params), strict=True):
        if not _is_floating(leaf):
            continue
        used = precision.param or leaf.dtype
        differs |= used != master
        if precision.param is None and torch.promote_types(used, master) != master:
            raise ConfigError(
                f"params{path} is {used}, which Precision.master={master} cannot hold: a master is "
                f"at least as precise as what is computed with. Use master={_wider(used)}."
            )
    if not differs:
        return None
    return tree.map(
        lambda leaf: leaf.detach().to(master, copy=True) if _is_floating(leaf) else leaf, params
    )


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _wider(dtype: torch.dtype) -> torch.dtype:
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


def _check_modules(value: Any) -> tuple[type | str, ...]:
    modules = tuple(value) if isinstance(value, tuple | list) else (value,)
    for module in modules:
        is_class = isinstance(module, type) and issubclass(module, torch.nn.Module)
        if not is_class and not (isinstance(module, str) and module):
            raise ConfigError(
                f"Precision.lower_precision_safe_modules: {module!r} is neither a module class nor "
                "a dotted name. Write torch.nn.Linear or 'torch.nn.Linear'."
            )
    return modules


def _clash(found: str, rule: str) -> ConfigError:
    return ConfigError(f"Precision.{found}: {rule}.")
