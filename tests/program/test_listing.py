"""A Program as text: a golden file for a tiny model.

After a change that is meant: `python -m tests.program.test_listing` writes the file anew; read the
difference before you commit it.
"""

import re
from pathlib import Path

import torch
from torch import Tensor

import fzero
from tests.ranks import fake_ranks

GOLDEN = Path(__file__).with_name("listing.txt")


def tiny() -> fzero.Program:
    """A step of stage 3 on two ranks: two matrices and a bias."""

    def model_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ params["first"] + params["bias"])
        return (hidden @ params["second"]).square().mean()

    shapes = {"first": (4, 6), "bias": (6,), "second": (6, 2)}
    with fake_ranks(2):
        step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(0.1), fzero.Config(stage=3))
        state = step_fn.init({name: torch.ones(shape) for name, shape in shapes.items()})
        return step_fn.lower(*state, torch.ones(3, 4))


def test_listing_is_the_golden_one() -> None:
    # of x.detach() torch 2.13 records the first, torch 2.15 the second
    text = re.sub(r"\balias\b", "detach", str(tiny()))
    assert text + "\n" == GOLDEN.read_text(), __doc__


def test_listing_says_what_one_looks_for() -> None:
    program = tiny()
    text = str(program)
    for name in program.inputs:
        assert f"= input {name}" in text
    for row in program.collectives():
        assert f"{row.kind}[{row.leaves[0]}" in text
    for part in program.parts():
        for line in part.log:
            assert f"# {line}" in text
    forward, backward = text.index("  forward:"), text.index("  backward:")
    assert 0 < forward < text.index("aten.tanh.default") < backward < text.index("reduce_scatter[")


if __name__ == "__main__":
    GOLDEN.write_text(str(tiny()) + "\n")
