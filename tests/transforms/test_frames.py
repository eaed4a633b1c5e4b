"""What batches and aux may be made of: it comes to the model function, and back, as it was."""

import dataclasses
import enum
import functools
from collections import OrderedDict, UserDict
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fzero
from fzero import Config
from fzero.errors import ShardError
from fzero.transforms.frames import take_apart


class Task(enum.Enum):
    QA = 1
    COPY = 2


@dataclasses.dataclass(frozen=True)
class Sample:
    x: Any
    rest: Any = None


@dataclasses.dataclass
class Output(OrderedDict):
    """A mapping and a dataclass, as transformers' outputs are."""

    x: Any = None
    rest: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Encoding(UserDict):
    """A wrapped dict with more attributes, as a tokenizer's encodings are."""

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self.encodings, self.sequences = [object()], 2


class Pair(NamedTuple):
    first: Any
    second: Any


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return type(b) is type(a) and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, UserDict):
        return _same(a.data, b.data) and b.sequences == a.sequences and b.encodings is None
    if isinstance(a, dict):
        attrs = _same(vars(a), vars(b)) if isinstance(a, Output) else True
        return attrs and a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return _same(vars(a), vars(b)) if isinstance(a, Sample) else a == b


plain = st.one_of(
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from([1.0, 0.5, "qa", "", b"x", None, Task.QA, torch.float16]),
)
leaves = st.one_of(plain, st.integers(0, 5).map(lambda n: torch.full((2, n), float(n))))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(Pair, inner, inner),
        st.builds(Sample, inner, inner),
        st.builds(Output, inner, inner),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(Encoding),
    ),
    max_leaves=4,
)


@given(value=trees)
@settings(max_examples=40)
def test_what_is_taken_apart_is_put_together_as_it_was(value: Any) -> None:
    tensors, frame = take_apart(value)
    assert _same(value, frame.unflatten(tensors))
    again, other = take_apart(frame.unflatten([x + 1 for x in tensors]))
    assert other == frame
    assert hash(other) == hash(frame)
    assert all(torch.equal(a, b + 1) for a, b in zip(again, tensors, strict=True))
    assert len(frame.paths) == len(frame.names) == len(tensors) == frame.num_leaves


# Python's == finds no difference in most of these
APART = [(1, True), (1, 1.0), (0.0, -0.0), (0j, -0j), ("a", "b"), (Task.QA, Task.COPY)]


def _holders(x: Tensor) -> dict[str, Any]:
    def beside(value: Any) -> Encoding:
        made = Encoding({"x": x})
        made.sequences = value
        return made

    return {
        "leaf": lambda value: {"x": x, "k": value},
        "field": lambda value: Sample(x, value),
        "key": lambda value: {"x": x, "k": {value: x}},  # the same tensor again
        "attribute": beside,
        "attribute's list": lambda value: beside([1, {"k": value}]),
    }


@pytest.mark.parametrize(("a", "b"), APART)
@pytest.mark.parametrize("how", _holders(torch.ones(1)))
def test_other_plain_values_are_another_frame(how: str, a: Any, b: Any) -> None:
    holds = _holders(torch.ones(1))[how]
    assert take_apart(holds(a))[1] != take_apart(holds(b))[1]


@pytest.mark.parametrize("how", _holders(torch.ones(1)))
def test_a_function_gets_the_value_that_its_caller_has(how: str) -> None:
    x = torch.ones(2, dtype=torch.float64)
    holds, calls = _holders(x)[how], []

    def signs(params: Any, batch: Any) -> Tensor:
        calls.append(batch)
        text = repr(batch.sequences if isinstance(batch, Encoding) else batch)
        x = batch.x if isinstance(batch, Sample) else batch["x"]
        factor = next(i for i, word in enumerate(("-0.0", "0.0", "nan", "True"), 2) if word in text)
        return (x * params["w"]).sum() * factor

    params = fzero.shard({"w": x}, Config())
    run = fzero.sharded(signs, Config())
    found = [run(params, holds(value)).item() for value in (0.0, -0.0, True, float("nan")) * 2]
    assert found == [6, 4, 10, 8] * 2
    if how != "key":  # whose structure optree compares, for which NaN is another key each time
        assert len(calls) == 4


def test_a_tensor_beside_the_items_of_a_mapping_is_refused() -> None:
    batch = Encoding({"x": torch.ones(1)})
    batch.encodings = [torch.ones(1)]
    with pytest.raises(ShardError, match=r"Encoding has a tensor in its attribute 'encodings'"):
        take_apart(batch)


class Cached(UserDict):
    @functools.cached_property
    def twice(self) -> Tensor:
        return self["x"] * 2


def test_what_a_mapping_has_computed_of_its_items_is_computed_again() -> None:
    batch = Cached({"x": torch.ones(1)})
    assert batch.twice.item() == 2
    tensors, frame = take_apart(batch)
    assert frame == take_apart(Cached({"x": torch.ones(1)}))[1]
    assert frame.unflatten([x * 3 for x in tensors]).twice.item() == 6


def test_a_list_beside_the_items_is_as_it_was_when_it_was_passed() -> None:
    batch = Encoding({})
    batch.sequences = [1]
    tensors, frame = take_apart(batch)
    batch.sequences.append(2)
    frame.unflatten(tensors).sequences.append(3)
    assert frame.unflatten(tensors).sequences == [1]


@pytest.mark.parametrize("executor", ["traced", "eager"])
@pytest.mark.parametrize("accum", [1, 2])
def test_a_step_runs_on_any_of_them_and_never_on_an_old_one(executor: str, accum: int) -> None:
    def model_fn(params: Any, batch: Any) -> Any:
        scale = batch["scale"] * (2 if batch["task"] == "double" else 1)
        loss = (params["w"] * batch["in"].x).mean() * scale
        return loss, Output(x=loss * 2, rest={"task": batch["task"], "scale": scale})

    cfg = Config(executor=executor, accum_steps=accum, has_aux=True)
    step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(0.1), cfg)
    state = step_fn.init({"w": torch.ones(3)})
    for task, scale in (("once", 1), ("double", 1), ("once", 3), ("once", 1)):
        batch = Encoding({"in": Output(x=torch.ones(4, 3)), "task": task, "scale": scale})
        before = state[0]["w"].full_tensor().clone()
        state = step_fn(*state, batch)
        factor = scale * (2 if task == "double" else 1)
        moved = before - state[0]["w"].full_tensor()
        torch.testing.assert_close(moved, torch.full((3,), 0.1 / 3 * factor))
        aux = state[1].metrics["aux"]
        assert (type(aux), aux.rest["task"]) == (Output, task)
        assert torch.equal(aux.rest["scale"].flatten(), torch.full((accum,), factor))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"f": print}, r"batch\['f'\] is a builtin_function"),
        ({"s": [Sample(object())]}, r"batch\['s'\]\[0\]\['x'\] is a object"),
        ({"x": torch.eye(3).to_sparse()}, r"batch\['x'\] is a sparse tensor.*values\(\)"),
    ],
)
def test_what_a_batch_cannot_hold_is_named(batch: Any, message: str) -> None:
    step_fn = fzero.make_train_step(lambda p, b: p["w"].sum(), fzero.optim.sgd(0.1))
    with pytest.raises(ShardError, match=message):
        step_fn(*step_fn.init({"w": torch.ones(3)}), batch)


def test_transformers_own_classes_come_as_they_are() -> None:
    transformers = pytest.importorskip("transformers")
    outputs = pytest.importorskip("transformers.modeling_outputs")
    batch = transformers.BatchEncoding({"input_ids": torch.arange(4)})
    tensors, frame = take_apart(batch)
    back = frame.unflatten(tensors)
    assert type(back) is transformers.BatchEncoding
    assert torch.equal(back.input_ids, batch["input_ids"])
    out = outputs.CausalLMOutput(loss=torch.ones(()), logits=torch.ones(2))
    tensors, frame = take_apart(out)
    back = frame.unflatten(tensors)
    assert (type(back), list(back)) == (type(out), ["loss", "logits"])
    assert back.hidden_states is None
    assert torch.equal(back[1], out.logits)


def _weighed(params: Any, batch: Any) -> Tensor:
    """Another number for another order of parameters or of a batch."""
    (a, b), (x, y) = params.values(), batch["in"].values()
    return (a * x - 2 * b * y).sum()


ORDERS = [("u", "v"), ("v", "u")]
FUNCTIONS = {
    "step": None,
    "sharded": fzero.sharded(_weighed),
    "value_and_grad": fzero.value_and_grad(_weighed),
    "jvp": fzero.jvp(_weighed),
    "jit": fzero.jit(_weighed),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_dicts_come_in_the_order_that_they_have(name: str) -> None:
    params = {"u": torch.tensor([1.0]), "v": torch.tensor([3.0])}
    batch = {"u": torch.tensor([5.0]), "v": torch.tensor([7.0])}
    step_fn = fzero.make_train_step(_weighed, fzero.optim.sgd(0.0))
    for p, b in [(p, b) for p in ORDERS for b in ORDERS] * 2:
        own, given = {k: params[k] for k in p}, {"in": {k: batch[k] for k in b}}
        if name == "step":
            found = step_fn(*step_fn.init(own), given)[1].metrics["loss"]
        elif name == "jvp":
            found = FUNCTIONS[name](own, own, given)
        else:
            found = FUNCTIONS[name](own, given)
        found = found[0] if isinstance(found, tuple) else found
        assert found.item() == _weighed(own, given).item()


def test_a_step_takes_parameters_in_another_order_than_it_was_made_for() -> None:
    batch = {"in": {"u": torch.tensor([5.0]), "v": torch.tensor([7.0])}}
    step_fn = fzero.make_train_step(_weighed, fzero.optim.sgd(0.0))
    params, state = step_fn.init({"u": torch.tensor([1.0]), "v": torch.tensor([3.0])})
    for order in (*ORDERS, *ORDERS):
        params = {key: params[key] for key in order}
        whole = fzero.unshard(params)
        params, state = step_fn(params, state, batch)
        assert tuple(params) == order
        assert state.metrics["loss"].item() == _weighed(whole, batch).item()


def test_model_state_and_aux_have_the_order_that_they_come_in() -> None:
    def fn(p: Any, state: Any, x: Any) -> Any:
        first, second = state.values()
        return (p["w"] * (first - 2 * second)).sum(), state, {k: 2 * v for k, v in x.items()}

    step_fn = fzero.make_train_step(fn, fzero.optim.sgd(0.0), Config(has_aux=True))
    values = {"u": torch.tensor(5.0), "v": torch.tensor(7.0)}
    params, first = step_fn.init({"w": torch.ones(1)}, values)
    for order, other in [(order, other) for order in ORDERS for other in ORDERS]:
        mine, given = ({key: values[key] for key in keys} for keys in (order, other))
        _, state = step_fn(params, first._replace(model_state=mine), given)
        one, two = mine.values()
        assert state.metrics["loss"].item() == one - 2 * two
        assert tuple(state.metrics["aux"]) == other
        assert tuple(state.model_state) == order
        params, first = step_fn.init({"w": torch.ones(1)}, values)


def test_a_conjugate_is_another_kind_of_tensor() -> None:
    def fn(p: Any, x: Tensor) -> Tensor:
        return (p["w"] * torch.view_as_real(x.resolve_conj())[..., 1]).sum()

    step_fn = fzero.make_train_step(fn, fzero.optim.sgd(0.0))
    state = step_fn.init({"w": torch.ones(1)})
    x = torch.tensor([1 + 2j])
    for batch, wanted in ((x, 2), (x.conj(), -2), (x, 2)):
        state = step_fn(*state, batch)
        assert state[1].metrics["loss"].item() == wanted
