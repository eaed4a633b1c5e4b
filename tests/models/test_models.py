"""One step's gradients equal `loss.backward()` on real architectures."""

import pytest
import torch

from fzero.errors import TraceError
from tests.models.compare import batch_of, error, errors_on_ranks, plain, stepped
from tests.models.zoo import CASES, Case
from tests.ranks import fake_ranks, run_ranks

INSTALLED = [case for case in CASES if case.installed]
STAGED = [case for case in INSTALLED if case.stages_out]
REFUSED = [case for case in INSTALLED if not case.stages_out]
# the others read values outside of any module, or return shapes that depend on values
ISLANDS = [".item() in a branch", "numpy in forward", "boolean index (experts)"]


def named(case: Case) -> str:
    return case.name


@pytest.mark.parametrize("case", STAGED, ids=named)
def test_one_rank_is_backward_bit_for_bit(case: Case) -> None:
    batch = batch_of(case)
    ours, theirs = stepped(case, batch, stage=3), plain(case, batch)
    assert torch.equal(ours.loss, theirs.loss)
    assert error(ours, theirs) == 0.0
    for name, buffer in ours.buffers.items():
        assert torch.equal(buffer, theirs.buffers[name]), name


def test_every_trained_parameter_was_compared() -> None:
    for case in STAGED:
        theirs = plain(case, batch_of(case))
        assert len(theirs.gradients) > 4, case.name


@pytest.mark.slow
@pytest.mark.parametrize("stage", [3])
def test_two_ranks_are_backward_on_both_batches(stage: int) -> None:
    names = [case.name for case in STAGED]
    for found in run_ranks(2, errors_on_ranks, names, stage, timeout=250):
        assert list(found) == names
        assert {name: e for name, e in found.items() if e > 1e-5} == {}


@pytest.mark.parametrize("case", REFUSED, ids=named)
def test_what_no_program_holds_says_so_and_runs_eagerly(case: Case) -> None:
    batch = batch_of(case)
    with pytest.raises(TraceError, match=r"zoo\.py:(.*\n)+.*executor='eager'"):
        stepped(case, batch, stage=3)
    ours = stepped(case, batch, lower=False, stage=3, executor="eager")
    assert error(ours, plain(case, batch)) == 0.0


@pytest.mark.parametrize("case", [x for x in REFUSED if x.name in ISLANDS], ids=named)
def test_what_no_program_holds_can_be_an_island_in_one(case: Case) -> None:
    batch = batch_of(case)
    ours = stepped(case, batch, stage=3, opaque="auto")
    assert error(ours, plain(case, batch)) == 0.0
    ours.program.verify()


def test_an_old_style_function_takes_the_second_front_end() -> None:
    (case,) = (case for case in CASES if case.name == "old-style autograd.Function")
    assert stepped(case, batch_of(case)).front_end == "torch.autograd.grad"


@pytest.mark.parametrize(
    "name",
    [
        "GPT-2, padded",
        pytest.param("Llama, padded", marks=pytest.mark.slow),
        pytest.param("Qwen3", marks=pytest.mark.slow),
        "BERT",
    ],
)
def test_masks_of_transformers_take_the_first_front_end(name: str) -> None:
    pytest.importorskip("transformers")
    (case,) = (case for case in CASES if case.name == name)
    assert stepped(case, batch_of(case)).front_end == "torch.func.vjp"


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("case", STAGED, ids=named)
def test_nothing_is_wrong_with_the_programs_of_real_models(case: Case, stage: int) -> None:
    with fake_ranks(2):
        program = stepped(case, batch_of(case), stage=stage, bucket_mb=0.01).program
        program.verify([program])
    peak = program.peak()
    assert sum(row.bytes for row in peak) == program.peak_bytes()
    assert "inputs" not in peak.by_category()
