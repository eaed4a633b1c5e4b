"""What a random operator of a Program draws from: a generator made of (key, site)."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fzero.numerics.rng import generator_of, mix

SITE = "random_site"
"""Where a node has its number."""
KEY = "<key>"
"""Of a Program's inputs, the one that random numbers are a function of: no leaf is named so."""


def seed(key: int, site: int, device: torch.device) -> None:
    """Set the generator of `device` to a state that depends on `(key, site)` alone."""
    generator_of(device).manual_seed(mix(key, site))


def generator(key: int, site: int, device: torch.device) -> torch.Generator:
    """A new one, whose state depends on `(key, site)` alone."""
    return torch.Generator(device).manual_seed(mix(key, site))


def with_generator(target: Any) -> Callable[..., Any] | None:
    """What draws the same numbers as an operator from `generator=`; None if nothing does."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    if target in WRITTEN_OUT:
        return WRITTEN_OUT[target]
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
WRITTEN_OUT: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        _aten.native_dropout.default: _dropout,
        _aten.rand_like.default: _rand_like,
        _aten.randn_like.default: _randn_like,
        _aten.randint_like.default: _randint_like,
        _aten.randint_like.low_dtype: _randint_like,
    }
)
