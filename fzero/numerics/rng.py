"""Random generators and keys: whose numbers a step draws, and where a stream of them starts."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fzero.numerics.thread_generator import thread_generator


def generator_of(device: torch.device) -> torch.Generator:
    """The generator that random operators on `device` draw from in this thread."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return thread_generator()


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


def _draws(target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Attention and RNN operators are tagged as random, but draw only with a positive dropout.

    The derivatives of attention never do: they are given where forward drew.
    """
    arguments = target._schema.arguments
    if any(argument.name in _WHERE_FORWARD_DREW for argument in arguments):
        return False
    for i, argument in enumerate(arguments):
        if argument.name in ("dropout_p", "dropout"):
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            return bool(argument.default_value if value is None else value)
    return True


_WHERE_FORWARD_DREW = ("philox_seed", "rng_state")


@contextlib.contextmanager
def preserved(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """The generators' states are afterwards what they are now."""
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
