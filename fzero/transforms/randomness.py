"""The random numbers of functions that run eagerly, as a function of seed, call and rank."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fzero.numerics.rng import generator_of, preserved


@contextlib.contextmanager
def seeded(key: int, leaves: Sequence[Tensor]) -> Iterator[None]:
    """The generators of the leaves' devices, and the host's, start from `key`; as before after."""
    devices = {x.device for x in leaves} | {torch.device("cpu")}
    generators = [generator_of(device) for device in sorted(devices, key=str)]
    with preserved(generators):
        for generator in generators:
            generator.manual_seed(key)
        yield
