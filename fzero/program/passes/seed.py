"""Randomness as a function: every random operator is seeded by (key, site), just before it runs.

The same key gives the same masks whatever ran before; an operator that is computed again in
backward keeps its site, and so its mask.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fzero.errors import TraceError
from fzero.program.program import Program, boundary_of, copy_graph, placeholders, tensors_of

SITE = "random_site"


def number_sites(program: Program) -> Program:
    """Give each random operator its number. Before any pass that copies nodes.

    Raises:
        TraceError: a random operator after forward: a recomputation that would draw a new mask.
    """
    graph = copy_graph(program.graph)
    sites = [node for node in graph.nodes if _is_random(node)]
    after_forward = _nodes_after(boundary_of(graph))
    for site, node in enumerate(sites):
        if node in after_forward:
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
    with graph.inserting_after(last):
        key = graph.placeholder("key")
    for node in [n for n in graph.nodes if SITE in n.meta]:
        device = next((x.device for x in tensors_of(node)), torch.device("cpu"))
        with graph.inserting_before(node):
            graph.call_function(seed, (key, node.meta[SITE], device))
    done = program.logged(graph, f"seed: a key for {len(sites)} sites")
    return Program(**{**vars(done), "inputs": (*done.inputs, "key")})


def seed(key: int, site: int, device: torch.device) -> None:
    """Set the generator of `device` to a state that depends on `(key, site)` alone."""
    generator_of(device).manual_seed(mix(key, site))


def generator_of(device: torch.device) -> torch.Generator:
    """The generator that random operators on `device` draw from."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def mix(*words: int) -> int:
    """One well-mixed 63-bit number from several: the finaliser of splitmix64, word by word.

    >>> mix(0, 1) != mix(1, 0)
    True

    References: Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014.
    """
    state = 0
    for word in words:
        state = (state ^ word) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


_MASK = (1 << 64) - 1


def is_random(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator draws random numbers when it is called like this."""
    return (
        isinstance(target, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded in target.tags
        and _draws(target, args, kwargs)
    )


def _is_random(node: fx.Node) -> bool:
    return is_random(node.target, node.args, node.kwargs)


def _draws(target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Attention and RNN operators are tagged as random, but draw only with a positive dropout."""
    for i, argument in enumerate(target._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            return bool(argument.default_value if value is None else value)
    return True


def _nodes_after(boundary: fx.Node | None) -> set[fx.Node]:
    found: set[fx.Node] = set()
    node = boundary
    while node is not None and node.op != "output":
        node = node.next
        found.add(node)
    return found
