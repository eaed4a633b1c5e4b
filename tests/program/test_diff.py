"""What two Programs do differently, in numbers."""

import pytest
import torch
from torch import Tensor

import fzero
from fzero.errors import ConfigError
from tests.ranks import fake_ranks


def lowered(**options: object) -> fzero.Program:
    def model_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(x @ params["w"]) @ params["w"]).mean()

    with fake_ranks(2):
        cfg = fzero.Config(**options)  # pyright: ignore
        step_fn = fzero.make_train_step(model_fn, fzero.optim.adam(0.1), cfg)
        return step_fn.lower(*step_fn.init({"w": torch.ones(8, 8)}), torch.ones(4, 8))


def test_a_program_does_not_differ_from_itself() -> None:
    program = lowered(stage=3)
    assert list(program.diff(program)) == []
    assert str(program.diff(program)) == "no difference"


def test_what_is_no_program_is_refused() -> None:
    program = lowered(stage=3)
    for ask in (program.diff, program.verify):
        with pytest.raises(ConfigError, match=r"is no Program\. Pass what step_fn.lower"):
            ask([3] if ask == program.verify else 3)  # pyright: ignore
    program.verify([lowered(stage=3)])


def test_every_number_that_differs_is_told() -> None:
    one, other = lowered(stage=1), lowered(stage=3, reshard_after_forward=True)
    diff = one.diff(other)
    told = {change.what: (change.one, change.other) for change in diff}
    peaks = (one.peak_bytes(), other.peak_bytes())
    assert told.get("peak", peaks) == peaks
    held = [program.peak().by_category() for program in (one, other)]
    for category in {*held[0], *held[1]}:
        pair = (held[0].get(category, 0), held[1].get(category, 0))
        assert told.get(f"peak: {category}", pair) == pair
        assert (f"peak: {category}" in told) == (pair[0] != pair[1])
    assert told["forward: all_gather"] == (0, 1)
    assert told["update: all_gather"] == (1, 0)
    back = {change.what: (change.other, change.one) for change in other.diff(one)}
    assert back == told
    assert "+ regather" in str(diff)


def test_clipping_is_seen_in_the_update() -> None:
    diff = lowered(stage=3).diff(lowered(stage=3, clip_norm=1.0))
    assert {change.what.partition(":")[0] for change in diff} <= {"update", "moved"}
    assert len(diff) > 0
