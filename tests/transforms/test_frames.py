"""What batches and aux may be made of: it comes to the model function, and back, as it was."""

import dataclasses
import enum
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


@pytest.mark.parametrize(("a", "b"), [(1, True), (1, 1.0), ("a", "b"), (Task.QA, Task.COPY)])
def test_other_plain_leaves_are_another_frame(a: Any, b: Any) -> None:
    assert take_apart({"k": a})[1] != take_apart({"k": b})[1]


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
