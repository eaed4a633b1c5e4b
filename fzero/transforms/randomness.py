"""The random numbers of functions that run eagerly, as a function of seed, call and rank."""

import contextlib
import functools
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_impls, fake_tensor
from torch.utils._python_dispatch import _disable_current_modes

from fzero.errors import users_line
from fzero.functional.patch import ABSENT, Patch
from fzero.numerics.rng import generator_of, preserved
from fzero.numerics.thread_generator import (
    check_draws,
    drawing_as_torch,
    drawing_from,
    thread_generator,
)


@contextlib.contextmanager
def seeded(key: int, leaves: Sequence[Tensor]) -> Iterator[None]:
    """The generators of the leaves' devices, and the host's, start from `key`; as before after.

    The host's is one of this thread's own: [Note: own draws]. A GPU's is the global one: some
    operators draw there inside of a kernel, and who keeps its state must find all draws in it.
    """
    devices = {x.device for x in leaves} | {torch.device("cpu")}
    with _own_generator() if check_own() else contextlib.nullcontext():
        generators = [generator_of(device) for device in sorted(devices, key=str)]
        with preserved(generators):
            for generator in generators:
                generator.manual_seed(key)
            yield


@contextlib.contextmanager
def _own_generator() -> Iterator[None]:
    """This thread has a new generator on the CPU, also for those who ask torch for its state.

    Activation checkpoints (torch's, Megatron's, DeepSpeed's) read the state in forward and set it
    in backward, to draw the same mask again.
    """
    with _NAMES, drawing_from(torch.Generator("cpu")):
        yield


@functools.cache
def check_own() -> bool:
    """Whether a thread is seen to have a generator of its own; where it is not, that is told."""
    try:
        fits = check_draws() and _answers()
    except Exception:  # whatever a torch of another make raises
        fits = False
    if not fits:
        warnings.warn(
            f"fzero can't give a thread a random generator of its own in torch "
            f"{torch.__version__}: "
            "what runs eagerly seeds torch's global one and puts it back. Let no other thread draw "
            "from it meanwhile: that changes masks, and sees numbers twice. Use a torch that "
            "fzero's README names.",
            stacklevel=users_line(),
        )
    return fits


def _answers() -> bool:
    """Whether who asks torch for the generator, or its state, finds the thread's."""
    own, other = (torch.Generator("cpu").manual_seed(seed) for seed in (1, 2))
    with _disable_current_modes(), _NAMES, drawing_from(own):
        with fake_tensor.FakeTensorMode():
            torch.empty(2, device="cpu").bernoulli_()  # as a compiler does: no number is drawn
        state = other.manual_seed(1).get_state()
        found = torch.default_generator is own and torch.equal(torch.get_rng_state(), state)
        if not found:
            return False  # nor would what is set be the thread's
        torch.set_rng_state(other.manual_seed(2).get_state())
        found = torch.equal(own.get_state(), other.get_state())
    return found and torch.default_generator is torch._C.default_generator


# ----------------------------------------------------------------- whom torch calls the default one
class _OfThread:
    """In place of the global generator in `torch.random`, whose functions ask it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(thread_generator(), name)


def _of_thread(original: Callable[[str], Any]) -> Callable[[str], Any]:
    """In place of `torch.__getattr__`, which answers for what torch has not."""
    mine = thread_generator

    def __getattr__(name: str) -> Any:
        return mine() if name == "default_generator" else original(name)

    # as if it stood in torch, whose filters know the warnings of what it calls by its module
    code, closure = __getattr__.__code__, __getattr__.__closure__
    return types.FunctionType(code, torch.__dict__, closure=closure)


def _in_kernel(original: Callable[..., Any]) -> Callable[..., Any]:
    """In place of the context in which a fake tensor asks a kernel, which draws no number."""

    @contextlib.contextmanager
    def manager(*args: Any) -> Iterator[None]:
        with original(*args), drawing_as_torch():
            yield

    return manager


# Public names but the last. `torch.get_rng_state` and its like may be imported by name: what they
# read is replaced. Who has kept the generator itself asks torch's; docs/design.md says so.
_NAMES = Patch(
    (torch.random, "default_generator", lambda _: _OfThread()),
    (torch, "__getattr__", _of_thread),
    *[(torch, "default_generator", lambda _: ABSENT)] * hasattr(torch, "__getattr__"),
    *((module, "in_kernel_invocation_manager", _in_kernel) for module in (fake_tensor, fake_impls)),
)
