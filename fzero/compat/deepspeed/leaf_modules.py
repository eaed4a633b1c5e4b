"""Modules that are gathered as one: for experts that only some ranks run.

They are marked before `initialize`, which names them to `Config(gather_together=...)`.
"""

import glob
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from torch import nn

from fzero.errors import ConfigError, users_line

_MARK = "fzero_gathered_as_one"


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark all modules of these classes, given as classes or by name.

    Raises:
        ConfigError: there is none.

    Examples:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> set_z3_leaf_modules(model, [nn.Linear])
        [Linear(in_features=2, out_features=2, bias=True)]
        >>> leaf_names(model)
        ['0']
    """
    classes = tuple(kind for kind in leaf_module_classes if isinstance(kind, type))
    names = {name for name in leaf_module_classes if isinstance(name, str)}

    def is_one(module: nn.Module) -> bool:
        kind = type(module)
        full = f"{kind.__module__}.{kind.__qualname__}"
        return isinstance(module, classes) or bool(names & {kind.__name__, full})

    found = [module for module in model.modules() if is_one(module)]
    return _mark(found, True, raise_if_not_found, leaf_module_classes)


def set_z3_leaf_modules_by_name(
    model: nn.Module,
    module_names: Sequence[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules of these names, or take their marks away.

    Returns:
        The modules, and the names that there are not.

    Raises:
        ConfigError: a name that there is not.

    Examples:
        >>> model = nn.Sequential(nn.Linear(2, 2))
        >>> set_z3_leaf_modules_by_name(model, ["0", "1"], raise_if_not_found=False)
        ([Linear(in_features=2, out_features=2, bias=True)], ['1'])
    """
    return _by(model, module_names, str.__eq__, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module,
    module_name_suffixes: Sequence[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """The same, of modules whose names end so."""
    return _by(model, module_name_suffixes, str.endswith, flag, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take the marks of these classes away."""
    classes = tuple(leaf_module_classes)
    found = [module for module in model.modules() if isinstance(module, classes)]
    return _mark(found, False, raise_if_not_found, leaf_module_classes)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module, or take its mark away."""
    setattr(model, _MARK, flag)


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether a module is marked."""
    return getattr(model, _MARK, False)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """All that are marked."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def leaf_names(model: nn.Module) -> list[str]:
    """Globs of all that are marked and have parameters: names, and "*" for the model itself."""
    return [
        glob.escape(name) or "*"
        for name, module in model.named_modules()
        if z3_leaf_module(module) and any(True for _ in module.parameters())
    ]


def mark_configured(model: nn.Module, asked: Mapping[str, Sequence[str]]) -> None:
    """Mark what `zero_optimization.leaf_module` names, and DeepSpeed's own classes without it.

    Args:
        model: in which they are.
        asked: `classes`, `names`, `name_suffixes`, those that there are; the rest is warned of.
    """
    for name in asked.get("classes", ()):
        if not set_z3_leaf_modules(model, [name], raise_if_not_found=False):
            _warn("classes", [name])
    if "classes" not in asked:
        set_z3_leaf_modules(model, _CLASSES, raise_if_not_found=False)
    for key, by in (
        ("names", set_z3_leaf_modules_by_name),
        ("name_suffixes", set_z3_leaf_modules_by_suffix),
    ):
        if missing := by(model, asked.get(key, ()), raise_if_not_found=False)[1]:
            _warn(key, missing)


# What DeepSpeed marks where nothing is said: experts that only some ranks run.
_CLASSES = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)


def _warn(key: str, missing: Sequence[str]) -> None:
    warnings.warn(
        f"zero_optimization.leaf_module.{key}: the model has no {', '.join(missing)}. Nothing is "
        "gathered as one for it; see model.named_modules().",
        stacklevel=users_line(),
    )


def _by(
    model: nn.Module,
    asked: Sequence[str],
    fits: Callable[[str, str], bool],
    flag: bool,
    must: bool,
) -> tuple[list[nn.Module], list[str]]:
    """What is marked, each once, and what of `asked` fits no name."""
    found = {
        want: [module for name, module in model.named_modules() if fits(name, want)]
        for want in asked
    }
    missing = [want for want, modules in found.items() if not modules]
    if must and missing:
        _none(missing)
    once = {id(module): module for modules in found.values() for module in modules}
    return _mark(list(once.values()), flag, False, asked), missing


def _mark(found: list[nn.Module], flag: bool, must: bool, asked: Iterable[Any]) -> list[nn.Module]:
    if must and not found:
        _none(asked)
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _none(asked: Iterable[Any]) -> NoReturn:
    raise ConfigError(f"no module of the model is one of {list(asked)}; see model.named_modules().")
