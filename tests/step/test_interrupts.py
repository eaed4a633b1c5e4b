"""A step that is interrupted, as by Ctrl-C: up to its first write all is as before."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fzero
from fzero import Config, optim
from fzero.errors import ShardError
from fzero.functional import memory
from fzero.state.opt_state import refuse_interrupted
from fzero.step import train_step, update_program

TOLD = "an update of this state broke off after it began to write"
X = torch.tensor([[1.0, 2.0, 3.0], [0.5, 0.0, -1.0]])


def _loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    return (x @ params["w"]).square().mean()


def _begun(executor: str, **fields: Any) -> tuple[fzero.TrainStep, Any]:
    """A step function after one step, which has found where its updates write first."""
    step_fn = fzero.make_train_step(
        _loss, optim.adamw(0.1), Config(executor=executor, stage=3, **fields)
    )
    state = step_fn.init({"w": torch.ones(3, 2)})
    return step_fn, step_fn(*state, X)


def _ctrl_c(*args: Any, **kwargs: Any) -> Any:
    raise KeyboardInterrupt


def _values(state: Any) -> list[torch.Tensor]:
    return [x.clone() for x in fzero.tree.leaves(fzero.unshard((state[0], state[1].inner)))]


@pytest.mark.parametrize("executor", ["traced", "eager"])
@pytest.mark.parametrize(
    ("module", "name"), [(train_step, "metrics_of"), (update_program, "Updated")]
)
def test_an_update_is_not_made_twice(
    monkeypatch: pytest.MonkeyPatch, executor: str, module: Any, name: str
) -> None:
    step_fn, state = _begun(executor)
    before = _values(state)
    with monkeypatch.context() as patch:
        patch.setattr(module, name, _ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            step_fn(*state, X)
    assert any(not torch.equal(x, y) for x, y in zip(_values(state), before, strict=True))
    for use in _uses(step_fn, state):
        with pytest.raises(ShardError, match=TOLD):
            use()


def _uses(step_fn: fzero.TrainStep, state: Any) -> list[Callable[[], Any]]:
    return [lambda: step_fn(*state, X), lambda: fzero.checkpoint.save("nowhere", *state)]


@pytest.mark.parametrize("executor", ["traced", "eager"])
@pytest.mark.parametrize("name", ["rate_of", "micro_batches"])
def test_before_an_update_all_is_as_it_was(
    monkeypatch: pytest.MonkeyPatch, executor: str, name: str
) -> None:
    step_fn, state = _begun(executor)
    _, expected = _begun(executor)
    with monkeypatch.context() as patch:
        patch.setattr(train_step, name, _ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            step_fn(*state, X)
    _same(step_fn(*state, X), step_fn(*expected, X))


def _same(found: Any, expected: Any) -> None:
    for x, y in zip(_values(found), _values(expected), strict=True):
        assert torch.equal(x, y)
    assert found[1].step == expected[1].step


@pytest.mark.parametrize("executor", ["traced", "eager"])
def test_so_it_is_inside_of_it_up_to_its_first_write(
    monkeypatch: pytest.MonkeyPatch, executor: str
) -> None:
    step_fn, state = _begun(executor)
    _, expected = _begun(executor)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "dot", _ctrl_c)  # in the norm of the gradient
        with pytest.raises(KeyboardInterrupt):
            step_fn(*state, X)
    _same(step_fn(*state, X), step_fn(*expected, X))


def test_without_donation_any_interrupt_leaves_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    step_fn, state = _begun("traced", donate=False)
    with monkeypatch.context() as patch:
        patch.setattr(train_step, "metrics_of", _ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            step_fn(*state, X)
    _same(step_fn(*state, X), step_fn(*_begun("traced", donate=False)[1], X))


def test_a_copy_that_was_made_before_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    step_fn, state = _begun("traced")
    kept = fzero.tree_map(torch.clone, state)
    with monkeypatch.context() as patch:
        patch.setattr(train_step, "metrics_of", _ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            step_fn(*state, X)
    _same(step_fn(*kept, X), step_fn(*_begun("traced")[1], X))


def test_a_checkpoint_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    step_fn, state = _begun("traced")
    fzero.checkpoint.save(tmp_path, *state, step=1)
    with monkeypatch.context() as patch:
        patch.setattr(train_step, "metrics_of", _ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            step_fn(*state, X)
    _same(step_fn(*fzero.checkpoint.load(tmp_path, *state), X), step_fn(*_begun("traced")[1], X))


OPTIMIZERS = {
    "sgd": lambda: optim.sgd(0.1),
    "momentum": lambda: optim.sgd(0.1, momentum=0.9),
    "adamw": lambda: optim.adamw(0.1),
    "lion": lambda: optim.lion(0.1),
}


Y = torch.linspace(-1, 2, 24, dtype=torch.float64).reshape(6, 4)


def _two(params: Any, x: torch.Tensor) -> torch.Tensor:
    return (torch.tanh(x @ params["a"]) @ params["b"]).square().mean()


def _begun_two(name: str, stage: int) -> tuple[fzero.TrainStep, Any]:
    step_fn = fzero.make_train_step(_two, OPTIMIZERS[name](), Config(stage=stage, clip_norm=0.1))
    params = {k: torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(4, 4) for k in "ab"}
    return step_fn, step_fn(*step_fn.init(params), Y)


class _AtLine:
    """Ctrl-C where an update's generated code comes to its line of this number."""

    def __init__(self, number: int) -> None:
        self.number, self.raised = number, False

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith("<fzero program update"):
            return None
        return self._line

    def _line(self, frame: Any, event: str, _: Any) -> Any:
        if event == "line" and frame.f_lineno == self.number:
            self.raised = True
            raise KeyboardInterrupt
        return self._line


def _is_refused(state: Any) -> bool:
    try:
        refuse_interrupted(state[1])
    except ShardError:
        return True
    return False


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_wherever_it_breaks_off_it_is_told_or_harmless(name: str, stage: int) -> None:
    (step_fn, state), (_, expected) = _begun_two(name, stage), _begun_two(name, stage)
    expected = step_fn(*expected, Y)
    told: list[bool] = []
    while True:
        kept = fzero.tree_map(torch.clone, state)
        before, at = _values(state), _AtLine(len(told) + 2)
        tracing = sys.gettrace()
        sys.settrace(at)
        try:
            step_fn(*state, Y)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(tracing)
        if not at.raised:
            break
        changed = any(not torch.equal(x, y) for x, y in zip(_values(state), before, strict=True))
        told.append(changed or _is_refused(state))
        if told[-1]:
            with pytest.raises(ShardError, match=TOLD):
                step_fn(*state, Y)
        else:
            _same(step_fn(*state, Y), expected)
        state = kept
    # up to the first write nothing is lost
    assert told == sorted(told)
    assert told.count(False) > 10
    assert told.count(True)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_kernel_that_has_written_some_of_its_leaves_is_told(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_fn, (params, opt_state) = _begun_two(name, 0)
    monkeypatch.setattr(memory, "why_unwritable", lambda x: None)
    last, value = params["b"], params["b"].clone()
    last.data = value[:1, :1].expand(4, 4)  # which torch refuses to write over
    with pytest.raises(RuntimeError, match="more than one element"):
        step_fn(params, opt_state, Y)
    last.data = value
    with pytest.raises(ShardError, match=TOLD):
        step_fn(params, opt_state, Y)


@pytest.mark.parametrize("executor", ["traced", "eager"])
def test_a_first_update_that_raises_before_it_writes_leaves_all(executor: str) -> None:
    fails = [True]

    def gradients_of(grads: Any, state: Any, params: Any) -> Any:
        return fzero.tree_map(lambda x: torch.ops.fzero_test_interrupts.may_fail(x), grads), state

    lib = torch.library.Library("fzero_test_interrupts", "DEF")
    lib.define("may_fail(Tensor x) -> Tensor")

    def kernel(x: torch.Tensor) -> torch.Tensor:
        if fails[0]:
            raise RuntimeError("out of memory")
        return x.clone()

    lib.impl("may_fail", kernel, "CPU")
    lib.impl("may_fail", torch.empty_like, "Meta")
    try:
        opt = optim.chain(optim.Optimizer(lambda params: (), gradients_of), optim.adamw(0.1))
        step_fn = fzero.make_train_step(_loss, opt, Config(executor=executor, stage=3))
        state = step_fn.init({"w": torch.ones(3, 2)})
        with pytest.raises(RuntimeError, match="out of memory"):
            step_fn(*state, X)
        fails[0] = False
        _, state = step_fn(*state, X)
        assert state.step == 1
    finally:
        lib._destroy()
