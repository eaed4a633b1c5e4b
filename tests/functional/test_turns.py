"""Threads that share a module get what each would get alone, or an error that names them."""

import copy
import gc
import pickle
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fzero
from fzero import ShardError, functionalize
from fzero.functional import turns
from fzero.functional.turns import Turn, turn_of


@pytest.fixture(autouse=True)
def _switches() -> Iterator[None]:
    """Threads change places as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def _together(*functions: Callable[[], Any]) -> list[Any]:
    """What each gives, or the error that it raises, in a thread of its own."""
    found: list[Any] = [None] * len(functions)

    def run(i: int) -> None:
        try:
            found[i] = functions[i]()
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return found


def _net() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))


@pytest.mark.parametrize("shared", ["apply", "module", "a part"])
def test_each_thread_computes_with_its_parameters(shared: str) -> None:
    module, x = _net(), torch.randn(2, 8)
    own = dict(module.named_parameters())
    part = nn.Sequential(module[1], module[3])
    functions = [functionalize(module)] * 2
    if shared != "apply":
        functions[1] = functionalize(module if shared == "module" else part)

    roots = [module, module if shared != "a part" else part]
    alone = [copy.deepcopy(root) for root in roots]

    def calls(i: int) -> int:
        apply, params = functions[i]
        params = {name: p * (i + 1) for name, p in params.items()}
        want = functionalize(alone[i])[0](params, x)
        return sum(not torch.equal(apply(params, x), want) for _ in range(300))

    assert _together(lambda: calls(0), lambda: calls(1)) == [0, 0]
    assert all(p is own[name] for name, p in module.named_parameters())


@pytest.mark.parametrize("executor", ["traced", "eager"])
def test_an_evaluation_beside_training_changes_nothing(executor: Any) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), fzero.opaque(nn.Linear(8, 4)))
    apply, start, buffers = functionalize(module, buffers=True)

    def model_fn(params: Any, state: Any, x: Tensor) -> Any:
        out, new = apply(params, state, x)
        return out.square().mean(), new

    step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(0.1), fzero.Config(executor=executor))

    def train() -> list[float]:
        params, opt_state = step_fn.init(start, model_state=buffers)
        losses = []
        for i in range(30):
            params, opt_state = step_fn(params, opt_state, torch.ones(4, 8) * (i % 3))
            losses.append(opt_state.metrics["loss"].item())
        return losses

    alone, over = train(), threading.Event()
    zeros, x = {name: torch.zeros_like(p) for name, p in start.items()}, torch.ones(4, 8)
    want = apply(zeros, buffers, x)[0]

    def evaluate() -> int:
        wrong = 0
        while not over.is_set():
            wrong += not torch.equal(apply(zeros, buffers, x)[0], want)
        return wrong

    def training() -> list[float]:
        try:
            return train()
        finally:
            over.set()

    assert _together(training, evaluate) == [alone, 0]


def test_what_a_call_leaves_is_there_until_its_function_ends() -> None:
    class Leaves(nn.Linear):
        aux: Any = 0.0

        def forward(self, input: Tensor) -> Tensor:
            self.aux = self.aux + super().forward(input).sum()
            return input

    module = Leaves(2, 2)
    apply, params = functionalize(module)
    called, seen = threading.Event(), []
    x = torch.ones(1, 2)

    def reads(params: Any, x: Tensor) -> Tensor:
        apply(params, x)
        called.set()
        time.sleep(0.2)  # in which the other would come
        seen.append("read")
        return module.aux * 1.0

    def other() -> None:
        called.wait(60)
        apply({name: p * 3 for name, p in params.items()}, x)
        seen.append("other")

    fn = fzero.sharded(reads, fzero.Config(executor="eager"))
    want = F.linear(x, params["weight"], params["bias"]).sum()
    found, _ = _together(lambda: fn(params, x), other)
    torch.testing.assert_close(found, want)
    assert seen == ["read", "other"]
    assert "aux" not in vars(module)


def test_of_two_threads_that_wait_for_each_other_one_is_told() -> None:
    class Calls(nn.Linear):
        then: Callable[[], Any] = staticmethod(lambda: None)

        def forward(self, input: Tensor) -> Tensor:
            self.then()
            return super().forward(input)

    modules = [Calls(2, 2), Calls(2, 2)]
    (first, p), (second, q) = map(functionalize, modules)
    x, both = torch.ones(1, 2), threading.Barrier(2)
    inner = [functionalize(module) for module in modules]

    def crossing(other: int) -> Callable[[], Any]:
        def then() -> None:
            if both.n_waiting < 2 and not met.is_set():
                both.wait(60)
                met.set()
                inner[other][0](inner[other][1], x)

        return then

    met = threading.Event()
    modules[0].then, modules[1].then = crossing(1), crossing(0)
    found = _together(lambda: first(p, x), lambda: second(q, x))
    errors = [x for x in found if isinstance(x, Exception)]
    assert len(errors) == 1
    assert isinstance(errors[0], ShardError)
    assert "waits for a Calls, inside of which thread 'Thread-" in str(errors[0])
    assert "functionalize(copy.deepcopy(module))" in str(errors[0])
    for apply, params in ((first, p), (second, q)):  # nobody has kept a turn
        assert apply(params, x).shape == x.shape


def test_a_forward_that_waits_for_a_thread_in_its_module_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns, "WARN_AFTER", 0.1)
    monkeypatch.setattr(turns, "RAISE_AFTER", 0.3)

    class Spawns(nn.Linear):
        spawns = True

        def forward(self, input: Tensor) -> Tensor:
            if Spawns.spawns:
                Spawns.spawns = False
                found.extend(_together(lambda: apply(params, input)))
            return super().forward(input)

    found: list[Any] = []
    apply, params = functionalize(Spawns(2, 2))
    with pytest.warns(UserWarning, match="waits for a Spawns, inside of which thread 'MainThread'"):
        apply(params, torch.ones(1, 2))
    assert isinstance(found[0], ShardError)
    assert "thread 'Thread-" in str(found[0])


def test_autograds_thread_of_a_device_goes_on_for_who_waits_for_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turn, found = Turn("a module"), []
    x = torch.ones(1, requires_grad=True)
    owner = threading.get_ident()

    def enters() -> None:
        with turn:
            found.append("inside")

    def hook(_: Tensor) -> None:
        # a CPU's backward runs in the thread that asks for it: another stands for a device's
        monkeypatch.setattr(turns, "in_engines_thread", lambda: True)
        monkeypatch.setattr(turns, "in_backward_of", lambda ident: ident == owner)
        _together(enters)

    y = x * 2
    y.register_hook(hook)
    with turn:
        torch.autograd.grad(y, x)
        assert turn.is_taken
    assert found == ["inside"]
    assert not turn.is_taken


def test_a_copy_has_another_turn_and_a_pickle_none() -> None:
    module = _net()
    functionalize(module)

    def turn(module: nn.Module) -> Any:
        return turn_of((x.__dict__ for x in module.modules()), "a module")

    mine, copied = turn(module), turn(copy.deepcopy(module))
    assert isinstance(copied, Turn)  # one for all of its parts, too
    assert mine is not copied
    loaded = pickle.loads(pickle.dumps(module))
    assert b"fzero.functional" not in pickle.dumps(module)
    apply, params = functionalize(loaded)
    assert apply(params, torch.ones(1, 8)).shape == (1, 8)


def test_a_turn_keeps_no_module() -> None:
    module = _net()
    apply, params = functionalize(module)
    apply(params, torch.ones(1, 8))
    gone = weakref.ref(module)
    del apply, params, module
    gc.collect()
    assert gone() is None


def test_a_module_that_was_functionalised_loads_with_weights_alone(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    functionalize(module)
    torch.save(module, tmp_path / "module")
    with torch.serialization.safe_globals([nn.Linear, set]):
        loaded = torch.load(tmp_path / "module", weights_only=True)
    apply, params = functionalize(loaded)
    assert torch.equal(apply(params, torch.ones(2)), module(torch.ones(2)))


@pytest.mark.parametrize("event", ["call", "line", "return"])
def test_an_interrupt_of_a_turn_leaves_it_to_its_thread(event: str) -> None:
    """At each line of entering and leaving: the same thread always goes on at once."""
    lines = 0
    for stop in range(40):
        turn, seen = Turn("the module"), 0

        def interrupt(frame: Any, what: str, arg: Any, stop: int = stop) -> Any:
            nonlocal seen
            if frame.f_code.co_filename != turns.__file__:
                return None
            if what == event:
                seen += 1
                if seen == stop + 1:
                    raise KeyboardInterrupt
            return interrupt

        sys.settrace(interrupt)
        try:
            with turn:
                pass
        except KeyboardInterrupt:
            lines += 1
        finally:
            sys.settrace(None)
        with turn:
            assert turn.is_taken
    assert lines
