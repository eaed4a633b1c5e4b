"""transformers' models, and torch, see that they are staged out, and only then."""

import logging
import threading
import traceback

import pytest
import torch

import fzero
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


def test_what_fails_is_told_once_and_from_the_users_line_on() -> None:
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    said: list[logging.LogRecord] = []
    filters = [*logger.filters]

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record)

    handler = Kept()
    logger.addHandler(handler)

    def fail(x: torch.Tensor) -> torch.Tensor:
        other.start()
        other.join()
        return x @ torch.ones(3, 3)

    other = threading.Thread(target=logger.error, args=("of another thread",))
    try:
        with pytest.raises(TraceError) as error:
            trace_program("failure", [("make_fx", fail)], [torch.ones(2, 2)], ["x"])
    finally:
        logger.removeHandler(handler)
    assert [record.getMessage() for record in said] == ["of another thread"]
    assert logger.filters == filters
    cause = error.value.__cause__
    assert cause is not None
    first = traceback.extract_tb(cause.__traceback__)[0]
    assert (first.filename, first.name) == (__file__, "fail")


def test_an_error_restores_it() -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x

    with pytest.raises(TraceError):
        trace_program("failure", [("make_fx", fail)], [torch.ones(2)], ["x"])
    assert not utils.is_tracing()


def _likelihood(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    normal = torch.distributions.Normal(x * w, w.exp())
    kinds = torch.distributions.Categorical(logits=x * w)
    chosen = torch.zeros(x.shape[0], dtype=torch.long)
    nll = torch.nn.GaussianNLLLoss(full=True)
    return (
        nll(x * w, x, w.exp().expand_as(x))
        + nll(x, x * w, (x * w).square().mean(-1))
        - normal.log_prob(x).mean()
        - kinds.log_prob(chosen).mean()
    )


def test_values_are_not_read_to_validate_them() -> None:
    x = torch.randn(5, 3, dtype=torch.float64)
    w = torch.full((3,), 0.3, dtype=torch.float64, requires_grad=True)
    loss = _likelihood(w, x)
    loss.backward()
    value, grads = fzero.value_and_grad(lambda p, x: _likelihood(p["w"], x))({"w": w.detach()}, x)
    assert torch.allclose(value, loss.detach(), rtol=0, atol=1e-12)
    assert w.grad is not None
    assert torch.allclose(grads["w"], w.grad, rtol=0, atol=1e-12)


def test_outside_they_are_validated_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch.compile switches it off for the process, and may have run here
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    with pytest.raises(ValueError, match="scale"):
        torch.distributions.Normal(0.0, torch.tensor(-1.0))
    with pytest.raises(ValueError, match="negative"):
        torch.nn.functional.gaussian_nll_loss(*torch.ones(2, 3), var=-torch.ones(3))
