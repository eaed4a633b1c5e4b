"""Randomness as a function: every random operator has a generator of its own, made of (key, site).

The same key gives the same masks whatever ran before, and whatever other threads draw meanwhile; an
operator that is computed again in backward keeps its site, and so its mask. Kernels that take no
generator and can't be written with one that does (attention with dropout on a GPU) draw from the
device's, which is seeded before and put back at the end of the Program.
"""

import torch
from torch import fx

from fzero.errors import TraceError
from fzero.functional import islands
from fzero.numerics.rng import is_random
from fzero.program.graph import BACKWARD, copy_graph, is_op, phases, placeholders, tensors_of
from fzero.program.program import Program
from fzero.program.sites import KEY, SITE, generator, seed, with_generator


def number_sites(program: Program) -> Program:
    """Give each random operator its number. Before any pass that copies nodes.

    Raises:
        TraceError: a random operator after forward: a recomputation that would draw a new mask.
    """
    graph = copy_graph(program.graph)
    # in the order of the recording, which is the same on every rank and at every call
    sites: list[fx.Node] = []
    phase = phases(graph)
    number: int | None = None
    for node in [*graph.nodes]:
        if is_op(node, "fzero::site"):  # of an update: see `numerics.noise`
            number = node.args[0]  # pyright: ignore
            graph.erase_node(node)
            continue
        if not _is_random(node):
            continue
        site, number = len(sites) if number is None else number, None
        sites.append(node)
        if phase[node] == BACKWARD:
            raise TraceError(
                f"{node.target} draws random numbers in backward, on a tensor of shape "
                f"{[tuple(x.shape) for x in tensors_of(node)]}: an activation checkpoint that was "
                "recorded as plain operations would recompute its block with another dropout mask, "
                "and the gradients would be wrong. Use fzero.remat or torch.utils.checkpoint "
                "(both keep their masks here), or Config(executor='eager')."
            )
        node.meta[SITE] = site
    return program.logged(graph, f"seed: {len(sites)} random operators")


def insert_seeds(program: Program) -> Program:
    """Seed each numbered operator, if there are any; the key is then one more input."""
    sites = [node for node in program.graph.nodes if SITE in node.meta]
    if not sites:
        return program
    graph = copy_graph(program.graph)
    last = placeholders(graph)[-1]
    # inputs stand before everything else, and the callers pass the key last
    with graph.inserting_after(last):
        key = graph.placeholder("key")
    for node in [n for n in graph.nodes if SITE in n.meta]:
        device = next((x.device for x in tensors_of(node)), torch.device("cpu"))
        drawing = with_generator(node.target)
        with graph.inserting_before(node):
            of = (key, node.meta[SITE], device)
            # attention in fused kernels, for one, takes no generator: the device's own is seeded
            # for it
            if drawing is None:
                graph.call_function(seed, of)
            else:
                node.target = drawing
                node.kwargs = {**node.kwargs, "generator": graph.call_function(generator, of)}
    done = program.logged(graph, f"seed: a key for {len(sites)} sites")
    return Program(**{**vars(done), "inputs": (*done.inputs, KEY)})


def draws(program: Program) -> bool:
    """Whether anything in it is random."""
    return any(map(_is_random, program.graph.nodes))


def _is_random(node: fx.Node) -> bool:
    # of an island nobody knows
    return node.target is islands.RUN or is_random(node.target, node.args, node.kwargs)
