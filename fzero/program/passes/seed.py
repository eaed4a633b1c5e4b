"""Randomness as a function: every random operator has a generator of its own, made of (key, site).

The same key gives the same masks whatever ran before, and whatever other threads draw meanwhile; an
operator that is computed again in backward keeps its site, and so its mask. Kernels that take no
generator and can't be written with one that does (attention with dropout on a GPU) draw from the
device's, which is seeded before and put back at the end of the Program.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from fzero.errors import TraceError
from fzero.numerics.rng import generator_of, is_random, mix
from fzero.program.graph import BACKWARD, copy_graph, phases, placeholders, tensors_of
from fzero.program.program import Program

SITE = "random_site"


def number_sites(program: Program) -> Program:
    """Give each random operator its number. Before any pass that copies nodes.

    Raises:
        TraceError: a random operator after forward: a recomputation that would draw a new mask.
    """
    graph = copy_graph(program.graph)
    # numbered in the order of the recording, which is the same on every rank and at every call
    sites = [node for node in graph.nodes if _is_random(node)]
    phase = phases(graph)
    for site, node in enumerate(sites):
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
    return Program(**{**vars(done), "inputs": (*done.inputs, "key")})


def generator(key: int, site: int, device: torch.device) -> torch.Generator:
    """A new one, whose state depends on `(key, site)` alone."""
    return torch.Generator(device).manual_seed(mix(key, site))


def with_generator(target: Any) -> Callable[..., Any] | None:
    """What draws the same numbers as an operator from `generator=`; None if nothing does."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    if target in _WRITTEN_OUT:
        return _WRITTEN_OUT[target]
    mine = _arguments(target)
    if "generator" in mine:
        return target
    packet = target.overloadpacket
    others = (getattr(packet, name) for name in packet.overloads())
    same = (other for other in others if _arguments(other) == mine | {"generator"})
    return next(same, None)


def _arguments(target: torch._ops.OpOverload) -> set[str]:
    return {argument.name for argument in target._schema.arguments}


def _dropout(
    x: Tensor, p: float, train: bool | None, *, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    # torch takes 0 as the scale here; 1 / (1 - p) would divide by zero
    if p == 1:
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
    # Operation by operation what torch's kernel does on a CPU, so that it rounds alike.
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
    return (x * mask).mul_(1.0 / (1 - p)), mask


def _rand_like(x: Tensor, *, generator: torch.Generator, **options: Any) -> Tensor:
    return torch.empty_like(x, **options).uniform_(generator=generator)


def _randn_like(x: Tensor, *, generator: torch.Generator, **options: Any) -> Tensor:
    return torch.empty_like(x, **options).normal_(generator=generator)


def _randint_like(x: Tensor, *bounds: int, generator: torch.Generator, **options: Any) -> Tensor:
    low, high = (0, *bounds)[-2:]
    return torch.empty_like(x, **options).random_(low, high, generator=generator)


_aten = torch.ops.aten
_WRITTEN_OUT: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        _aten.native_dropout.default: _dropout,
        _aten.rand_like.default: _rand_like,
        _aten.randn_like.default: _randn_like,
        _aten.randint_like.default: _randint_like,
        _aten.randint_like.low_dtype: _randint_like,
    }
)


def seed(key: int, site: int, device: torch.device) -> None:
    """Set the generator of `device` to a state that depends on `(key, site)` alone."""
    generator_of(device).manual_seed(mix(key, site))


def draws(program: Program) -> bool:
    """Whether anything in it is random."""
    return any(map(_is_random, program.graph.nodes))


def _is_random(node: fx.Node) -> bool:
    return is_random(node.target, node.args, node.kwargs)
