"""Rematerialisation: what a region computed is computed again where backward needs it."""

from torch import fx

from fzero.functional.remat import Path, regions_of
from fzero.program.graph import (
    BACKWARD,
    FORWARD,
    copy_graph,
    is_again,
    is_wanted,
    phases,
)
from fzero.program.passes.recompute import copied_for, is_pure
from fzero.program.program import Program


def rematerialise(program: Program) -> Program:
    """Replace what backward reads of a region's inside by copies of the nodes that compute it.

    Copies stand just before their first use, so of several regions one is alive at a time. What is
    used outside of its region, and what the region's policy saves, is kept. The copy of a random
    operator has its site, and so draws the same numbers. Regions inside of a region are regions
    again in its copy: they are done level by level, from the outermost.

    The graph must be functional, and random operators numbered.
    """
    graph = copy_graph(program.graph)
    phase = phases(graph)
    paths = {n: path for n in graph.nodes if phase[n] == FORWARD and (path := regions_of(n))}
    gradients = {n for n in graph.nodes if phase[n] == BACKWARD and n.op != "output"}
    if not paths or not gradients:
        return program
    regions = len({path[: i + 1] for path in map(_names, paths.values()) for i in range(len(path))})
    # from the outside in: copies of outer regions have inner ones, which are then done in them
    while paths:
        paths = _level(graph, paths, gradients)
    graph.eliminate_dead_code(is_impure_node=is_wanted)
    copies = sum(is_again(n) for n in graph.nodes)
    line = f"remat: {regions} regions, {copies} nodes computed again in backward"
    return program.logged(graph, line)


def _level(
    graph: fx.Graph, paths: dict[fx.Node, Path], gradients: set[fx.Node]
) -> dict[fx.Node, Path]:
    """Do the outermost regions of `paths`; returns the paths inside of them, of copies too."""
    inside = {n for n in paths if is_pure(n) and not paths[n][0].saved}
    # Their values are kept for somebody else in any case: a copy would only cost.
    inside -= {n for n in inside if _escapes(n, paths, gradients)}
    inner = {n: path[1:] for n, path in paths.items() if path[1:] and not path[0].saved}

    def made(node: fx.Node, new: fx.Node) -> None:
        if node in inner:  # regions of their own: their values die before the originals' do
            inner[new] = tuple(r._replace(name=f"{r.name}'") for r in inner[node])

    copied_for(graph, [n for n in graph.nodes if n in gradients], inside, made)
    return inner


def _escapes(node: fx.Node, paths: dict[fx.Node, Path], gradients: set[fx.Node]) -> bool:
    """Whether anything but backward reads a node outside of its region."""
    name = paths[node][0].name
    return any(
        user not in gradients and (user not in paths or paths[user][0].name != name)
        for user in node.users
    )


def _names(path: Path) -> tuple[str, ...]:
    return tuple(region.name for region in path)
