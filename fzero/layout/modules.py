"""What the dotted names of leaves tell of the modules around them."""

import itertools
import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from fzero.errors import ConfigError

_BLOCK = re.compile(r"^(?:.*?\.)??[0-9]+(?=\.)")


def module_of(name: str) -> str:
    """The module that holds a leaf.

    >>> module_of("layers.3.attn.w"), module_of("w")
    ('layers.3.attn', '')
    """
    return name.rpartition(".")[0]


def is_numbered(name: str) -> bool:
    """Whether a leaf is inside of a numbered module, one of a list.

    >>> is_numbered("layers.3.attn.w"), is_numbered("embed.w")
    (True, False)
    """
    return _BLOCK.match(name) is not None


def block_of(name: str) -> str:
    """The outermost numbered module around a leaf; where there is none, the one that holds it.

    >>> block_of("layers.3.attn.w"), block_of("embed.w")
    ('layers.3', 'embed')
    """
    match = _BLOCK.match(name)
    return match.group() if match else module_of(name)


def modules_around(name: str) -> list[str]:
    """All modules around a leaf, the outermost first: the one without a name.

    >>> modules_around("experts.0.w")
    ['', 'experts', 'experts.0']
    """
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts))]


def module_within(name: str, globs: Sequence[str]) -> str | None:
    """The outermost module around a leaf that one of these globs matches.

    >>> module_within("experts.0.up.w", ["experts.*"]), module_within("head.w", ["experts.*"])
    ('experts.0', None)
    """
    return next((x for x in modules_around(name) if any(fnmatchcase(x, g) for g in globs)), None)


def check_together(globs: Sequence[str], names: Sequence[str]) -> None:
    """See that every glob of `Config.gather_together` matches a module around some leaf.

    Args:
        names: dotted names of all leaves.

    Raises:
        ConfigError: a glob matches none.

    >>> check_together(["experts.*"], ["expert.0.w"])
    Traceback (most recent call last):
    ...
    fzero.errors.ConfigError: Config.gather_together='experts.*' matches no module ...
    """
    if not globs:
        return
    modules = sorted({module for name in names for module in modules_around(name)})
    # also of a module inside of another that is named
    unused = [glob for glob in globs if not any(fnmatchcase(x, glob) for x in modules)]
    if unused and names:
        named = [module for module in modules if module]
        shown = get_close_matches(unused[0], named, n=3) or named[:3]
        there = f", such as {', '.join(map(repr, shown))}" if shown else "; no leaf is in one"
        raise ConfigError(
            f"Config.gather_together={unused[0]!r} matches no module that has parameters; "
            f"it must be a glob over module names{there}."
        )


def natural_order(names: Sequence[str]) -> list[int]:
    """Indices by name, with numbers in it as numbers: a list's modules as they are used.

    >>> natural_order(["layers.10.w", "layers.2.w", "embed.w"])
    [2, 1, 0]
    """
    # text and digits take turns, so that like is compared with like
    parts = [re.split(r"([0-9]+)", name) for name in names]
    keys = [[int(x) if i % 2 else x for i, x in enumerate(split)] for split in parts]
    return sorted(range(len(names)), key=keys.__getitem__)


def runs(indices: Sequence[int], key: Callable[[int], object]) -> list[list[int]]:
    """Consecutive indices of which the key is the same.

    >>> runs([4, 6, 1, 2], lambda i: i % 2)
    [[4, 6], [1], [2]]
    """
    return [list(run) for _, run in itertools.groupby(indices, key)]
