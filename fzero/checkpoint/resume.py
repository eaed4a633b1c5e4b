"""Which samples a step sees, as a function of the step: a run that resumes sees what it would have.

A loader with a position of its own must be saved and restored, at the same world size. Here the
position is the step: nothing to save, and any number of ranks shares the same global batch.
"""

import signal
import threading
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fzero.distributed import works
from fzero.distributed.whereabouts import circle_for
from fzero.errors import ConfigError, FzeroError

ROUNDS = 6


def sample_order(
    step: int, *, samples: int, batch: int, seed: int = 0, rank: int = 0, world: int = 1
) -> Tensor:
    """The samples of a step's batch that this rank sees: each sample once an epoch, shuffled.

    Args:
        step: steps before this one; `int(opt_state.step)`.
        samples: in the data set.
        batch: samples of the global batch, over all ranks and micro-batches.
        seed: of the shuffling; every epoch has an order of its own.
        rank, world: this rank and how many there are; `batch` must be a multiple of `world`.

    Returns:
        `(batch / world,)` int64, indices from 0 to `samples - 1`. Laid end to end by rank they are
        the global batch, whatever the world.

    Raises:
        ConfigError: a value out of its range.

    Examples:
        >>> [sample_order(step, samples=6, batch=2).tolist() for step in range(3)]
        [[2, 5], [3, 1], [0, 4]]
        >>> sample_order(2, samples=6, batch=2, rank=1, world=2)
        tensor([4])

    References:
        Black and Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002: a Feistel network on
        the next power of four, walked until the value is in range. So no permutation is stored.
    """
    for name, value, least in (
        ("step", step, 0),
        ("samples", samples, 1),
        ("batch", batch, 1),
        ("world", world, 1),
        ("rank", rank, 0),
    ):
        if not isinstance(value, int) or value < least:
            raise ConfigError(f"sample_order: {name}={value!r} must be an int >= {least}.")
    if rank >= world:
        raise ConfigError(f"sample_order: rank={rank} must be below world={world}.")
    if batch % world:
        raise ConfigError(
            f"sample_order: batch={batch} must be a multiple of world={world}, for ranks see parts "
            f"of the same size. Choose one, such as {-(-batch // world) * world}; one that several "
            "worlds divide, as 2, 3 and 4 do 12, is the same batch in each of them."
        )
    mine = batch // world
    first = step * batch + rank * mine
    number = torch.arange(first, first + mine, device="cpu")
    return _shuffled(number % samples, number // samples, samples, seed)


def _shuffled(number: Tensor, epoch: Tensor, samples: int, seed: int) -> Tensor:
    """Where a permutation of 0 to `samples - 1`, one for each epoch, sends each number."""
    # bits of each half: a Feistel network permutes an even number of bits
    half = max((samples - 1).bit_length() + 1, 2) // 2
    found = number.clone()
    todo = torch.ones_like(number, dtype=torch.bool)
    while bool(todo.any()):
        # At most 3 of 4 values are out of range, and a permutation leads back into it.
        found[todo] = _feistel(found[todo], epoch[todo], half, seed)
        todo = found >= samples
    return found


def _feistel(x: Tensor, epoch: Tensor, half: int, seed: int) -> Tensor:
    mask = (1 << half) - 1
    left, right = x >> half, x & mask
    for i in range(ROUNDS):
        left, right = right, left ^ (_mixed(right + (epoch << 32), seed * ROUNDS + i) & mask)
    return (left << half) | right


def _mixed(x: Tensor, key: int) -> Tensor:
    """A hash of each number; int64 wraps around, as it should."""
    x = x + (key * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % 2**63
    # the steps of SplitMix64; the factors without the top bit, which is int64's sign
    for shift, factor in ((30, 0x3F58476D1CE4E5B9), (27, 0x14D049BB133111EB)):
        x = (x ^ (x >> shift)) * factor
    return x ^ (x >> 31)


class StopOnSignal:
    """Whether a signal has asked the program to stop, the same on every rank.

    A scheduler that takes a machine back sends SIGTERM some seconds before. It reaches the ranks
    at different moments of different steps, so they must agree on the step that is the last.

    Args:
        number: of the signal. From now on it does nothing but set a flag.

    Raises:
        ConfigError: there is no such signal, or none that a program may take.
        FzeroError: this is not the main thread, to which Python gives signals.

    Examples:
        >>> import os
        >>> stop = StopOnSignal()
        >>> stop()
        False
        >>> os.kill(os.getpid(), signal.SIGTERM)
        >>> stop()
        True
        >>> stop.restore()
    """

    def __init__(self, number: int = signal.SIGTERM) -> None:
        self._number, self._asked = number, False
        self._before = _handled(number, self._note)

    def __call__(self) -> bool:
        """True once any rank got the signal; every rank must call it, once a step."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self._asked
        # A group of NCCL alone takes no tensors of the host.
        device = "cpu" if "gloo" in str(dist.get_backend_config()) else None
        flag = torch.tensor(
            int(self._asked), device=device or torch.accelerator.current_accelerator()
        )
        world: Any = dist.group.WORLD
        circle = circle_for(range(dist.get_world_size()), [world])
        with circle.at("the question whether to stop"):
            works.settle(works.reduce_in_place(flag, world, circle), flag, circle)
        return bool(flag.item())

    def __bool__(self) -> bool:
        raise FzeroError("StopOnSignal: whether to stop is asked by a call: `if stop():`.")

    def restore(self) -> None:
        """Let the signal do what it did before."""
        _handled(self._number, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # No more than a flag: a signal may come in the middle of a step or a save.
        self._asked = True


def _handled(number: int, handler: Any) -> Any:
    """What handled a signal before `handler` does."""
    if threading.current_thread() is not threading.main_thread():
        raise FzeroError(
            "StopOnSignal: Python lets the main thread alone say what a signal does. Make it "
            "there, and give it to the thread that trains."
        )
    try:
        return signal.signal(number, handler)
    except (TypeError, ValueError, OSError) as error:
        raise ConfigError(
            f"StopOnSignal: {number!r} is no signal that a program can take ({error}). Pass its "
            "number: signal.SIGTERM."
        ) from error
