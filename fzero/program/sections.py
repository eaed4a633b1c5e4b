"""A Program's nodes in sections by module, and runs of sections that are alike."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from torch import fx

from fzero.layout.modules import block_of
from fzero.program.origin import NOWHERE, origin_of

T = TypeVar("T")


def pattern(name: str) -> str:
    """A name with its numbers left open: what layers of one kind have in common.

    >>> pattern("blocks.11.ln1.weight")
    'blocks.*.ln1.weight'
    """
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def layer_of(module: str) -> str:
    """The layer that a module is in: its name up to the first number, or all of it.

    >>> layer_of("blocks.11.ln1"), layer_of("head")
    ('blocks.11', 'head')
    """
    return block_of(f"{module}.")


class Section(NamedTuple):
    """Consecutive nodes of one layer.

    Args:
        layer: its name; "" for what is in no module.
        nodes: in order, with nodes among them that are of no module.
    """

    layer: str
    nodes: list[fx.Node]


def sections(nodes: Iterable[fx.Node]) -> list[Section]:
    """Nodes in runs of the same layer; those that were recorded nowhere go with what is around."""
    found: list[Section] = []
    waiting: list[fx.Node] = []  # what stands first goes with what follows
    for node in nodes:
        origin = origin_of(node)
        if origin == NOWHERE:
            (found[-1].nodes if found else waiting).append(node)
            continue
        layer = layer_of(origin.module)
        if not found or found[-1].layer != layer:
            found.append(Section(layer, []))
        found[-1].nodes.append(node)
    if waiting and not found:
        return [Section("", waiting)]
    if waiting:
        found[0] = Section(found[0].layer, [*waiting, *found[0].nodes])
    return found


class Run(NamedTuple):
    """What stands once, and how often the like of it follows.

    Args:
        first: some items.
        more: as many, or a multiple, that are like them.
    """

    first: Sequence[Any]
    more: Sequence[Any]


def runs(items: Sequence[T], key: Callable[[T], Hashable]) -> Iterator[Run]:
    """Items, folded where a sequence of at most 8 repeats.

    >>> [(run.first, len(run.more)) for run in runs("abababc", key=str)]
    [('ab', 4), ('c', 0)]
    """
    keys = [key(item) for item in items]
    at = 0
    while at < len(items):
        best, covered = 1, 1
        for period in range(1, _LONGEST + 1):
            end = at + period
            while keys[end : end + period] == keys[at : at + period] and end < len(items):
                end += period
            if end - at > period and end - at > covered:
                best, covered = period, end - at
        yield Run(items[at : at + best], items[at + best : at + covered])
        at += covered


_LONGEST = 8
