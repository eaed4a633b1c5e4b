"""What moves an engine: nothing but its engine keeps it alive, and users meet the engine alone."""

import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fzero
from benchmarks.allocations import measure
from fzero.distributed.ragged import is_supported
from fzero.eager.owned import raw_grad, set_raw_grad
from fzero.engine import autograd, driver, phases
from fzero.engine.autograd import take_left
from fzero.errors import BackwardError
from tests.engine.parity import SGD
from tests.ranks import fake_ranks

# stage 3 on one rank has lazy parameters with a compute dtype only
KINDS: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 1, "accum_steps": 2},
    {"stage": 2},
    {"stage": 3, "precision": "bf16"},
]

SURFACE = {
    *("backward", "scale", "no_sync", "step", "zero_grad", "is_gradient_accumulation_boundary"),
    *("eval", "train", "local_forward", "gathered", "join", "has_data"),
    *("state", "state_dict", "load_state_dict", "full_params", "full_grad", "parameters"),
    *("full_param", "set_full_grad", "local_grad", "set_local_grad"),
    *(
        "module",
        "cfg",
        "device",
        "lr",
        "momentum",
        "metrics",
        "global_steps",
        "release",
        "optimizer",
    ),
}


@pytest.mark.parametrize("fields", KINDS)
def test_module_parameters_and_graph_do_not_keep_it_alive(fields: dict[str, Any]) -> None:
    model = nn.Linear(3, 2)
    engine = fzero.Engine(model, SGD(), fzero.Config(**fields))
    out = engine(torch.ones(2, 3))
    out.sum().backward(retain_graph=True)
    driver = weakref.ref(engine._driver)
    del engine
    assert driver() is None
    out.sum().backward()  # what is left of it tells nobody
    assert model.weight.grad is not None


def test_a_forward_that_is_collected_in_the_middle_of_an_event_is_told_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The collector may come anywhere: the state that an event leads to must not be lost."""
    engine = fzero.Engine(nn.Linear(3, 2), SGD())
    inner = engine._driver
    inner.reducer.early[7] = {}
    seen: list[str] = []

    def transition(rules: Any, state: Any, event: Any) -> Any:
        if not seen:
            inner.forward_gone(7)
            threading.Thread(target=inner.forward_gone, args=(8,)).run()
        seen.append(type(event).__name__)
        return phases.transition(rules, state, event)

    monkeypatch.setattr(driver, "transition", transition)
    engine(torch.ones(2, 3)).sum()
    assert seen[:2] == ["ForwardStarted", "ForwardGone"]
    assert not inner._gone
    assert not inner.state.running


def test_the_public_names_of_an_engine_are_what_it_documents() -> None:
    engine = fzero.Engine(nn.Linear(3, 2))
    assert {name for name in dir(engine) if not name.startswith("_")} == SURFACE


def test_of_a_task_that_is_not_synced_the_first_arrival_is_told_alone() -> None:
    """The others are noted without a line of Python; each task begins anew."""
    engine = fzero.Engine(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), SGD())
    inner = engine._driver
    for _ in range(2):
        with mock.patch.object(inner, "arrived", wraps=inner.arrived) as arrived:
            engine.backward(engine(torch.ones(1, 3)).sum())
        assert arrived.call_count == 1
        assert len(inner._hooks) == 1  # it hears again
        assert all(map(inner.holds, range(4)))
        engine.step()


def test_a_task_whose_one_gradient_was_told_leaves_nothing_noted() -> None:
    model = nn.Linear(3, 1, bias=False)
    engine = fzero.Engine(model, SGD())
    for _ in range(2):  # no loss of the engine's own forward opens the task
        model.weight.square().sum().backward()
        engine.step()
    assert engine.global_steps == 2


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("none", [False, True])
def test_a_loss_of_parameters_alone_comes_to_the_engine(world: int, none: bool) -> None:
    """No output tells of it: a gradient does, or that a function had none to give."""

    class Gives(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:  # pyright: ignore
            return weight.square().sum()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore
            return None if none else torch.ones(1, 3)

    with fake_ranks(world):
        model = nn.Linear(3, 1, bias=False)
        engine = fzero.Engine(model, SGD(), fzero.Config(stage=2))
        for _ in range(3):  # from the second step on its gradients are awaited
            engine.backward(Gives.apply(model.weight))  # pyright: ignore
            if not none:
                engine.step()
        with pytest.raises(fzero.BackwardError, match="came to no parameter and no output"):
            engine.backward(torch.ones(1, requires_grad=True) * 2)
        assert engine.global_steps == (0 if none else 3)


def test_gradients_that_can_not_be_taken_leave_none_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the next backward would accumulate on top of them."""

    def out_of_memory(grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory")

    def weights(*, fails: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        engine = fzero.Engine(model, fzero.optim.sgd(0.1), fzero.Config(accum_steps=2))
        if fails:
            loss = engine(torch.ones(1, 3)).sum()
            with monkeypatch.context() as patch:
                patch.setattr(autograd, "own", out_of_memory)
                with pytest.raises(RuntimeError, match="out of memory"):
                    engine.backward(loss)
        for _ in range(2):
            engine.backward(engine(torch.ones(1, 3)).sum())
            engine.step()
        return [*engine.full_params().values()]

    assert all(map(torch.equal, weights(fails=True), weights(fails=False)))


def test_after_a_backward_that_raised_gradients_are_heard_again() -> None:
    """Also of one that reaches no output of the engine's, which would open its task."""

    def broken(grad: torch.Tensor) -> None:
        raise RuntimeError("broken")

    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    engine = fzero.Engine(model, SGD())
    handle = model[0].weight.register_hook(broken)  # pyright: ignore[reportCallIssue]
    with pytest.raises(RuntimeError, match="broken"):
        engine.backward(engine(torch.ones(1, 3)).sum())
    handle.remove()
    torch.stack([x.square().sum() for x in model.parameters()]).sum().backward()
    engine.step()
    assert engine.global_steps == 1


def test_of_two_gradients_in_one_memory_one_is_copied() -> None:
    memory = torch.ones(4).untyped_storage()
    engine = fzero.Engine(nn.ParameterList([nn.Parameter(torch.zeros(4)) for _ in range(3)]))
    params = engine._driver.params
    for param in (params[0], params[1]):
        set_raw_grad(param, torch.empty(0).set_(memory, 0, (4,)))  # pyright: ignore[reportCallIssue]
    at = memory.data_ptr()
    del memory
    grads = take_left(params, alone=True)
    assert [x.data_ptr() == at for x in grads.values()] == [False, True]
    assert all(raw_grad(param) is None for param in params.values())


def test_a_hook_of_a_user_s_is_on_one_parameter_alone() -> None:
    """An engine's are on all of them at once."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    engine = fzero.Engine(model, SGD())
    seen: list[torch.Tensor] = []
    first, *others = model.parameters()
    with pytest.raises(BackwardError, match="past the parameter's own method"):
        torch.Tensor.register_post_accumulate_grad_hook(first, seen.append)
    engine.backward(engine(torch.ones(1, 3)).sum())
    engine.step()
    del engine
    gc.collect()
    for param in (first, others[0]):  # after an engine that is gone
        param.register_post_accumulate_grad_hook(seen.append)
    first.register_post_accumulate_grad_hook(seen.append)
    fzero.Engine(nn.Sequential(nn.Linear(1, 1)))  # another's are none of its business
    model(torch.ones(1, 3)).sum().backward()
    assert sorted(map(id, seen)) == sorted(map(id, (first, first, others[0])))


@pytest.mark.skipif(not is_supported(), reason="flats need torch 2.13")
def test_at_stage_2_gradients_go_as_they_are_packed() -> None:
    """At the end of backward all gradients are there, and beside them one flat and two parts."""
    width, blocks = 640, 16

    def make() -> Callable[[], None]:
        layers = [nn.Linear(width, width, bias=False) for _ in range(blocks)]
        engine = fzero.Engine(nn.Sequential(*layers), fzero.optim.sgd(0.1), fzero.Config(stage=2))
        x = torch.ones(1, width)

        def step() -> None:
            engine.backward(engine(x).square().mean())
            engine.step()

        return step

    with fake_ranks(8):
        used, _ = measure(make, warm=2)
    block = 4 * width * width
    flat = 3 * block  # the nearest end of a block to 4 MiB
    assert used.peak - used.between <= (blocks * block + flat * (1 + 2 / 8)) * 1.005


def test_gradients_that_are_dropped_before_each_update_are_told_of_once() -> None:
    """As in a loop that zeroes before each backward, where `accum_steps` expects several."""
    engine = fzero.Engine(nn.Linear(3, 1), SGD(), fzero.Config(accum_steps=2))

    def run(micro: int, *, zeroes: bool) -> list[str]:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(micro):
                if zeroes:
                    engine.zero_grad()
                engine(torch.ones(1, 3)).sum().backward()
                engine.step()
        assert all(x.filename == __file__ for x in told)
        return [str(x.message) for x in told]

    (said,) = run(6, zeroes=True)
    assert "accum_steps=2" in said
    assert engine.global_steps == 0
    engine.zero_grad()
    assert run(4, zeroes=False) == []
    assert engine.global_steps == 2
    for _ in range(3):  # of an epoch's last, say
        assert run(1, zeroes=True) == []
        engine.zero_grad()
        assert run(2, zeroes=False) == []
    assert engine.global_steps == 5


def _sequence(seed: int, *, plain: bool, words: list[str]) -> list[torch.Tensor]:
    """Weights after backwards with and without a forward between, reads, and raises."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    params = [*model.parameters()]
    engine = None if plain else fzero.Engine(model, fzero.optim.sgd(0.1))
    optimizer = torch.optim.SGD(params, 0.1)
    graph = (model if engine is None else engine)(torch.randn(4, 3).double()).square().sum()
    graph.backward(retain_graph=True)
    for word in words:
        before = [None if x.grad is None else x.grad.clone() for x in params] if plain else []
        handle = None
        if word == "forward":
            graph = (model if engine is None else engine)(torch.randn(4, 3).double()).sum()
        elif word == "read":
            assert all(x.grad is not None for x in model.parameters())
        elif word == "raises":  # once the output is reached, nothing is added to
            handle = model[0].weight.register_hook(_broken)  # pyright: ignore
            with pytest.raises(RuntimeError, match="broken"):
                graph.backward(retain_graph=True)
            for x, grad in zip(params, before, strict=False):
                x.grad = grad
        elif word == "part":
            model[2](torch.ones(1, 2).double()).sum().backward()
        elif word == "penalty":
            torch.stack([x.square().sum() for x in model.parameters()]).sum().backward()
        else:
            graph.backward(retain_graph=True)
        if handle is not None:
            handle.remove()
    if engine is None:
        optimizer.step()
        return [x.detach() for x in params]
    engine.step()
    return [*engine.full_params().values()]


def _broken(grad: torch.Tensor) -> None:
    raise RuntimeError("broken")


@settings(max_examples=50)
@given(
    st.integers(0, 3),
    st.lists(st.sampled_from(["forward", "read", "raises", "part", "penalty", "again"])),
)
def test_gradients_of_a_step_are_added_up_as_plain_pytorch_s(seed: int, words: list[str]) -> None:
    """Of backwards with a forward between and without, and of one that raised nothing."""
    mine, theirs = (_sequence(seed, plain=plain, words=words) for plain in (False, True))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)
