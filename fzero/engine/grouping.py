"""Which leaves travel together: decided once, from names and sizes, the same on every rank."""

import itertools
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from fzero.errors import ConfigError
from fzero.layout import LeafLayout

_BLOCK = re.compile(r"^(?:.*?\.)?\d+(?=\.)")
# A model of more blocks than this gathers several at once: it has the memory of one block in
# thirty-two to spare, and each collective costs its latency.
_MOST_UNITS = 32


def plan_units(
    leaves: Sequence[LeafLayout], order: Sequence[int], limit: int, together: Sequence[str] = ()
) -> tuple[list[list[int]], list[str]]:
    """Leaves that are gathered together, consecutive modules up to `limit` bytes.

    A numbered module (`layers.3`) is the natural unit: with at most 32 of them each is one; with
    more, consecutive ones share. What is larger than a unit may be is cut at its inner modules.

    Args:
        leaves: all of them.
        order: their places as the module registers them.
        limit: most bytes of full leaves in a unit.
        together: globs over module names; each module that one matches is a unit of its own.

    Returns:
        The units as lists of places, and the modules that the last ones of them are, from
        `together`.

    Raises:
        ConfigError: a glob matches no module that has parameters.

    Examples:
        >>> names = ["embed.w", "layers.0.a.w", "layers.0.b.w", "layers.1.a.w", "layers.1.b.w"]
        >>> leaves = [LeafLayout(name, (2, 2), __import__("torch").float32) for name in names]
        >>> plan_units(leaves, range(5), limit=64)
        ([[0], [1, 2], [3, 4]], [])
        >>> plan_units(leaves, range(5), 64, ["layers"])
        ([[0], [1, 2, 3, 4]], ['layers'])
    """
    owner = _owners(leaves, together)
    free = [place for place in order if place not in owner]
    blocks = _runs(free, lambda place: _block_of(leaves[place].name))
    sizes = [sum(leaves[i].nbytes for i in block) for block in blocks]
    numbered = [
        size
        for block, size in zip(blocks, sizes, strict=True)
        if _BLOCK.match(leaves[block[0]].name)
    ]
    wanted = max(max(numbered or sizes or [0]), sum(sizes) // _MOST_UNITS)
    limit = min(limit, wanted)
    parts: list[list[int]] = []
    for block, size in zip(blocks, sizes, strict=True):
        parts += [block] if size <= limit else _runs(block, lambda i: _module_of(leaves[i].name))
    units: list[list[int]] = []
    filled = 0
    for part in parts:
        size = sum(leaves[i].nbytes for i in part)
        if not units or filled + size > limit:
            units.append([])
            filled = 0
        units[-1] += part
        filled += size
    special: dict[str, list[int]] = {}
    for place in order:
        if place in owner:
            special.setdefault(owner[place], []).append(place)
    return [*units, *special.values()], list(special)


def _owners(leaves: Sequence[LeafLayout], together: Sequence[str]) -> dict[int, str]:
    """For the leaves of modules that a glob matches, the outermost such module."""
    owner: dict[int, str] = {}
    unused = dict.fromkeys(together)
    for place, leaf in enumerate(leaves):
        parts = leaf.name.split(".")
        for depth in range(len(parts)):
            module = ".".join(parts[:depth])
            glob = next((glob for glob in together if fnmatchcase(module, glob)), None)
            if glob is not None:
                owner.setdefault(place, module)
                unused.pop(glob, None)
    if unused:
        modules = sorted({_module_of(leaf.name) for leaf in leaves} - {""})
        raise ConfigError(
            f"Config.gather_together={next(iter(unused))!r} matches no module that has parameters; "
            f"it must be a glob over module names, such as {', '.join(map(repr, modules[:3]))}."
        )
    return owner


def _block_of(name: str) -> str:
    match = _BLOCK.match(name)
    return match.group() if match else _module_of(name)


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


def _runs(places: Sequence[int], key: Callable[[int], str]) -> list[list[int]]:
    return [list(run) for _, run in itertools.groupby(places, key)]
