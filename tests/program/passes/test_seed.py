"""Randomness as a function of a key and a site, whatever ran before and wherever a copy stands."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fzero.distributed.collectives import boundary
from fzero.errors import TraceError
from fzero.numerics.rng import mix
from fzero.program import Program
from fzero.program.codegen import compile_program
from fzero.program.graph import copy_graph, output_node
from fzero.program.passes.clean import clean
from fzero.program.passes.functionalise import functionalise
from fzero.program.passes.seed import insert_seeds, number_sites
from fzero.program.sites import KEY, SITE
from fzero.program.trace import trace_program
from tests.program.programs import Recorded

WORDS = st.integers(0, 2**63 - 1)


def masks() -> Program:
    """Two masks drawn one after the other, sites numbered."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return F.dropout(x, 0.5), F.dropout(x, 0.5)

    return number_sites(trace_program("masks", [("make_fx", fn)], [torch.ones(64)], ["x"]))


@settings(max_examples=50)
@given(st.lists(WORDS, min_size=1, max_size=4), st.integers(0, 3), WORDS)
def test_mix_depends_on_every_word(words: list[int], place: int, other: int) -> None:
    assert mix(*words) == mix(*words)
    assert 0 <= mix(*words) < 2**63
    changed = list(words)
    changed[place % len(words)] = other
    assert (mix(*changed) == mix(*words)) == (changed == words)


@settings(max_examples=25)
@given(WORDS, WORDS, st.integers(0, 2**31))
def test_same_key_same_masks_whatever_ran_before(key: int, other: int, before: int) -> None:
    run = compile_program(insert_seeds(masks()))
    x = torch.ones(64)
    first = run(x, key)
    torch.manual_seed(before)
    again, different = run(x, key), run(x, other)
    for a, b, c in zip(first, again, different, strict=True):
        assert torch.equal(a, b)
        assert key == other or not torch.equal(a, c)
    assert not torch.equal(*first)  # two sites, two masks


def test_generators_stay_as_they_were() -> None:
    run = compile_program(insert_seeds(masks()))
    before = torch.get_rng_state()
    run(torch.ones(64), 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_copy_of_a_random_operator_draws_the_same_mask() -> None:
    program = masks()
    graph = copy_graph(program.graph)
    output = output_node(graph)
    sites = [node for node in graph.nodes if SITE in node.meta]
    with graph.inserting_before(output):
        copies = [graph.node_copy(node) for node in reversed(sites)]
    output.args = ((*sites, *reversed(copies)),)
    seeded = insert_seeds(replace(program, graph=graph, outputs=("a", "b", "c", "d")))
    a, b, c, d = (
        x[0] if isinstance(x, tuple) else x for x in compile_program(seeded)(torch.ones(64), 7)
    )
    assert torch.equal(a, c)
    assert torch.equal(b, d)
    assert not torch.equal(a, b)


def test_gradients_with_dropout_are_functions_of_the_key() -> None:
    recorded = Recorded([8, 16, 16, 4], rows=6, dropout=0.5)
    program = insert_seeds(clean(number_sites(functionalise(recorded.program))))
    assert program.inputs[-1] == KEY
    run = compile_program(program)
    one, again, other = (run(*recorded.inputs, key)[:-1] for key in (1, 1, 2))
    assert all(map(torch.equal, one, again))
    assert not all(map(torch.equal, one, other))


def test_without_randomness_there_is_no_key() -> None:
    program = number_sites(Recorded([3, 4]).program)
    assert insert_seeds(program) is program
    assert KEY not in program.inputs


def test_a_new_mask_in_backward_is_refused() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return boundary(x.sum()), F.dropout(x, 0.5)

    program = trace_program("p", [("make_fx", fn)], [torch.ones(4)], ["x"])
    with pytest.raises(TraceError, match=r"draws random numbers in backward.*\(4,\)"):
        number_sites(program)
