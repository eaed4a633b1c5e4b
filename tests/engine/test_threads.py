"""One thread at a time drives an engine; another one is told, and the first loses nothing."""

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fzero
from fzero.errors import BackwardError
from fzero.functional.tasks import is_autograds_thread, thread_of_task
from tests.ranks import run_ranks

PASSES = ("forward", "backward")
STAGES = pytest.mark.parametrize("stage", [0, 3])
X = torch.tensor([[1.0, 2.0, 3.0], [0.5, 0.0, -1.0]])


class Stops(nn.Module):
    """A layer that calls `inside` in the middle of its forward, and of its backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.in_forward: Callable[[], Any] | None = None
        self.in_backward: Callable[[], Any] | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        _call(self, "in_forward")
        if y.requires_grad:  # by then the last layer has its gradients, and the first one none
            y.register_hook(lambda grad: _call(self, "in_backward"))
        return self.last(y.tanh())


def _call(module: nn.Module, name: str) -> None:
    once = getattr(module, name)
    setattr(module, name, None)
    if once is not None:
        once()


def _engine(stage: int) -> tuple[Stops, fzero.Engine]:
    model = Stops()
    # at stage 3 one rank has lazy parameters with a compute dtype only
    precision = fzero.Precision(param=torch.float64) if stage == 3 else None
    cfg = fzero.Config(stage=stage, precision=precision)
    return model, fzero.Engine(model, fzero.optim.sgd(0.5), cfg)


def _elsewhere(do: Callable[[], Any]) -> BaseException | None:
    """What it raises in a thread of its own."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            do()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="second")
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    return raised[0] if raised else None


def _here(do: Callable[[], Any]) -> BaseException | None:
    try:
        do()
    except BaseException as error:
        return error
    return None


def _loss(engine: Callable[..., Tensor]) -> Tensor:
    return engine(X).square().mean()


def _grads(engine: fzero.Engine) -> dict[str, Tensor | None]:
    return {name: engine.full_grad(name) for name, _ in engine.module.named_parameters()}


def _same(engine: fzero.Engine, expected: dict[str, Tensor | None]) -> None:
    found = _grads(engine)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=0, atol=0)


def _evaluate(engine: fzero.Engine) -> None:
    with torch.no_grad():
        engine(X)


def _drop(engine: fzero.Engine) -> None:
    engine.module.first.weight.grad = None  # pyright: ignore


def _pause(engine: fzero.Engine) -> None:
    with engine.no_sync():
        pass


CALLS: dict[str, Callable[[fzero.Engine], Any]] = {
    "engine(...)": _evaluate,
    "engine(...) was": lambda engine: engine(X),
    "the module": lambda engine: engine.module(X),
    "backward": lambda engine: engine.module.last.weight.square().sum().backward(),
    "engine.backward(loss)": lambda e: e.backward(e.module.last.weight.square().sum()),
    "engine.step()": lambda engine: engine.step(),
    "engine.zero_grad()": lambda engine: engine.zero_grad(),
    "zero_grad(), or p.grad = None,": _drop,
    "engine.no_sync()": _pause,
    "engine.full_params()": lambda engine: engine.full_params(),
    "engine.full_grad()": lambda engine: engine.full_grad("last.bias"),
    "engine.state_dict()": lambda engine: engine.state_dict(),
    "engine.load_state_dict()": lambda engine: engine.load_state_dict({}),
    "engine.state was read": lambda engine: engine.state,
    "engine.set_full_grad()": lambda engine: engine.set_full_grad("last.bias", torch.ones(2)),
    "engine.local_forward()": lambda engine: engine.local_forward().__enter__(),
}


@STAGES
@pytest.mark.parametrize(
    ("call", "where"),
    # for the pair that is left out see the next test
    [
        (call, where)
        for call in CALLS
        for where in PASSES
        if (call, where) != ("backward", "backward")
    ],
)
def test_a_second_thread_is_refused_and_the_first_loses_nothing(
    call: str, where: str, stage: int
) -> None:
    _, alone = _engine(stage)
    _loss(alone).backward()
    model, engine = _engine(stage)
    told: list[BaseException | None] = []
    hook = lambda: told.append(_elsewhere(lambda: CALLS[call](engine)))  # noqa: E731
    setattr(model, f"in_{where}", hook)
    _loss(engine).backward()
    (error,) = told
    assert isinstance(error, BackwardError)
    assert str(error).startswith(call)
    assert f"in thread 'second' while thread 'MainThread' is inside a {where} of" in str(error)
    assert "lock around forward, backward and step()" in str(error)
    _same(engine, _grads(alone))
    engine.step()
    alone.step()
    found, expected = engine.full_params(), alone.full_params()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@STAGES
@pytest.mark.parametrize("reaches", ["an output", "parameters alone"])
def test_a_backward_inside_another_threads_is_refused_or_counts_with_it(
    reaches: str, stage: int
) -> None:
    """On one rank no hook hears of parameters, once a backward has begun."""
    model, engine = _engine(stage)
    reached = reaches == "an output"
    losses = {"an output": _loss(engine), "parameters alone": model.first.weight.square().sum()}
    told: list[BaseException | None] = []
    model.in_backward = lambda: told.append(_elsewhere(losses[reaches].backward))
    _loss(engine).backward()
    assert (told[0] is not None) == reached
    assert not reached or "backward came to this engine in thread 'second'" in str(told[0])
    _, alone = _engine(stage)
    _loss(alone).backward()
    if not reached:
        alone.module.first.weight.square().sum().backward()
    for name, grad in _grads(alone).items():
        torch.testing.assert_close(engine.full_grad(name), grad)


def _broken(stage: int) -> list[str]:
    _, alone = _engine(stage)
    _loss(alone).backward()
    model, engine = _engine(stage)
    told: list[BaseException | None] = []
    penalty = model.first.weight.square().sum()
    model.in_backward = lambda: told.append(_elsewhere(penalty.backward))
    _loss(engine).backward()
    laws = {"it is told": "backward came to this engine in thread 'second'" in str(told[0])}
    for name, grad in _grads(alone).items():
        found = engine.full_grad(name)
        assert grad is not None
        laws[name] = found is not None and torch.equal(found, grad)
    return [law for law, holds in laws.items() if not holds]


@pytest.mark.parametrize("stage", [2, 3])
def test_where_a_backward_reduces_another_is_refused_in_any_case(stage: int) -> None:
    assert run_ranks(2, _broken, stage) == [[]] * 2


@STAGES
@pytest.mark.parametrize("grad", [False, True])
def test_a_backward_beside_another_threads_forward_is_refused(grad: bool, stage: int) -> None:
    """And counts, once it comes after it."""
    model, engine = _engine(stage)
    began, over = threading.Event(), threading.Event()
    model.in_forward = lambda: (began.set(), over.wait(30))

    def forward() -> None:
        with torch.set_grad_enabled(grad):
            engine(X)

    other = threading.Thread(target=forward, name="evaluates")
    other.start()
    assert began.wait(30)
    penalty = lambda: model.first.weight.square().sum()  # noqa: E731
    try:
        with pytest.raises(BackwardError, match="'MainThread' while thread 'evaluates' is inside"):
            penalty().backward()
        with pytest.raises(BackwardError, match=r"engine.step\(\) was called in thread"):
            engine.step()
    finally:
        over.set()
        other.join(30)
    assert _grads(engine) == dict.fromkeys(_grads(engine))
    penalty().backward()
    expected = 2 * engine.full_param("first.weight")
    torch.testing.assert_close(engine.full_grad("first.weight"), expected)


@STAGES
def test_an_update_is_nobody_elses_time_either(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _, engine = _engine(stage)
    _loss(engine).backward()
    told: list[BaseException | None] = []
    update = engine._parts.stepper.update

    def updates(*args: Any) -> Any:
        told.append(_elsewhere(lambda: engine.module.last.bias.sum().backward()))
        return update(*args)

    monkeypatch.setattr(engine._parts.stepper, "update", updates)
    engine.step()
    assert "'MainThread' is inside step() of this engine" in str(told[0])
    assert engine.global_steps == 1


@STAGES
def test_threads_may_take_turns(stage: int) -> None:
    """A forward in one, an evaluation in the second, a backward in a third, a step in a fourth."""
    _, alone = _engine(stage)
    _, engine = _engine(stage)
    losses: list[Tensor] = []
    for _ in range(2):
        _loss(alone).backward()
        alone.step()
        turns: list[Callable[[], Any]] = [
            lambda: losses.append(_loss(engine)),
            lambda: _evaluate(engine),
            lambda: engine.full_params(),
            lambda: losses[-1].backward(),
            lambda: engine.step(),
        ]
        assert [_elsewhere(turn) for turn in turns] == [None] * len(turns)
    found, expected = engine.full_params(), alone.full_params()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@STAGES
@pytest.mark.parametrize("where", ["in_forward", "in_backward"])
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize(
    ("first", "then"), [(_elsewhere, _here), (_here, _elsewhere), (_here, _here)]
)
def test_who_was_interrupted_or_is_gone_is_not_inside(
    first: Any, then: Any, direct: bool, where: str, stage: int
) -> None:
    def ctrl_c() -> None:
        raise KeyboardInterrupt

    _, alone = _engine(stage)
    _loss(alone).backward()
    model, engine = _engine(stage)
    setattr(model, where, ctrl_c)
    called, x = model if direct else engine, X.to(model.first.weight.dtype)
    # whose traceback holds the task that is over
    kept = first(lambda: called(x).square().mean().backward())
    assert isinstance(kept, KeyboardInterrupt)
    assert then(engine.zero_grad) is None
    assert then(lambda: _loss(engine).backward()) is None
    _same(engine, _grads(alone))


@STAGES
@pytest.mark.parametrize("depth", [2, 61, 130])
def test_a_thread_of_autograds_own_acts_for_the_one_that_called(depth: int, stage: int) -> None:
    """Backwards 60 deep inside each other go on in a thread of a pool's, 120 deep in a second."""
    here = threading.get_ident() if depth == 61 else None
    found: set[tuple[bool, int | None]] = set()

    def deep(layer: nn.Module, x: Tensor, depth: int) -> Tensor:
        if depth == 0:
            y = layer(x)
            if y.requires_grad:
                y.register_hook(lambda _: found.add((is_autograds_thread(), thread_of_task())))
            return y
        return checkpoint(deep, layer, x, depth - 1, use_reentrant=True)  # pyright: ignore

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return deep(self.layer, x, depth)

    model, plain = Deep(), Deep()
    precision = fzero.Precision(param=torch.float64) if stage == 3 else None
    if stage == 3:
        plain.double()
    cfg = fzero.Config(stage=stage, precision=precision)
    engine = fzero.Engine(model, fzero.optim.sgd(0.1), cfg)
    x = X.double() if stage == 3 else X
    for module in (engine, plain):
        module(x.clone().requires_grad_()).square().mean().backward()
    assert found == {(depth > 60, here)}
    for name, param in plain.named_parameters():
        torch.testing.assert_close(engine.full_grad(name), param.grad, check_dtype=False)
    engine.step()


@pytest.fixture
def quick() -> Iterator[None]:
    """Threads change places as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@STAGES
@pytest.mark.usefixtures("quick")
def test_of_threads_without_a_lock_every_backward_counts_or_is_told(stage: int) -> None:
    _, engine = _engine(stage)
    passed, unexpected = [0, 0], list[BaseException]()

    def run(index: int) -> None:
        for _ in range(40):
            try:
                _loss(engine).backward()
                passed[index] += 1
            except BaseException as error:
                if "one thread at a time may drive" not in str(error):
                    unexpected.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not unexpected
    _, alone = _engine(stage)
    _loss(alone).backward()
    assert sum(passed) > 0
    found = _grads(engine)
    for name, grad in _grads(alone).items():
        assert grad is not None
        torch.testing.assert_close(found[name], grad * sum(passed))


@STAGES
def test_with_a_lock_threads_share_an_engine(stage: int) -> None:
    lock = threading.Lock()
    _, engine = _engine(stage)
    _, alone = _engine(stage)
    raised: list[BaseException] = []

    def run() -> None:
        for _ in range(10):
            try:
                with lock:
                    _loss(engine).backward()
                    engine.step()
            except BaseException as error:
                raised.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not raised
    for _ in range(20):
        _loss(alone).backward()
        alone.step()
    found, expected = engine.full_params(), alone.full_params()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@STAGES
def test_a_backward_inside_an_evaluation_counts(stage: int) -> None:
    """No backward reaches an evaluation's output: what came inside of it waits for none."""
    model, engine = _engine(stage)

    def trains() -> None:
        with torch.enable_grad():
            model.first.weight.square().sum().backward()

    model.in_forward = trains
    _evaluate(engine)
    expected = 2 * engine.full_param("first.weight")
    torch.testing.assert_close(engine.full_grad("first.weight"), expected)
    engine.step()
