"""A Program as text: a golden file for a tiny model.

After a change that is meant: `python -m tests.program.test_listing` writes the file anew; read the
difference before you commit it.
"""

import functools
import re
from pathlib import Path

import torch
from torch import Tensor, nn

import fzero
from fzero.program.text import size
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


def text_of(program: fzero.Program) -> str:
    """Both forms."""
    lines = f"{program}\n\n\nverbose:\n\n{program.listing(verbose=True)}\n"
    # of the user's code, lines move with this file
    return re.sub(r"\.py:\d+", ".py:N", lines)


def test_listing_is_the_golden_one() -> None:
    # of x.detach() torch 2.13 records the first, torch 2.15 the second
    text = re.sub(r"\balias(?=\b|_\d)", "detach", text_of(tiny()))
    assert text == GOLDEN.read_text(), __doc__


def test_a_verbose_listing_says_what_one_looks_for() -> None:
    program = tiny()
    text = program.listing(verbose=True)
    for name in program.inputs:
        assert f"= input {name}" in text
    for row in program.collectives():
        assert f"{row.kind}[{row.leaves[0]}" in text
    for part in program.parts():
        for line in part.log:
            assert f"# {line}" in text
    forward, backward = text.index("  forward:"), text.index("  backward:")
    assert 0 < forward < text.index("aten.tanh(") < backward < text.index("reduce_scatter[")


class Deep(nn.Module):
    """Layers of two kinds, one after the other."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Tanh() if i % 2 else nn.GELU()) for i in range(layers)
        )
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).mean()


@functools.cache
def deep(layers: int) -> fzero.Program:
    """The step of such a model on two ranks, with a bucket for every few leaves."""
    apply, params = fzero.functionalize(Deep(layers))
    with fake_ranks(2):
        cfg = fzero.Config(stage=3, bucket_mb=0.0002)
        step_fn = fzero.make_train_step(apply, fzero.optim.adam(0.1), cfg)
        return step_fn.lower(*step_fn.init(params), torch.ones(3, 4))


def test_layers_that_are_alike_are_shown_once() -> None:
    short, long = str(deep(6)), str(deep(20))
    assert "... 9 more like these 2 (blocks.2 to blocks.19)" in long
    assert len(long.splitlines()) <= len(short.splitlines()) + 4
    everything = deep(20).listing(verbose=True)
    nodes = sum(len(part.graph.nodes) for part in deep(20).parts())
    assert len(everything.splitlines()) >= nodes > 4 * len(long.splitlines())


def test_columns_are_the_memory() -> None:
    """The most that a listing says is alive is the peak, in both forms."""
    program = deep(6)
    moments = {(m.program, m.node): m for m in program.memory()}
    peak = max(moments.values(), key=lambda m: m.bytes)
    for verbose in (False, True):
        text = program.listing(verbose=verbose).split("program update")[0]
        assert f" {size(peak.bytes)}  " in text
    assert "<- peak" in str(program)


if __name__ == "__main__":
    GOLDEN.write_text(text_of(tiny()))
