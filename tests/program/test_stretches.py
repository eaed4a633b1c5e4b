"""Stretches change no value, no order of what is left, and hold nothing that has to stay."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fzero
from benchmarks.models import Size, batch_of, fzero_step
from fzero.program import Program
from fzero.program.codegen import Boxed, compile_program
from fzero.program.graph import is_mutable, is_op, placeholders
from fzero.program.inductor import generated
from fzero.program.memory import is_wait
from fzero.program.sites import SITE
from fzero.program.stretches import Stretch, makes_memory, stretches_of, with_stretches
from tests.program.programs import Recorded
from tests.ranks import fake_ranks

TINY = Size(vocabulary=64, width=32, layers=4, heads=4, tokens=16, rows=2)


def split(program: Program, at_least: int = 1) -> tuple[list[Stretch], Program]:
    """Its stretches, and the Program that calls each as generated code of its own."""
    stretches = stretches_of(program.graph, at_least)
    graph = with_stretches(
        program.graph, stretches, lambda stretch: Boxed(generated(stretch.graph()))
    )
    return stretches, replace(program, graph=graph)


def inputs_of(program: Program) -> list[Any]:
    """Numbers in the shapes of its inputs; small, where they are whole."""
    torch.manual_seed(0)
    found: list[Any] = []
    for node in placeholders(program.graph):
        x = node.meta.get("val")
        if not isinstance(x, torch.Tensor):
            found.append(7)  # the key of what is random
        elif x.is_floating_point():
            found.append(torch.randn(x.shape, dtype=x.dtype))
        else:
            found.append(torch.randint(0, 2, x.shape).to(x.dtype))
    return found


def same_results(program: Program, other: Program) -> None:
    given = inputs_of(program)
    copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in given]
    wanted, found = compile_program(program)(*given), compile_program(other)(*copies)
    for a, b in zip([*wanted, *given], [*found, *copies], strict=True):
        if isinstance(a, torch.Tensor):
            assert a.stride() == b.stride()
            assert torch.equal(a, b)


def stays(program: Program) -> list[str]:
    """What a stretch may not hold, in order."""

    def fixed(node: Any) -> bool:
        aten = getattr(node.target, "namespace", "") == "aten"
        return makes_memory(node) and (not aten or is_mutable(node) or SITE in node.meta)

    return [
        str(n.target) for n in program.graph.nodes if fixed(n) and not n.name.startswith("stretch")
    ]


@settings(max_examples=15)
@given(
    widths=st.lists(st.integers(1, 9), min_size=2, max_size=6),
    dropout=st.sampled_from([0.0, 0.5]),
    at_least=st.integers(1, 4),
    world=st.sampled_from([1, 2, 3]),
    size=st.sampled_from([100, 1000]),
)
def test_stretches_change_no_bit_of_any_function(
    widths: list[int], dropout: float, at_least: int, world: int, size: int
) -> None:
    from fzero.program.pipeline import optimise

    with fake_ranks(world):
        recorded = Recorded(widths, dropout=dropout)
        program = optimise(
            recorded.program,
            reshard_after_forward=True,
            bucket_bytes=size,
            prefetch=1,
            exact=True,
        )
        _, other = split(program, at_least)
        assert stays(program) == stays(other)
        if world == 1:
            same_results(program, other)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stretches_of_a_step_are_values_of_values(stage: int) -> None:
    with fake_ranks(2):
        step = fzero_step(TINY, batch_of(TINY, 2), fzero.optim.adamw(1e-3), fzero.Config(stage))
        for part in step.lower().parts():
            stretches, other = split(part)
            assert stays(part) == stays(other)
            for stretch in stretches:
                assert all(not is_mutable(node) for node in stretch.nodes)
                assert all(not is_wait(node) and SITE not in node.meta for node in stretch.nodes)
                assert not any(is_op(x, "fzero::boundary") for x in stretch.nodes)


def test_a_step_in_stretches_has_the_bits_of_a_step() -> None:
    step = fzero_step(TINY, batch_of(TINY, 2), fzero.optim.adamw(1e-3), fzero.Config(stage=3))
    program = step.lower()
    stretches, other = split(program)
    same_results(program, other)
    # forward and backward of the layers between the first and the last are alike
    texts = [str(stretch.graph()) for stretch in stretches if stretch.layer.startswith("blocks.")]
    assert len(set(texts)) <= len(texts) / 2


class _Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.a(x).chunk(2, -1)
        y = F.layer_norm(self.b(left.t().t() * right), (6,))
        y, mask = torch.max(y.view(2, -1, 6), 1)
        return (y.t().contiguous().view(-1) * mask.view(-1)).square().mean() + x.expand(3, 4, 6)[
            1:
        ].mean()


def test_what_is_a_view_of_a_stretchs_value_outside_stays_one() -> None:
    torch.manual_seed(0)
    apply, params = fzero.functionalize(_Views())
    step_fn = fzero.make_train_step(apply, fzero.optim.sgd(0.1), fzero.Config(stage=2))
    state = step_fn.init(params)
    for part in step_fn.lower(*state, torch.ones(4, 6)).parts():
        same_results(part, split(part)[1])
