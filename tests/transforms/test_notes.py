"""A recorded step never goes stale: what functions read from outside is compared at each call."""

import argparse
import array
import collections
import contextlib
import copy
import dataclasses
import enum
import functools
import math
import multiprocessing
import pickle
import random
import sys
import threading
import types
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

import fzero
from fzero.errors import FzeroError, TraceError
from fzero.program import Program
from fzero.step.train_step import TrainStep
from fzero.transforms.notes import Notes
from fzero.transforms.recorded import MAX_RECORDINGS

X = torch.ones(2, 3)
EXECUTORS = ("traced", "eager")


def base(params: Any, batch: Tensor) -> Tensor:
    return (params["w"] * batch).sum()  # 6 for X


def made(model_fn: Any, opt: Any = None, **cfg: Any) -> tuple[TrainStep, list[Any]]:
    step_fn = fzero.make_train_step(model_fn, opt or fzero.optim.sgd(0.0), fzero.Config(**cfg))
    return step_fn, list(step_fn.init({"w": torch.ones(3)}))


def loss(step_fn: TrainStep, state: list[Any], batch: Tensor = X) -> float:
    state[:] = step_fn(*state, batch)
    return state[1].metrics["loss"].item()


# ------------------------------------------------------------- where a factor can be read from
class Kind(enum.Enum):
    LOW, HIGH = 1.0, 3.0


class Settings:
    factor: Any = 1.0


FACTOR: Any = 1.0
USERS = types.ModuleType("users_settings")

Case = tuple[Callable[..., Tensor], Callable[[float], None]]


def closure() -> Case:
    factor = 1.0

    def write(value: float) -> None:
        nonlocal factor
        factor = value

    return lambda p, x: base(p, x) * factor, write


def a_global() -> Case:
    def write(value: float) -> None:
        global FACTOR
        FACTOR = value

    return lambda p, x: base(p, x) * FACTOR, write


def a_modules_attribute() -> Case:
    vars(USERS)["factor"] = 1.0
    return lambda p, x: base(p, x) * USERS.factor, lambda v: setattr(USERS, "factor", v)


def a_class() -> Case:
    return lambda p, x: base(p, x) * Settings.factor, lambda v: setattr(Settings, "factor", v)


def through_an_object() -> Case:
    held = Settings()
    return lambda p, x: base(p, x) * held.factor, lambda v: setattr(Settings, "factor", v)


def shadowing_its_class() -> Case:
    held = Settings()
    return lambda p, x: base(p, x) * held.factor, lambda v: setattr(held, "factor", v)


def computed_name() -> Case:
    held = Settings()
    name = "".join(["fac", "tor"])
    return lambda p, x: base(p, x) * getattr(held, name), lambda v: setattr(held, "factor", v)


def all_attributes() -> Case:
    held = argparse_like()
    return lambda p, x: base(p, x) * sum(vars(held).values()), lambda v: setattr(held, "t", v)


def argparse_like() -> Any:
    held = type("Namespace", (), {})()
    held.t = 1.0
    return held


def nested_namespace() -> Case:
    held = SimpleNamespace(inner=SimpleNamespace(t=1.0))
    return lambda p, x: base(p, x) * held.inner.t, lambda v: setattr(held.inner, "t", v)


def default() -> Case:
    def model_fn(p: Any, x: Tensor, t: float = 1.0) -> Tensor:
        return base(p, x) * t

    return model_fn, lambda v: setattr(model_fn, "__defaults__", (v,))


def keyword_default() -> Case:
    def model_fn(p: Any, x: Tensor, *, t: Any = SimpleNamespace(v=1.0)) -> Tensor:  # noqa: B008
        return base(p, x) * t.v

    held = SimpleNamespace(v=1.0)
    model_fn.__kwdefaults__ = {"t": held}
    return model_fn, lambda v: setattr(held, "v", v)


def slots() -> Case:
    class Holder:
        __slots__ = ("t",)

    held = Holder()
    held.t = 1.0
    return lambda p, x: base(p, x) * held.t, lambda v: setattr(held, "t", v)


def copied(of: Callable[[Any], Any], make: Callable[[], Any]) -> Callable[[], Case]:
    def case() -> Case:
        held = make()
        held.t = 1.0
        return lambda p, x: base(p, x) * of(held).t, lambda v: setattr(held, "t", v)

    return case


def has(args: Any) -> Case:
    def write(value: float) -> None:
        vars(args).clear()
        vars(args).update({str(i): i for i in range(1, int(value))})

    return lambda p, x: base(p, x) * (1 + sum(str(i) in args for i in range(1, 4))), write


def equals(args: Any) -> Case:
    def model_fn(p: Any, x: Tensor) -> Tensor:
        return base(p, x) * next(t for t in (1.0, 2.0, 3.0) if args == argparse.Namespace(t=t))

    return model_fn, lambda v: setattr(args, "t", v)


class Slot:
    __slots__ = ("t",)


@dataclasses.dataclass
class Rate:
    t: float = 1.0


def behind_a_property() -> Case:
    class Holder:
        hidden = 1.0

        @property
        def t(self) -> float:
            return self.hidden

    held = Holder()
    return lambda p, x: base(p, x) * held.t, lambda v: setattr(held, "hidden", v)


def a_dataclass() -> Case:
    held = dataclasses.make_dataclass("Holder", [("t", float)])(1.0)
    return lambda p, x: base(p, x) * held.t, lambda v: setattr(held, "t", v)


def an_enum() -> Case:
    held = {"kind": Kind.LOW}
    return lambda p, x: base(p, x) * held["kind"].value, lambda v: held.update(kind=Kind(v))


def a_method() -> Case:
    class Trainer:
        def __init__(self) -> None:
            self.table, self.step = {"k": [1.0]}, 0

        def helper(self) -> float:
            return self.table["k"][0]

        def loss(self, p: Any, x: Tensor) -> Tensor:
            return base(p, x) * self.helper()

    held = Trainer()
    return held.loss, lambda v: held.table["k"].__setitem__(0, v)


def a_callable() -> Case:
    class Model:
        t = 1.0

        def __call__(self, p: Any, x: Tensor) -> Tensor:
            return base(p, x) * self.t

    held = Model()
    return held, lambda v: setattr(held, "t", v)


def a_partial() -> Case:
    held = {"t": 1.0}
    return functools.partial(lambda h, p, x: base(p, x) * h["t"], held), lambda v: held.update(t=v)


def a_tensor_in_place() -> Case:
    held = torch.ones(())
    return lambda p, x: base(p, x) * held, lambda v: held.fill_(v) and None


def a_tensor_replaced() -> Case:
    held = [torch.ones(())]
    return lambda p, x: base(p, x) * held[0], lambda v: held.__setitem__(0, torch.tensor(v))


def a_tensor_by_data() -> Case:
    held = torch.ones(())
    return lambda p, x: base(p, x) * held, lambda v: setattr(held, "data", torch.tensor(v))


def a_tensor_read_by_python() -> Case:
    held = torch.ones(())
    return lambda p, x: base(p, x) * float(held * 1), lambda v: held.fill_(v) and None


def an_array() -> Case:
    held = np.ones(1)
    return lambda p, x: base(p, x) * float(held[0]), lambda v: held.fill(v)


def in_an_array_of_objects() -> Case:
    held = {"t": 1.0}
    array = np.array([held, None], dtype=object)
    return lambda p, x: base(p, x) * array[0]["t"], lambda v: held.update(t=v)


def bytes_in_place() -> Case:
    held = bytearray([1])
    return lambda p, x: base(p, x) * held[0], lambda v: held.__setitem__(0, int(v))


def an_array_of_python() -> Case:
    held = array.array("d", [1.0])
    return lambda p, x: base(p, x) * held[0], lambda v: held.__setitem__(0, v)


def a_number_of_several_processes() -> Case:
    held: Any = multiprocessing.Value("d", 1.0)
    return lambda p, x: base(p, x) * held.value, lambda v: setattr(held, "value", v)


def the_class_of_an_object() -> Case:
    class Other(Settings):
        factor = 3.0

    held = Settings()
    return lambda p, x: base(p, x) * held.factor, lambda v: setattr(held, "__class__", Other)


def the_shape_of_a_tensor() -> Case:
    held = torch.ones(1)

    def write(value: float) -> None:
        held.resize_(int(value))

    return lambda p, x: base(p, x) * held.shape[0], write


def the_dtype_of_a_tensor() -> Case:
    held = torch.ones(1)

    def model_fn(p: Any, x: Tensor) -> Tensor:
        return base(p, x) * (1.0 if held.dtype == torch.float32 else 3.0)

    return model_fn, lambda v: setattr(held, "data", held.double())


def what_a_tensor_requires() -> Case:
    held = torch.ones(1)

    def model_fn(p: Any, x: Tensor) -> Tensor:
        return base(p, x) * (3.0 if held.requires_grad else 1.0)

    return model_fn, lambda v: held.requires_grad_() and None


def a_function_replaced() -> Case:
    class Holder:
        f = staticmethod(lambda: 1.0)

    return lambda p, x: base(p, x) * Holder.f(), lambda v: setattr(
        Holder, "f", staticmethod(lambda: v)
    )


def a_deque() -> Case:
    held = collections.deque([1.0], maxlen=1)
    return lambda p, x: base(p, x) * held[-1], lambda v: held.append(v)


def a_context_variable() -> Case:
    held: ContextVar[float] = ContextVar("held", default=1.0)
    return lambda p, x: base(p, x) * held.get(), held.set


def a_dict_with_attributes() -> Case:
    class Table(dict[str, float]):
        def __getattr__(self, name: str) -> float:
            return self[name]

    held = Table(t=1.0)
    return lambda p, x: base(p, x) * held.t, lambda v: held.update(t=v)


def in_a_staged_part() -> Case:
    held = {"t": 1.0}
    part = fzero.stage(lambda p, x: base(p, x) * held["t"])
    return lambda p, x: part(p, x), lambda v: held.update(t=v)


class Thrice(nn.Identity):
    def forward(self, input: Tensor) -> Tensor:
        return input * 3


class Scaled(nn.Module):
    """`weight @ x`, times what the module holds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.t = nn.Parameter(torch.ones(3)), 1.0
        self.part = nn.Identity()
        self.register_buffer("buffer", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.weight * x).sum() * self.t * self.buffer


def of_module(write: Callable[[Scaled, float], Any]) -> Callable[[], Case]:
    def case() -> Case:
        module = Scaled()
        apply, _ = fzero.functionalize(module)
        return lambda p, x: apply({"weight": p["w"]}, x), lambda v: write(module, v) and None

    return case


def hooked(module: Scaled, value: float) -> None:
    module.part._forward_hooks.clear()
    if value != 1.0:
        module.part.register_forward_hook(lambda m, i, o: o * value)


CASES: dict[str, Callable[[], Case]] = {
    f.__name__: f
    for f in (
        *(closure, a_global, a_modules_attribute, a_class, through_an_object, shadowing_its_class),
        *(computed_name, all_attributes, nested_namespace, default, keyword_default, slots),
        *(behind_a_property, a_dataclass, an_enum, a_method, a_callable, a_partial),
        *(a_tensor_in_place, a_tensor_replaced, a_tensor_by_data, a_tensor_read_by_python),
        *(an_array, a_function_replaced, a_deque, a_dict_with_attributes, in_a_staged_part),
        *(in_an_array_of_objects, bytes_in_place, an_array_of_python, the_class_of_an_object),
        *(a_number_of_several_processes, the_shape_of_a_tensor, the_dtype_of_a_tensor),
        *(what_a_tensor_requires, a_context_variable),
    )
} | {
    "module_attribute": of_module(lambda m, v: setattr(m, "t", v)),
    "module_buffer_replaced": of_module(lambda m, v: setattr(m, "buffer", torch.tensor(v))),
    "module_buffer_in_place": of_module(lambda m, v: m.buffer.fill_(v)),
    "module_hook": of_module(hooked),
    "copy": copied(copy.copy, argparse_like),
    "deep_copy": copied(copy.deepcopy, argparse_like),
    "deep_copy_within": copied(lambda held: copy.deepcopy([{"a": held}])[0]["a"], Rate),
    "copy_of_slots": copied(copy.copy, Slot),
    "has_an_attribute": lambda: has(argparse.Namespace()),
    "equals": lambda: equals(argparse.Namespace(t=1.0)),
    "pickled": copied(lambda held: pickle.loads(pickle.dumps(held)), Rate),
    "module_class": of_module(lambda m, v: setattr(m.part, "__class__", Thrice)),
}


@pytest.fixture(autouse=True)
def _settings() -> Any:
    global FACTOR
    FACTOR = Settings.factor = 1.0
    yield
    FACTOR = Settings.factor = 1.0


@pytest.mark.parametrize("name", CASES)
def test_what_is_read_from_outside_counts_at_every_call(name: str) -> None:
    model_fn, write = CASES[name]()
    step_fn, state = made(model_fn)
    seen = [loss(step_fn, state), loss(step_fn, state)]
    recorded = len(step_fn._executors._traced)
    write(3.0)
    seen.append(loss(step_fn, state))
    assert seen == [6.0, 6.0, 18.0]
    assert recorded == 1


@settings(max_examples=8)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([1.0, 2.0])), max_size=6))
def test_a_step_is_plain_python_whatever_changes_between_calls(
    writes: list[tuple[str, float]],
) -> None:
    held = Settings()
    held.factor = {"a": 1.0, "b": [1.0]}
    module = nn.Dropout(0.0)
    module.c = 1.0  # pyright: ignore

    def model_fn(p: Any, x: Tensor) -> Tensor:
        return base(p, module(x)) * held.factor["a"] * held.factor["b"][0] * module.c

    step_fn, state = made(model_fn)
    keys = set()
    for where, value in [("a", 1.0), *writes]:
        if where == "c":
            module.c = value  # pyright: ignore
        else:
            held.factor[where] = value if where == "a" else [value]
        keys.add((held.factor["a"], held.factor["b"][0], module.c))
        assert loss(step_fn, state) == float(model_fn({"w": torch.ones(3)}, X))
    recorded = len(step_fn._executors._traced)
    assert recorded == len(keys)  # earlier ones are used again


# of every layout, and one that isn't equal to itself
LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "coo": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "csc": lambda: torch.eye(3).to_sparse_csc(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)]),
    "nan": lambda: torch.tensor([1.0, math.nan]),
}


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested:UserWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("executor", EXECUTORS)
def test_values_of_every_layout_are_compared(executor: Any, layout: str) -> None:
    shown, calls = LAYOUTS[layout](), list[int]()

    def model_fn(params: Any, x: Tensor) -> Tensor:
        calls.append(len(str(shown)))
        return (params["w"] * x).sum()

    step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(0.5), fzero.Config(executor=executor))
    state = step_fn.init({"w": torch.ones(3)})
    state = step_fn(*state, torch.ones(3))
    first = len(calls)
    state = step_fn(*state, torch.ones(3))
    assert len(calls) == (first if executor == "traced" else first + 1)
    values = shown.values() if layout in ("csr", "csc", "bsr") else shown
    (shown._values() if layout == "coo" else values).mul_(3)
    for part in values.unbind() if layout == "nested" else ():
        part.mul_(3)
    step_fn(*state, torch.ones(3))
    assert len(calls) > (first if executor == "traced" else first + 1)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_tensors_without_values_may_be_shown(executor: Any, tmp_path: Path) -> None:
    nothing = torch.empty(3, device="meta")

    def labels(params: Any) -> Any:  # which are of meta
        return {name: str(x)[:6] for name, x in params.items()}

    def model_fn(params: Any, x: Tensor) -> Tensor:
        assert str(nothing)
        return (params["w"] * x[: nothing.shape[0]]).sum()

    opt = fzero.optim.multi_transform({"tensor": fzero.optim.sgd(0.5)}, labels)
    step_fn = fzero.make_train_step(model_fn, opt, fzero.Config(executor=executor))
    state = step_fn.init({"w": torch.ones(3)})
    for _ in range(3):
        state = step_fn(*state, torch.ones(3))
    assert fzero.unshard(state[0])["w"].tolist() == [-0.5] * 3
    if executor == "traced":
        step_fn.save_programs(tmp_path / "programs")


def test_modes_of_a_module_count() -> None:
    module = nn.Sequential(nn.Linear(3, 64), nn.Dropout(0.5), nn.Linear(64, 1))
    apply, params = fzero.functionalize(module)
    step_fn = fzero.make_train_step(lambda p, x: apply(p, x).sum(), fzero.optim.sgd(0.0))
    state = list(step_fn.init(params))
    losses = []
    for training in (True, False, True, False):
        module.train(training)
        losses.append(loss(step_fn, state))
    want = apply(params, X).sum().item()
    assert losses[1] == losses[3] == pytest.approx(want, rel=1e-6)
    assert want not in losses[::2]
    assert len({kind for kind, _ in step_fn._executors._traced}) == 1
    assert len(step_fn._executors._traced) == 2


@pytest.mark.parametrize("recorded", [False, True])
def test_anomaly_mode_is_refused_where_nobody_would_look(recorded: bool) -> None:
    step_fn, state = made(base)
    if recorded:
        loss(step_fn, state)
    with torch.autograd.set_detect_anomaly(True), pytest.raises(TraceError, match="anomaly mode"):
        loss(step_fn, state)
    assert loss(step_fn, state) == 6.0
    eager, state = made(lambda p, x: (p["w"] * x * 0).sqrt().sum() * 0, executor="eager")
    with torch.autograd.set_detect_anomaly(True), pytest.raises(RuntimeError, match="SqrtBackward"):
        loss(eager, state)


def test_what_is_not_read_is_of_no_account() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.step, self.t, self.log = 0, 2.0, [1]

        def loss(self, p: Any, x: Tensor) -> Tensor:
            return base(p, x) * self.t

    trainer = Trainer()
    step_fn, state = made(trainer.loss)
    for _ in range(3):
        trainer.step += 1
        trainer.log.append(trainer.step)
        trainer.t = float("2.0")  # an equal one
        assert loss(step_fn, state) == 12.0
    assert len(step_fn._executors._traced) == 1


def test_many_recordings_are_told_of_by_name() -> None:
    held = {"temperature": 0.0}
    step_fn, state = made(lambda p, x: base(p, x) * held["temperature"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(MAX_RECORDINGS + 2):
            held["temperature"] = float(i)
            assert loss(step_fn, state) == 6.0 * i
    (message,) = [str(w.message) for w in caught if "recorded" in str(w.message)]
    assert f"held['temperature'] from {MAX_RECORDINGS - 1.0} to {float(MAX_RECORDINGS)}" in message


# --------------------------------------------------------------------------- learning rates
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("optimizer", [fzero.optim.sgd, fzero.optim.adamw])
def test_a_rate_from_outside_counts(executor: str, optimizer: Any) -> None:
    rate = {"now": 0.1}
    step_fn, state = made(
        base, optimizer(lambda step: torch.tensor(rate["now"])), executor=executor
    )
    moved = []
    for now in (0.1, 0.0, 0.1):
        rate["now"] = now
        before = fzero.unshard(state[0])["w"].clone()
        loss(step_fn, state)
        moved.append(not torch.equal(fzero.unshard(state[0])["w"], before))
    assert moved == [True, False, True]


def test_a_rate_from_outside_counts_in_the_engine() -> None:
    rate = {"now": 0.1}
    schedule = lambda step: torch.tensor(rate["now"])  # noqa: E731
    engine = fzero.Engine(nn.Linear(3, 1), fzero.optim.sgd(schedule))
    moved = []
    for now in (0.1, 0.0, 0.1):
        rate["now"] = now
        before = engine.full_params()["bias"].clone()
        engine(X).sum().backward()
        engine.step()
        moved.append(not torch.equal(engine.full_params()["bias"], before))
    assert moved == [True, False, True]


# ----------------------------------------------------------------------- what a function writes
def test_a_function_that_counts_its_calls_is_recorded_once() -> None:
    calls: list[int] = []
    count = {"n": 0}

    def model_fn(p: Any, x: Tensor) -> Tensor:
        calls.append(1)
        count["n"] += 1
        return base(p, x)

    step_fn, state = made(model_fn)
    assert [loss(step_fn, state) for _ in range(3)] == [6.0] * 3
    assert (len(calls), count["n"]) == (1, 1)


@pytest.mark.parametrize("executor", ["traced", "eager"])
@pytest.mark.parametrize("show", [str, repr, "{}".format, lambda x: f"{x.sum()}"])
def test_what_a_function_shows_of_its_own_is_no_value_from_outside(
    show: Callable[[Any], str], executor: Any
) -> None:
    """Who looks for a bug prints a loss, which has no values while it is recorded."""
    seen: list[str] = []

    def model_fn(params: Any, x: Tensor) -> Tensor:
        seen[:] = [show(params["w"]), show(x)]
        loss = (params["w"] * x).square().mean()
        seen.append(show(loss))
        return loss

    step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(0.1), fzero.Config(executor=executor))
    state = step_fn.init({"w": torch.ones(3)})
    for _ in range(3):
        state = step_fn(*state, torch.ones(2, 3))
    assert len(seen) == 3
    assert (torch.ones(3) - state[0]["w"].full_tensor()).norm() > 0.1


def test_a_function_that_computes_with_what_it_writes_is_refused() -> None:
    count = {"n": 0}

    def model_fn(p: Any, x: Tensor) -> Tensor:
        count["n"] += 1
        return base(p, x) * count["n"]

    step_fn, state = made(model_fn)
    with pytest.raises(TraceError, match="changes count"):
        step_fn(*state, X)


OTHER_DATA: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a parameter": lambda p, x: (given(p["w"]) * x).sum(),
    "the batch": lambda p, x: base(p, given(x)),
    "what was computed": lambda p, x: given(p["w"] * x).sum(),
    "a tensor from outside": lambda p, x: base(p, x * given(OUTSIDE)),
}
OUTSIDE = torch.ones(3)


def given(x: Any) -> Any:
    x.data = x.data * 2
    return x


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", OTHER_DATA)
def test_a_tensor_that_is_given_other_data_is_refused(name: str, stage: int) -> None:
    """The Program would go on with the old; for a frozen leaf torch crashed the process."""
    fn = OTHER_DATA[name]
    step_fn, state = made(lambda p, x: fn(p, x), stage=stage)
    with pytest.raises(TraceError, match=r"other memory at .*x\.data = x\.data \* 2"):
        step_fn(*state, X)
    assert torch.equal(OUTSIDE, torch.ones(3))
    assert torch.equal(X, torch.ones(2, 3))


class Slotted:
    """Counts in a slot, beside which there may be a dict."""

    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0

    def next(self) -> int:
        self.n += 1
        return self.n


class SlottedToo(Slotted):
    pass


@pytest.mark.parametrize("kind", [Slotted, SlottedToo])
def test_what_is_counted_in_a_slot_is_as_any_attribute(kind: type[Slotted]) -> None:
    counter = kind()
    step_fn, state = made(lambda p, x: base(p, x) * counter.next())
    with pytest.raises(TraceError, match=r"changes counter\.n"):
        step_fn(*state, X)

    counter = kind()  # of which the loss knows nothing
    step_fn, state = made(lambda p, x: base(p, x) + 0 * (counter.next() > 0))
    assert [loss(step_fn, state) for _ in range(3)] == [6.0] * 3
    assert counter.n == 1


class Writing(torch.nn.Module):
    """Writes, where only a module's forward shows it, what it computes with."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        calls: list[int] = []

        def of_closure(x: Tensor) -> Tensor:
            calls.append(1)
            return x * len(calls)

        def of_array(x: Tensor) -> Tensor:
            self.array += 1
            return x * float(self.array[0])

        self.array = np.zeros(1)
        self.run = {"closure": of_closure, "array": of_array}[where]

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x) * self.weight


def test_a_number_of_several_processes_is_counted_up_once() -> None:
    calls: Any = multiprocessing.Value("i", 0)

    def model_fn(p: Any, x: Tensor) -> Tensor:
        calls.value += 1
        return base(p, x)

    step_fn, state = made(model_fn)
    for _ in range(3):
        loss(step_fn, state)
    assert calls.value == 1
    assert len(step_fn._executors._traced) == 1


@pytest.mark.parametrize("where", ["closure", "array"])
def test_what_forward_alone_writes_and_computes_with_is_refused(where: str) -> None:
    apply, params = fzero.functionalize(Writing(where))
    step_fn = fzero.make_train_step(lambda p, x: apply(p, x).sum(), fzero.optim.sgd(0.1))
    with pytest.raises(TraceError, match=f"changes .*{'calls' if where == 'closure' else 'array'}"):
        step_fn(*step_fn.init(params), torch.ones(2))


class Masked(torch.nn.Module):
    """Keeps masks in its class, for all that have the same shape."""

    kept: ClassVar[dict[int, Tensor]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in self.kept:
            self.kept[len(x)] = torch.ones(len(x), len(x)).tril()
        return self.kept[len(x)] @ x * self.weight * self.scale


@pytest.mark.parametrize("filled", [False, True])
def test_a_tensor_of_an_earlier_recording_is_refused_with_the_line(filled: bool) -> None:
    Masked.kept.clear()
    module = Masked()
    if filled:
        module(torch.ones(2, 1))
    apply, params = fzero.functionalize(module)
    step_fn = fzero.make_train_step(
        lambda p, x: apply(p, x).sum(), fzero.optim.sgd(0.0), fzero.Config(stage=0)
    )
    state = step_fn(*step_fn.init(params), torch.ones(2, 1))
    assert state[1].metrics["loss"] == 3.0
    module.scale = 2.0  # recorded anew
    if filled:
        assert step_fn(*state, torch.ones(2, 1))[1].metrics["loss"] == 6.0
    else:
        with pytest.raises(TraceError, match=r"test_notes\.py:\d+, a tensor of shape \(2, 2\)"):
            step_fn(*state, torch.ones(2, 1))


# ------------------------------------------------------------------------------ randomness
SEEDED = random.Random(0)
RNG = np.random.default_rng(0)
HOST = {
    "random": lambda: random.random(),
    "random.gauss": lambda: random.gauss(0, 1),
    "random.Random": lambda: SEEDED.random(),
    "random.Random()": lambda: random.Random().random(),
    "SystemRandom": lambda: random.SystemRandom().random(),
    "numpy": lambda: np.random.rand(),
    "default_rng": lambda: RNG.normal(),
    "default_rng()": lambda: np.random.default_rng().random(),
    "RandomState": np.random.RandomState(0).rand,
}


@pytest.mark.parametrize("name", HOST)
def test_numbers_of_host_generators_are_refused_with_their_line(name: str) -> None:
    draw = HOST[name]
    states = random.getstate(), SEEDED.getstate(), repr(RNG.bit_generator.state)

    def model_fn(p: Any, x: Tensor) -> Tensor:
        return base(p, x) * float(draw())

    step_fn, state = made(model_fn)
    with pytest.raises(TraceError, match=rf"{__file__}:\d+, in ") as caught:
        step_fn(*state, X)
    assert "in every step" in str(caught.value)
    assert states == (random.getstate(), SEEDED.getstate(), repr(RNG.bit_generator.state))


def test_a_generator_seeded_inside_is_a_constant() -> None:
    step_fn, state = made(lambda p, x: base(p, x) * random.Random(3).random())
    assert loss(step_fn, state) == loss(step_fn, state)


def test_an_optimizer_that_draws_from_the_host_is_refused() -> None:
    step_fn, state = made(base, fzero.optim.sgd(lambda step: torch.tensor(random.random())))
    with pytest.raises(TraceError, match="Python's `random`"):
        step_fn(*state, X)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("draw", [torch.rand, torch.randperm, None])
def test_a_torch_generator_of_the_users_is_refused(executor: str, draw: Any) -> None:
    generator = torch.Generator()

    def model_fn(p: Any, x: Tensor) -> Tensor:
        if draw is None:
            return base(p, x) * torch.empty(3).normal_(generator=generator).sum()
        return base(p, x) * draw(3, generator=generator).sum()

    step_fn, state = made(model_fn, executor=executor)
    with pytest.raises(FzeroError, match=rf"torch.Generator was passed.*{__file__}"):
        step_fn(*state, X)


def test_threads_neither_disturb_a_step_nor_see_repeats() -> None:
    step_fn, state = made(
        lambda p, x: (nn.functional.dropout(p["w"] * x) * torch.rand_like(x)).sum(), donate=False
    )
    batch = torch.ones(4000, 3)
    want = step_fn(*state, batch)[1].metrics["loss"].item()
    drawn: list[tuple[float, ...]] = []
    stop = threading.Event()

    def draw() -> None:
        while not stop.is_set():
            drawn.append(tuple(torch.rand(4).tolist()))

    thread = threading.Thread(target=draw)
    thread.start()
    losses = [step_fn(*state, batch)[1].metrics["loss"].item() for _ in range(30)]
    stop.set()
    thread.join()
    assert losses == [want] * 30
    assert len(set(drawn)) == len(drawn)


def test_two_threads_that_record_one_module_take_turns() -> None:
    module = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.1), nn.Linear(8, 1))
    apply, params = fzero.functionalize(module)
    found: list[float] = []

    def train() -> None:
        step_fn = fzero.make_train_step(lambda p, x: apply(p, x).sum(), fzero.optim.sgd(0.1))
        found.append(loss(step_fn, list(step_fn.init(params))))

    threads = [threading.Thread(target=train) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert len(set(found)) == 1


# ------------------------------------------------------------------- the module as it was
class Installs(nn.Module):
    """Registers a hook in its first forward, as transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.ready = nn.Linear(3, 1), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.lin.register_forward_hook(lambda m, i, o: o * 2)
            self.ready = True
        return self.lin(x)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_hooks_that_forward_installs_do_not_pile_up(executor: str) -> None:
    module = Installs()
    apply, params = fzero.functionalize(module)
    step_fn = fzero.make_train_step(
        lambda p, x: apply(p, x).sum(), fzero.optim.sgd(0.0), fzero.Config(executor=executor)
    )
    state = list(step_fn.init(params))
    losses = [loss(step_fn, state, torch.ones(n, 3)) / n for n in (2, 2, 3)]
    assert losses == pytest.approx([losses[0]] * 3)
    assert not module.lin._forward_hooks
    assert not module.ready


def test_nothing_stays_patched() -> None:
    before = dict(vars(nn.Module)), random.Random.seed
    step_fn, state = made(of_module(hooked)()[0])
    loss(step_fn, state)
    assert before == (dict(vars(nn.Module)), random.Random.seed)


def test_looking_costs_microseconds_not_walks() -> None:
    """The walk through all that is reached is for changes; a call compares a flat list."""
    module = nn.Sequential(*(nn.Linear(3, 3) for _ in range(20)))
    apply, _ = fzero.functionalize(module)
    notes = Notes({"model_fn": apply})
    program = notes.record(lambda: Program("none", torch.fx.Graph(), (), ()))
    assert program.name == "none"
    walks: list[int] = []
    notes.differences = lambda: walks.append(1) or []  # pyright: ignore
    assert notes.hold()
    assert not walks


class _Trainer:
    """Holds its step function, as trainers do, and reads it in its loss."""

    def __init__(self) -> None:
        self.weight = 2.0
        self.step_fn = fzero.make_train_step(self.loss, fzero.optim.sgd(0.0))

    def loss(self, params: Any, x: Tensor) -> Tensor:
        scale = self.weight if self.step_fn.cfg.accum_steps else 0.0
        return (params["w"] * x).sum() * scale


def test_a_function_may_reach_its_own_step_function() -> None:
    trainer = _Trainer()
    state = trainer.step_fn.init({"w": torch.ones(3)})
    state = trainer.step_fn(*state, torch.ones(3))
    assert float(state[1].metrics["loss"]) == 6.0
    trainer.weight = 3.0
    state = trainer.step_fn(*state, torch.ones(3))
    assert float(state[1].metrics["loss"]) == 9.0


@pytest.mark.parametrize("what", ["view", "default", "lazy"])
def test_read_only_views_and_defaults_that_reading_puts_in_count(what: str) -> None:
    shown = {"v": 1.0}
    view = types.MappingProxyType(shown)
    made: dict[str, float] = collections.defaultdict(lambda: 1.0)
    lazy = SimpleNamespace(scale=None)

    def model_fn(params: Any, x: Tensor) -> Tensor:
        if lazy.scale is None:
            lazy.scale = 1.0
        return (params["w"] * x).sum() * view["v"] * made["v"] * lazy.scale

    step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(0.0))
    state = step_fn.init({"w": torch.ones(3)})
    changes: dict[str, Callable[[], object]] = {
        "view": lambda: shown.update(v=2.0),
        "default": lambda: made.update(v=2.0),
        "lazy": lambda: setattr(lazy, "scale", 2.0),
    }
    state = step_fn(*state, torch.ones(3))
    changes[what]()
    state = step_fn(*state, torch.ones(3))
    assert float(state[1].metrics["loss"]) == 6.0


class Times(torch.autograd.Function):
    """Calls nothing by name that the model function names."""

    factor = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * Times.factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore
        return grad * Times.factor


class Below:
    factor = 1.0

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.factor


class Above(Below):
    def scaled(self, x: Tensor) -> Tensor:
        return super().scaled(x)


class Beside:
    """No base of `First`: only an object of both tells where its super() leads."""

    def scaled(self, x: Tensor) -> Tensor:
        return x


class First:
    def scaled(self, x: Tensor) -> Tensor:
        return super().scaled(x)  # pyright: ignore


class Both(First, Beside):
    pass


def test_what_super_comes_to_in_a_sibling_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Both()
    step_fn = fzero.make_train_step(
        lambda params, x: held.scaled((params["w"] * x).sum()), fzero.optim.sgd(0.0)
    )
    state = step_fn(*step_fn.init({"w": torch.ones(3)}), torch.ones(3))
    monkeypatch.setattr(Beside, "scaled", lambda self, x: x * 3.0)
    assert float(step_fn(*state, torch.ones(3))[1].metrics["loss"]) == 9.0


class Kept:
    factor = 1.0


KINDS = [Kept]


class Called:
    factor = 1.0

    @classmethod
    def scaled(cls, x: Tensor, again: bool = True) -> Tensor:
        return cls.other(x) if again else x

    @classmethod
    def other(cls, x: Tensor) -> Tensor:
        return cls.scaled(x, again=False) * cls.factor


class Inherits(Called):
    pass


CARRIES: Any = torch.ones(1)
CARRIES.factor = 1.0


@pytest.mark.parametrize(
    ("scaled", "change"),
    [
        (lambda x: Times.apply(x), lambda patch: patch.setattr(Times, "factor", 3.0)),
        (
            lambda x: Above().scaled(x),
            lambda patch: patch.setattr(Below, "scaled", lambda self, x: x * 3.0),
        ),
        (lambda x: x * KINDS[0].factor, lambda patch: patch.setattr(Kept, "factor", 3.0)),
        (
            lambda x, kind=Kept: x * kind.factor,
            lambda patch: patch.setattr(Kept, "factor", 3.0),
        ),
        (lambda x: Called.scaled(x), lambda patch: patch.setattr(Called, "factor", 3.0)),
        (lambda x, f=Called.scaled: f(x), lambda patch: patch.setattr(Called, "factor", 3.0)),
        (
            lambda x: Inherits.scaled(x),
            lambda patch: patch.setattr(Inherits, "factor", 3.0, raising=False),
        ),
        (lambda x: x * CARRIES.factor, lambda patch: patch.setattr(CARRIES, "factor", 3.0)),
    ],
    ids=[
        *("autograd.Function", "super", "class in a list", "class as a default"),
        *("class methods", "bound class method", "a subclass's own", "attribute of a tensor"),
    ],
)
def test_what_no_code_names_counts_too(
    scaled: Any, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Above()

    def model_fn(params: Any, x: Tensor) -> Tensor:
        y = (params["w"] * x).sum()
        return held.scaled(y) if scaled.__code__.co_names[:1] == ("Above",) else scaled(y)

    step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(0.0), fzero.Config(stage=3))
    state = step_fn.init({"w": torch.ones(3)})
    losses = []
    for step in range(2):
        if step:
            change(monkeypatch)
        state = step_fn(*state, torch.ones(3))
        losses.append(float(state[1].metrics["loss"]))
    assert losses == [3.0, 9.0]


class Annealed:
    """A config that is a class."""

    factor, other = 1.0, 1.0

    @classmethod
    def got(cls) -> float:
        return cls.factor


class Named(enum.Enum):
    ONE = 1


SETTINGS: Any = types.ModuleType("settings of a test")


def _criterion(x: Tensor, config: Any) -> Tensor:
    return x * config.factor


class Holds(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        return x * self.config.factor


_HOLDS_CLASS, _HOLDS_MODULE = Holds(Annealed), Holds(SETTINGS)
HANDED_ON: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
    "a class": (Annealed, lambda x: _criterion(x, Annealed)),
    "a class in the midst of a call": (Annealed, lambda x: _criterion(x, max([Annealed], key=id))),
    "a class that is named, too": (Annealed, lambda x: _criterion(x, Annealed) * Annealed.other),
    "a class of an object": (Annealed, lambda x: _HOLDS_CLASS(x) * Annealed.other),
    "a class that is asked for": (
        Annealed,
        lambda x: x * 0 if isinstance(x, Annealed) else _HOLDS_CLASS(x),
    ),
    "a class under another name": (Annealed, lambda x: next(x * c.factor for c in [Annealed])),
    "a class whose method reads it": (Annealed, lambda x: x * _got(Annealed)),
    "a module": (SETTINGS, lambda x: _criterion(x, SETTINGS)),
    "a module of an object": (SETTINGS, lambda x: _HOLDS_MODULE(x)),
    "a function": (_criterion, lambda x: _criterion(x, Annealed) * _criterion.factor),
    "a function as an argument": (_criterion, lambda x: _criterion(x, _criterion)),
    "a member of an enum": (Named.ONE, lambda x: _criterion(x, Named.ONE)),
}


class Bare:
    @property
    def shown(self) -> float:
        return self.own if hasattr(self, "own") else 1.0


class BareBelow(Bare):
    pass


class Module(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * getattr(self, "own", 1.0)


def _caught(read: Callable[[], float]) -> float:
    try:
        return read()
    except (AttributeError, NameError):
        return 1.0


_BARE, _MODULE = BareBelow(), Module()
# what has no attribute (or global) `own` so far, and code that looks whether it has
ABSENT: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
    "an object": (_BARE, lambda x: x * getattr(_BARE, "own", 1.0)),
    "an object's class": (BareBelow, lambda x: x * getattr(_BARE, "own", 1.0)),
    "a base of an object's class": (Bare, lambda x: x * _caught(lambda: _BARE.own)),
    "what a property asks": (Bare, lambda x: x * _BARE.shown),
    "the class of a module": (Module, lambda x: _MODULE(x)),
    "a class": (BareBelow, lambda x: x * getattr(BareBelow, "own", 1.0)),
    "a base of a class": (Bare, lambda x: x * _caught(lambda: BareBelow.own)),
    "a function": (_criterion, lambda x: x * _caught(lambda: _criterion.own)),
    "a python module": (SETTINGS, lambda x: x * getattr(SETTINGS, "own", 1.0)),
    "a tensor": (CARRIES, lambda x: x * (CARRIES.own if hasattr(CARRIES, "own") else 1.0)),
    "a member of an enum": (Named.ONE, lambda x: x * getattr(Named.ONE, "own", 1.0)),
    "the globals": (sys.modules[__name__], lambda x: x * _caught(lambda: own)),  # noqa: F821
}


@pytest.mark.parametrize("case", ABSENT)
def test_what_is_not_there_counts_once_it_is(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    holder, scaled = ABSENT[case]
    step_fn = fzero.make_train_step(
        lambda params, x: scaled((params["w"] * x).sum()), fzero.optim.sgd(0.0)
    )
    state = step_fn.init({"w": torch.ones(3)})
    losses = []
    for there in (False, True, False):
        with monkeypatch.context() as patch:
            if there:
                patch.setattr(holder, "own", 3.0, raising=False)
            state = step_fn(*state, torch.ones(3))
        losses.append(float(state[1].metrics["loss"]))
    assert losses == [3.0, 9.0, 3.0]
    assert len(step_fn._executors._traced) == 2


def _got(cls: Any) -> float:
    return cls.got()


@pytest.mark.parametrize("case", HANDED_ON)
def test_what_is_handed_on_is_read_where_it_comes_to(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, scaled = HANDED_ON[case]
    monkeypatch.setattr(holder, "factor", 1.0, raising=False)
    step_fn = fzero.make_train_step(
        lambda params, x: scaled((params["w"] * x).sum()), fzero.optim.sgd(0.0)
    )
    state = step_fn.init({"w": torch.ones(3)})
    losses = []
    for factor in (1.0, 3.0, 0.5):
        monkeypatch.setattr(holder, "factor", factor)
        state = step_fn(*state, torch.ones(3))
        losses.append(float(state[1].metrics["loss"]))
    assert losses == [3.0, 9.0, 1.5]


@pytest.mark.parametrize("executor", ["traced", "eager"])
def test_a_schedule_hands_a_class_on(executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Annealed, "factor", 1.0)
    schedule = lambda step: _criterion(torch.ones(()), Annealed)  # noqa: E731
    cfg = fzero.Config(executor=executor)
    step_fn = fzero.make_train_step(lambda p, x: (p["w"] * x).sum(), fzero.optim.sgd(schedule), cfg)
    state = step_fn.init({"w": torch.zeros(1)})
    engine = fzero.Engine(nn.Linear(1, 1, bias=False), fzero.optim.sgd(schedule), cfg)
    first = engine.full_params()["weight"]
    for factor in (1.0, 0.5):
        monkeypatch.setattr(Annealed, "factor", factor)
        state = step_fn(*state, torch.ones(1))
        engine(torch.ones(1, 1)).sum().backward()
        engine.step()
    assert fzero.unshard(state[0])["w"].item() == -1.5
    torch.testing.assert_close(engine.full_params()["weight"], first - 1.5)


class Keeps:
    """An object that a function keeps tensors in."""

    kept: Any = None

    def average(self, y: Tensor) -> Tensor:
        self.kept = y.detach() if self.kept is None else 0.9 * self.kept + 0.1 * y.detach()
        return y * self.kept

    def joined(self, y: Tensor) -> Tensor:
        self.kept = y if self.kept is None else torch.cat([self.kept.detach(), y])
        return self.kept

    def before(self, y: Tensor) -> Tensor:
        last, self.kept = self.kept, 2 * y.detach()
        return y if last is None else y - last

    def mask(self, y: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = torch.ones(y.shape).tril() + torch.zeros_like(y)
        return y * self.kept

    def last(self, y: Tensor) -> Tensor:
        self.kept = y.detach()
        return y

    def best(self, y: Tensor) -> Tensor:
        if self.kept is not None and self.kept.shape != y.shape:
            raise ValueError("of another shape")
        self.kept = y.detach()
        return y


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("way", ["average", "joined", "before"])
def test_a_tensor_of_its_inputs_that_an_object_keeps_for_the_next_call_is_refused(
    way: str, stage: int
) -> None:
    keeps = Keeps()

    def model_fn(params: Any, x: Tensor) -> Tensor:
        return getattr(keeps, way)(x * params["w"]).square().mean()

    step_fn, state = made(model_fn, stage=stage)
    with pytest.raises(TraceError, match=r"keeps\.kept"):
        loss(step_fn, state)
    assert keeps.kept is None  # no tensor of the recording stays


@pytest.mark.parametrize("way", ["mask", "last", "best"])
def test_a_cache_that_is_always_the_same_and_what_nobody_computes_with_are_kept(way: str) -> None:
    keeps = Keeps()

    def model_fn(params: Any, x: Tensor) -> Tensor:
        return getattr(keeps, way)(x * params["w"]).square().mean()

    step_fn, state = made(model_fn)
    assert loss(step_fn, state) == loss(step_fn, state)


# --------------------------------------------------------- tensors that torch reads as numbers
NUMBERS: dict[str, tuple[Any, Any, Callable[[Tensor, Tensor], Tensor]]] = {
    "index": (0, 2, lambda t, y: y[t]),
    "slice": (1, 3, lambda t, y: y[..., :t]),
    "slice of what is made of it": (0, 1, lambda t, y: y[t + 1 :]),
    "index of what is made of that": (0, 1, lambda t, y: y[(t + 1) * 1]),
    "put": (0, 2, lambda t, y: (y * 1).index_put((t,), 5 * y[0])),
    "size": (1, 3, lambda t, y: y.sum() * torch.ones(t)),
    "view": (1, 3, lambda t, y: y.view(t, -1)[0]),
    "narrow": (0, 1, lambda t, y: y.narrow(0, t, 1)),
    "split": (1, 2, lambda t, y: y.split(t)[0]),
    "fill": (1.0, 2.0, lambda t, y: y * torch.full((3,), t)),
    "like": (1.0, 2.0, lambda t, y: y * torch.full_like(y, t)),
    "data": (1.0, 2.0, lambda t, y: y * torch.tensor([t, 1.0, 1.0])),
    "data of a method": (1.0, 2.0, lambda t, y: y * y.new_tensor([1.0, t, 1.0])),
    "data of lists": (1.0, 2.0, lambda t, y: y * torch.as_tensor([[t, t, t]])),
    "alpha": (1.0, 2.0, lambda t, y: torch.add(y, y, alpha=t)),
    "slope": (0.1, 0.2, lambda t, y: nn.functional.leaky_relu(-y, t)),
    "smoothing": (
        0.0,
        0.5,
        lambda t, y: nn.functional.cross_entropy(y[None], torch.tensor([0]), label_smoothing=t),
    ),
    "padding": (0.0, 2.0, lambda t, y: nn.functional.pad(y, (0, 1), value=t)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_tensor_that_torch_reads_as_a_number_is_compared(name: str) -> None:
    before, now, f = NUMBERS[name]
    t, x = torch.tensor(before), torch.tensor([1.0, 2.0, 4.0])
    step_fn, state = made(lambda p, x: f(t, p["w"] * x).sum())
    assert loss(step_fn, state, x) == pytest.approx(f(t, x).sum().item())
    t.fill_(now)
    assert loss(step_fn, state, x) == pytest.approx(f(t, x).sum().item())


def test_a_tensor_that_stays_one_is_an_input_beside_others_that_are_numbers() -> None:
    runs, scale, table, at = 0, torch.tensor(1.0), torch.ones(3), torch.tensor(1)

    def fn(p: Any, x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        return (p["w"] * x * scale * table)[at] + (p["w"] * x)[torch.tensor(2)]

    step_fn, state = made(fn)
    for value in (1.0, 2.0, 3.0):
        scale.fill_(value)
        table.fill_(value)
        assert loss(step_fn, state, torch.ones(3)) == value * value + 1
    assert runs == 1


def test_attributes_that_are_replaced_all_at_once() -> None:
    settings, runs = Settings(), []
    settings.__dict__ = {"factor": 1.0, "seen": 0}

    def fn(p: Any, x: Tensor) -> Tensor:
        runs.append(None)
        return base(p, x) * settings.factor

    step_fn, state = made(fn)
    assert loss(step_fn, state) == 6
    settings.__dict__ = {"factor": 3.0, "seen": 0}
    assert loss(step_fn, state) == 18
    settings.factor = 4.0
    assert loss(step_fn, state) == 24
    count = len(runs)
    for i in range(3):  # with others that it does not read
        settings.__dict__ = {"factor": 4.0, "seen": i}
        assert loss(step_fn, state) == 24
    assert len(runs) == count
    settings.factor = 5.0
    assert loss(step_fn, state) == 30


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict])
def test_the_order_of_a_dict_from_outside_counts(kind: type[dict[str, float]]) -> None:
    factors = kind(a=1.0, b=3.0)
    step_fn, state = made(lambda p, x: base(p, x) * next(iter(factors.values())))
    assert loss(step_fn, state) == 6
    if isinstance(factors, collections.OrderedDict):
        factors.move_to_end("a")
    else:
        factors["a"] = factors.pop("a")
    assert loss(step_fn, state) == 18


@pytest.mark.parametrize("executor", ["traced", "eager"])
def test_a_mode_with_hooks_on_all_modules_changes_no_step(executor: Any) -> None:
    def losses(mode: Callable[[], Any]) -> list[float]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
        apply, params = fzero.functionalize(module)
        cfg = fzero.Config(executor=executor)
        step_fn = fzero.make_train_step(
            lambda p, x: apply(p, x).square().mean(), fzero.optim.sgd(0.1), cfg
        )
        params, opt_state = step_fn.init(params)
        found = []
        for _ in range(2):
            with mode():
                params, opt_state = step_fn(params, opt_state, torch.ones(4, 3))
            found.append(opt_state.metrics["loss"].item())
        assert not any(x._forward_hooks for x in module.modules())
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode's own, of its hooks on backward
        assert losses(CommDebugMode) == losses(contextlib.nullcontext)


def test_the_dtype_that_autocast_takes_is_noted() -> None:
    def model_fn(params: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu"):
            return (x @ params["w"]).float().square().sum()

    before = torch.get_autocast_dtype("cpu")
    params, x = {"w": torch.randn(4, 4)}, torch.randn(8, 4)
    step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(0.1), fzero.Config(donate=False))
    state = step_fn.init(params)
    try:
        for dtype in (torch.bfloat16, torch.float16):
            torch.set_autocast_dtype("cpu", dtype)
            found = step_fn(*state, x)[1].metrics["loss"]
            assert torch.equal(found, model_fn(params, x))
    finally:
        torch.set_autocast_dtype("cpu", before)
