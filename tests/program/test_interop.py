"""transformers' models see that they are staged out, and only then."""

import pytest
import torch

from fzero.errors import TraceError
from fzero.program.trace import trace_program

utils = pytest.importorskip("transformers.utils")
masking = pytest.importorskip("transformers.masking_utils")


def test_transformers_has_the_question_that_we_answer() -> None:
    assert "is_tracing" in vars(utils), (
        "transformers.utils.is_tracing is gone: find what its models ask before they read values, "
        "and answer that in fzero/program/interop.py"
    )
    assert vars(masking)["is_tracing"] is utils.is_tracing  # one function, bound by name


def test_it_is_answered_while_staging_wherever_it_is_bound() -> None:
    answers = []

    def ask(x: torch.Tensor) -> torch.Tensor:
        answers.extend([utils.is_tracing(), masking.is_tracing(x)])
        return x + 1

    trace_program("question", [("torch.func", torch.func.vmap(ask))], [torch.ones(2)], ["x"])
    assert answers == [True, True]
    assert not utils.is_tracing()
    assert not masking.is_tracing(torch.ones(2))


def test_an_error_restores_it() -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x

    with pytest.raises(TraceError):
        trace_program("failure", [("make_fx", fail)], [torch.ones(2)], ["x"])
    assert not utils.is_tracing()
