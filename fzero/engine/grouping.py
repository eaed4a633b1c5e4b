"""Which leaves travel together: decided once, from names and sizes, the same on every rank."""

from collections.abc import Sequence
from typing import NamedTuple

from fzero.config import Config
from fzero.distributed.buckets import plan_buckets
from fzero.distributed.mesh import Axis
from fzero.engine.counts import masks
from fzero.layout import LeafLayout
from fzero.layout.modules import (
    block_of,
    check_together,
    is_numbered,
    module_of,
    module_within,
    natural_order,
    runs,
)

# A model of more blocks than this gathers several at once: it has the memory of one block in
# thirty-two to spare, and each collective costs its latency.
_MOST_UNITS = 32
# Bytes that travel in about the time that a collective costs whatever it carries (half a
# millisecond of hosts over gloo): blocks below share a unit up to these.
_WORTH_A_COLLECTIVE = 1_600_000
# But not in the last part of a model, as a share of its bytes: around the end of forward, with all
# activations there, memory is at its most.
_LAST_PART = 0.4


def plan_units(
    leaves: Sequence[LeafLayout], order: Sequence[int], limit: int, together: Sequence[str] = ()
) -> tuple[list[list[int]], list[str]]:
    """Leaves that are gathered together, consecutive modules up to `limit` bytes.

    A numbered module (`layers.3`) is the natural unit: with at most 32 of them each is one; with
    more, consecutive ones share, as do small ones in the first part of the model. What is larger
    than a unit may be is cut at its inner modules. Where leaves lie in flats, which travel as a
    whole, a unit is a section: see `fzero.layout.flats`, [Note: flats].

    Args:
        leaves: all of them.
        order: their indices as the module registers them.
        limit: most bytes of full leaves in a unit.
        together: globs over module names; each module that one matches is a unit of its own.

    Returns:
        The units as lists of indices, and the modules that the last ones of them are, from
        `together`.

    Raises:
        ConfigError: a glob matches no module that has parameters.

    Examples:
        >>> names = ["embed.w", "layers.0.a.w", "layers.0.b.w", "layers.1.a.w", "layers.1.b.w"]
        >>> leaves = [LeafLayout(name, (2, 2), __import__("torch").float32) for name in names]
        >>> plan_units(leaves, range(5), limit=32)
        ([[0], [1, 2], [3, 4]], [])
        >>> plan_units(leaves, range(5), limit=64)
        ([[0, 1, 2], [3, 4]], [])
        >>> plan_units(leaves, range(5), 64, ["layers"])
        ([[0], [1, 2, 3, 4]], ['layers'])
    """
    owner = _owners(leaves, together)
    free = [index for index in order if index not in owner]
    units = _by_flats(leaves, free) or _by_blocks(leaves, free, limit)
    special: dict[str, list[int]] = {}
    for index in order:
        if index in owner:
            special.setdefault(owner[index], []).append(index)
    return [*units, *special.values()], list(special)


def _by_flats(leaves: Sequence[LeafLayout], free: Sequence[int]) -> list[list[int]]:
    """Sections, each with all that lies between the leaves of its flats; none without flats.

    >>> from fzero.layout import Home
    >>> homes = [Home(0, 8, 0), Home(1, 8, 0), Home(0, 8, 8), None, Home(2, 8, 0)]
    >>> float32 = __import__("torch").float32
    >>> leaves = [LeafLayout("abcde"[i], (8,), float32, 0, 2, home=homes[i]) for i in range(5)]
    >>> _by_flats(leaves, range(5))
    [[0, 1, 2], [3], [4]]
    """
    named = [leaves[i].name for i in free]
    order = [free[at] for at in natural_order(named)]
    last = {leaf.home.flat: at for at, i in enumerate(order) if (leaf := leaves[i]).home}
    units: list[list[int]] = []
    end, module = -1, None  # of the unit's flats; of its last leaf, if that is in none
    for at, index in enumerate(order):
        leaf = leaves[index]
        # what is whole on every rank doesn't travel, and goes with any
        joins = at <= end or leaf.dim is None or (not leaf.home and module_of(leaf.name) == module)
        if not units or not joins:
            units.append([])
        units[-1].append(index)
        end = max(end, at if leaf.home is None else last[leaf.home.flat])
        module = None if leaf.home else module_of(leaf.name)
    place = {index: at for at, index in enumerate(free)}
    return sorted(units, key=lambda unit: min(place[i] for i in unit)) if last else []


def _by_blocks(leaves: Sequence[LeafLayout], free: Sequence[int], limit: int) -> list[list[int]]:
    """Consecutive leaves in units of at most `limit` bytes, cut between modules."""
    blocks = runs(free, lambda index: block_of(leaves[index].name))
    sizes = [sum(leaves[i].nbytes for i in block) for block in blocks]
    numbered = [
        size
        for block, size in zip(blocks, sizes, strict=True)
        if is_numbered(leaves[block[0]].name)
    ]
    # no smaller than the largest block, which is to be one unit; larger where units are too many
    wanted = max(max(numbered or sizes or [0]), sum(sizes) // _MOST_UNITS)
    roomy, limit = min(limit, max(wanted, _WORTH_A_COLLECTIVE)), min(limit, wanted)
    parts: list[list[int]] = []
    for block, size in zip(blocks, sizes, strict=True):
        parts += [block] if size <= limit else runs(block, lambda i: module_of(leaves[i].name))
    units: list[list[int]] = []
    filled, left = 0, sum(sizes)
    for part in parts:
        size = sum(leaves[i].nbytes for i in part)
        most = roomy if left > sum(sizes) * _LAST_PART else limit
        if not units or filled + size > most:
            units.append([])
            filled = 0
        units[-1] += part
        filled += size
        left -= size
    return units


def _owners(leaves: Sequence[LeafLayout], together: Sequence[str]) -> dict[int, str]:
    """For the leaves of modules that a glob matches, the outermost such module."""
    check_together(together, [leaf.name for leaf in leaves])
    found = {index: module_within(leaf.name, together) for index, leaf in enumerate(leaves)}
    return {index: module for index, module in found.items() if module is not None}


class Grouping(NamedTuple):
    """Which leaves travel together, by their indices.

    Args:
        registered: all leaves, in the order of the module.
        units: gathered together; empty where parameters are always there.
        special: the modules that only some ranks may run: the last units.
        buckets: reduced together, in the order of reduction.
        masks: the same as bit masks, for the state machine.
    """

    registered: Sequence[int]
    units: list[list[int]]
    special: list[str]
    buckets: list[list[int]]
    masks: tuple[int, ...]


def plan_grouping(
    leaves: Sequence[LeafLayout], registered: Sequence[int], cfg: Config, *, lazy: bool, alone: bool
) -> Grouping:
    """Units, and buckets in the order in which a backward is likely to complete them.

    Args:
        leaves: of all parameters.
        registered: their indices in the order of the module.
        cfg: the step's.
        lazy: whether parameters are gathered on use.
        alone: whether there is no other rank.
    """
    limit = int(cfg.bucket_mb * 2**20)
    units, special = [], []
    if lazy:
        units, special = plan_units(leaves, registered, limit, cfg.gather_together)
    grouping = Grouping(registered, units, special, [], ())
    return plan_order(grouping, leaves, registered[::-1], cfg, alone=alone)


def plan_order(
    grouping: Grouping,
    leaves: Sequence[LeafLayout],
    arrivals: Sequence[int],
    cfg: Config,
    *,
    alone: bool = False,
) -> Grouping:
    """The same units with buckets for another order of gradients.

    It says when a bucket is reduced, and never what is in it: in which order ranks' parts are added
    up may depend on where they lie there, and an engine that goes on from a checkpoint has yet to
    see a backward.

    Args:
        grouping: its buckets don't matter.
        leaves: of all parameters, trained or not.
        arrivals: indices of all leaves as gradients come.
        cfg: the step's.
        alone: whether there is no other rank.
    """
    if alone:
        return grouping._replace(buckets=[], masks=())
    turn = {leaf: i for i, leaf in enumerate(arrivals) if leaves[leaf].trainable}
    parts = grouping.units
    if not parts:
        nbytes = [leaf.nbytes for leaf in leaves]
        backward = [leaf for leaf in reversed(grouping.registered) if leaf in turn]
        parts = plan_buckets(leaves, nbytes, backward, int(cfg.bucket_mb * 2**20))
    parts = [[leaf for leaf in part if leaf in turn] for part in parts]
    common = len(parts) - len(grouping.special)
    # one can be reduced when the last of its gradients has come
    first = sorted(filter(None, parts[:common]), key=lambda part: max(turn[i] for i in part))
    last = [part for part in parts[common:] if part]
    # ranks may run parts of the special ones only: they wait for the end, on an extra bit
    bits = masks(first) + tuple(mask | 1 << len(leaves) for mask in masks(last))
    return grouping._replace(buckets=[*first, *last], masks=bits)


def units_ahead(cfg: Config, axis: Axis) -> int:
    """How many units ahead gathers are launched."""
    if cfg.prefetch is not None:
        return cfg.prefetch
    # one is FSDP2's depth, too; without it each unit is waited for in full
    return 0 if axis.size == 1 else 1
