"""What functions were staged out as, by kind of call."""

import gc
import weakref
from typing import Any

import torch

import fzero
from fzero.transforms import recorded
from fzero.transforms.recorded import MAX_KINDS, MAX_RECORDINGS, Recordings


class Made:
    is_dynamic = True

    def __init__(self, holds: bool = True) -> None:
        self.holds = holds

    def hold(self) -> bool:
        return self.holds

    def serves(self, sizes: Any) -> bool:
        return True


def _kind(length: int) -> Any:
    return "static", (torch.Size([length]), None, torch.float32, torch.device("cpu"))


def test_kinds_and_recordings_are_bounded() -> None:
    known: Recordings[Made] = Recordings()
    alive: list[weakref.ref[Made]] = []
    for length in range(MAX_KINDS + 20):
        for _ in range(MAX_RECORDINGS + 2):
            one = Made()
            alive.append(weakref.ref(one))
            known.add(_kind(length), one, frozenset({(0, length)}))
            assert known.find(_kind(length)) is one
    del one
    gc.collect()
    assert len(known) == MAX_KINDS * MAX_RECORDINGS
    assert sum(x() is not None for x in alive) == len(known)
    for length in range(1000, 1000 + 3 * MAX_KINDS):  # others serve these
        assert known.find(_kind(length), exact=False) is not None
    assert len(known._served) <= MAX_KINDS


def test_a_length_that_went_is_recorded_again(monkeypatch: Any) -> None:
    monkeypatch.setattr(recorded, "MAX_KINDS", 2)
    step_fn = fzero.make_train_step(lambda p, x: (p["w"] * x).mean(), fzero.optim.sgd(0.0))
    state = step_fn.init({"w": torch.ones(())})
    for length in (1, 2, 3, 1, 3, 2):
        state = step_fn(*state, torch.full((length,), float(length)))
        assert float(state[1].metrics["loss"]) == length
