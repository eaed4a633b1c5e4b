"""Rematerialisation by the names of modules: what `Config.remat` asks for.

[Note: globs of modules] A rule is a glob over the names of submodules and a policy of
`fzero.remat`. A module has the first rule whose glob matches it or a module around it. The
outermost module that has one is a region as `fzero.remat` makes it; inside, each value is kept or
not as the rule of the innermost module says that computes it. So regions never nest, and nothing is
computed a third time.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from fzero.errors import ConfigError
from fzero.functional.remat import RULED, Policy, is_recording, region, ruled, saves_of
from fzero.functional.slots import SlotTable

Rules = Sequence[tuple[str, Policy]]


@dataclass
class _Rules:
    """The rules of a recording, and the modules that they were held against."""

    rules: Rules
    seen: dict[str, None] = field(default_factory=dict)  # in order, as messages show them


_RULES: ContextVar[_Rules | None] = ContextVar("fzero_remat", default=None)
_IN_REGION: ContextVar[bool] = ContextVar("fzero_remat_inside", default=False)


@contextlib.contextmanager
def remat_modules(rules: Rules) -> Iterator[None]:
    """What is recorded meanwhile has the modules that these rules name as regions.

    Raises:
        ConfigError: at the end: a glob matches no module of those that were called.
    """
    if not rules:
        yield
        return
    mine = _Rules(rules)
    token = _RULES.set(mine)
    try:
        yield
    finally:
        _RULES.reset(token)
    for glob, _ in rules:
        if not any(fnmatchcase(name, glob) for name in mine.seen):
            raise matches_nothing("Config.remat", glob, list(mine.seen))


def wrap_remat(plan: SlotTable) -> None:
    """Make regions of the chosen modules of a functionalised one, until its slots are put back."""
    mine = _RULES.get()
    if mine is None or not is_recording():
        return
    for prefix, module in zip(plan.prefixes, plan.modules, strict=True):
        if not prefix:  # the whole: computing all of it again frees nothing
            continue
        mine.seen[prefix] = None
        policy = rule_of(prefix, mine.rules)
        if policy is not None:
            module.__dict__["forward"] = _Ruled(module.forward, policy)


def rule_of(name: str, rules: Rules) -> Policy | None:
    """The policy that a module of this name has; None if no rule is for it.

    Examples:
        >>> rules = [("blocks.*.attn", "everything"), ("blocks.*", "nothing")]
        >>> [rule_of(name, rules) for name in ("blocks.0", "blocks.0.attn.q", "head")]
        ['nothing', 'everything', None]
    """
    around = list(itertools.accumulate(name.split("."), lambda a, b: f"{a}.{b}"))
    for glob, policy in rules:
        if any(fnmatchcase(one, glob) for one in around):
            return policy
    return None


class _Ruled:
    """The `forward` of a module that has a rule."""

    def __init__(self, forward: Callable[..., Any], policy: Policy) -> None:
        self.forward, self.saves = forward, saves_of(policy)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not is_recording():
            return self.forward(*args, **kwargs)
        if _IN_REGION.get():
            with ruled(self.saves):
                return self.forward(*args, **kwargs)
        token = _IN_REGION.set(True)
        try:
            with region(RULED), ruled(self.saves):
                return self.forward(*args, **kwargs)
        finally:
            _IN_REGION.reset(token)


def matches_nothing(where: str, glob: str, names: list[str]) -> ConfigError:
    """What to raise of a glob that matches none of the modules of these names, which were there.

    Args:
        where: the field that has the glob.
    """
    names = [name for name in names if name]
    near = get_close_matches(glob, names, n=3) or names[:3]
    there = f"; there are {', '.join(map(repr, near))}" if near else ""
    return ConfigError(
        f"{where}: {glob!r} matches no module that a functionalised one has{there}. Globs are "
        "over the names inside of the module that was given to fzero.functionalize; `*` crosses "
        "dots."
    )
