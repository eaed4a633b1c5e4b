"""What runs eagerly has a generator of its own, and so has whoever asks torch for it there."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.random import get_rng_state, initial_seed, manual_seed, seed, set_rng_state

import fzero.transforms.randomness as randomness
from fzero.numerics.thread_generator import thread_generator
from fzero.transforms.randomness import check_own, seeded

TORCHS = torch.default_generator
GETS: dict[str, Callable[[], Tensor]] = {
    "torch": lambda: torch.get_rng_state(),
    "torch.random": lambda: torch.random.get_rng_state(),
    "imported by name": get_rng_state,
    "the generator's": lambda: torch.default_generator.get_state(),
    "torch.random's": lambda: torch.random.default_generator.get_state(),
}
SETS: dict[str, Callable[[Tensor], Any]] = {
    "torch": lambda state: torch.set_rng_state(state),
    "torch.random": lambda state: torch.random.set_rng_state(state),
    "imported by name": set_rng_state,
    "the generator's": lambda state: torch.default_generator.set_state(state),
    "torch.random's": lambda state: torch.random.default_generator.set_state(state),
}


@pytest.mark.parametrize("set_state", SETS.values(), ids=SETS)
@pytest.mark.parametrize("get_state", GETS.values(), ids=GETS)
def test_what_is_asked_and_set_is_the_threads(
    get_state: Callable[[], Tensor], set_state: Callable[[Tensor], Any]
) -> None:
    before = TORCHS.get_state()
    with seeded(7, []):
        state = get_state()
        first = torch.rand(3)
        set_state(state)
        assert torch.equal(torch.rand(3), first)
        assert torch.equal(first, torch.rand(3, generator=torch.Generator().manual_seed(7)))
    assert torch.equal(TORCHS.get_state(), before)
    assert torch.equal(get_state(), before)


def test_seeds_and_forks_are_the_threads() -> None:
    before = TORCHS.get_state()
    with seeded(7, []):
        assert initial_seed() == torch.initial_seed() == 7
        with torch.random.fork_rng(devices=[]):
            manual_seed(3)
            forked = torch.rand(2)
            assert seed() == torch.initial_seed()
        after = torch.rand(2)
    assert torch.equal(forked, torch.rand(2, generator=torch.Generator().manual_seed(3)))
    assert torch.equal(after, torch.rand(2, generator=torch.Generator().manual_seed(7)))
    assert torch.equal(TORCHS.get_state(), before)


def test_other_threads_ask_torchs() -> None:
    inside, done = threading.Event(), threading.Event()

    def step() -> None:
        with seeded(7, []):
            inside.set()
            done.wait(30)

    thread = threading.Thread(target=step)
    thread.start()
    inside.wait(30)
    try:
        assert torch.default_generator is TORCHS
        assert torch.equal(torch.get_rng_state(), TORCHS.get_state())
        assert torch.rand(2, generator=torch.default_generator).shape == (2,)
        with torch.random.fork_rng(devices=[]):
            assert torch.manual_seed(3) is TORCHS
            assert TORCHS.initial_seed() == 3
    finally:
        done.set()
        thread.join()


def test_torch_is_as_before_when_the_last_has_left() -> None:
    names, answer = dict(vars(torch.random)), vars(torch)["__getattr__"]
    with contextlib.suppress(ZeroDivisionError), seeded(7, []):
        with seeded(8, []):
            assert torch.initial_seed() == 8
        assert torch.initial_seed() == 7
        _ = 1 / 0
    assert dict(vars(torch.random)) == names
    assert vars(torch)["__getattr__"] is answer
    assert vars(torch)["default_generator"] is TORCHS is thread_generator()
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"), seeded(7, []):
        _ = torch.no_such_name


def test_a_torch_that_does_otherwise_is_seeded_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_own()
    monkeypatch.setattr(randomness, "check_draws", lambda: False)
    with pytest.warns(UserWarning, match="Let no other thread"):
        assert not check_own.__wrapped__()
    monkeypatch.setattr(randomness, "check_own", lambda: False)
    before = TORCHS.get_state()
    with seeded(7, []):
        assert thread_generator() is TORCHS
        found = torch.rand(3)
    assert torch.equal(found, torch.rand(3, generator=torch.Generator().manual_seed(7)))
    assert torch.equal(TORCHS.get_state(), before)


def test_names_that_go_past_the_thread_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a torch read the state elsewhere: users' checkpoints would draw another mask."""
    before = TORCHS.get_state()
    monkeypatch.setattr(torch, "get_rng_state", TORCHS.get_state)
    with pytest.warns(UserWarning, match="Let no other thread"):
        assert not check_own.__wrapped__()
    monkeypatch.undo()
    assert torch.equal(TORCHS.get_state(), before)
