"""A Program runs on values that lie in memory as they did when it was recorded."""

import gc
import linecache
import traceback
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.errors import TraceError
from fzero.program import Program
from fzero.program.codegen import compile_program
from fzero.program.strides import restored
from fzero.program.trace import trace_program


@torch.library.custom_op("fzero_tests::turned", mutates_args=())
def turned(x: Tensor) -> Tensor:
    """Twice `x`, laid out column by column; its fake kernel says row by row."""
    return (2 * x).t().contiguous().t()


@turned.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("fzero_tests::longer", mutates_args=())
def longer(x: Tensor) -> Tensor:
    """A row more than its fake kernel says."""
    return torch.cat([x, x[:1]])


@longer.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def recorded(fn: Any, *inputs: Tensor) -> Program:
    names = [f"x{i}" for i, _ in enumerate(inputs)]
    return trace_program("test", [("make_fx", fn)], inputs, names)


def test_an_operator_with_a_wrong_fake_layout_is_followed_by_a_copy() -> None:
    x = torch.arange(6.0).view(2, 3)
    run = compile_program(recorded(lambda x: (turned(x).view(-1), turned(x)), x))
    for _ in range(2):  # the first run finds out, the second knows
        flat, whole = run(x)
        assert torch.equal(flat, 2 * x.flatten())
        assert whole.stride() == (3, 1)


def test_an_operator_with_a_wrong_fake_shape_is_refused() -> None:
    run = compile_program(recorded(lambda x: (longer(x) + 1,), torch.ones(2, 3)))
    with pytest.raises(TraceError, match=r"longer.*\(3, 3\).*\(2, 3\)"):
        run(torch.ones(2, 3))


def test_inputs_may_lie_otherwise_than_those_it_was_recorded_with() -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        x.add_(y.contiguous().view(-1).view(2, 3))
        return (y.as_strided((6,), (1,)) + 0,)

    dense = torch.arange(6.0).view(2, 3)
    run = compile_program(recorded(fn, torch.zeros(2, 3), dense))
    for y in (dense, dense.t().contiguous().t(), torch.arange(12.0).view(2, 6)[:, ::2] / 2):
        for x in (torch.zeros(2, 3), torch.zeros(3, 2).t()):
            (flat,) = run(x, y)
            assert torch.equal(x, y)
            assert torch.equal(flat, y.flatten())


def test_an_input_that_lay_column_by_column_does_so_in_every_run() -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (y.as_strided((6,), (1,)) + x.sum(),)

    dense = torch.arange(6.0).view(2, 3)
    run = compile_program(recorded(fn, torch.zeros(2), dense.t().contiguous().t()))
    for y in (dense, dense.t().contiguous().t(), torch.arange(12.0).view(2, 6)[:, ::2] / 2):
        assert torch.equal(run(torch.zeros(2), y)[0], y.t().flatten())


@pytest.mark.parametrize(
    "strides", [(3, 1), (1, 2), (0, 1), (0, 0), (12, 2)], ids=lambda s: "x".join(map(str, s))
)
def test_restored_has_the_values_and_the_strides(strides: tuple[int, int]) -> None:
    x = torch.ones(2, 3).t().contiguous().t()
    y = restored(x, strides)
    assert torch.equal(x, y)
    assert y.stride() == strides


NORMS = {
    "batch": lambda: nn.BatchNorm1d(16),
    "batch, eval": lambda: nn.BatchNorm1d(16).eval(),
    "instance": lambda: nn.InstanceNorm1d(16, affine=True),
    "group": lambda: nn.GroupNorm(4, 16),
}


@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_of_a_transpose_is_what_it_is_in_plain_torch(name: str, accum: int) -> None:
    torch.manual_seed(0)
    module = nn.ModuleDict({"a": nn.Linear(16, 16), "norm": NORMS[name](), "b": nn.Linear(16, 4)})

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = module

        def forward(self, x: Tensor) -> Tensor:
            h = self.parts["norm"](self.parts["a"](x).transpose(1, 2)).transpose(1, 2)
            return self.parts["b"](h).square().mean()

    net = Net().double()
    x = torch.randn(4, 8, 16, dtype=torch.float64)
    apply, params, buffers = fzero.functionalize(net, buffers=True)
    cfg = fzero.Config(accum_steps=accum)
    step_fn = fzero.make_train_step(lambda p, s, b: apply(p, s, b), fzero.optim.sgd(0.1), cfg)
    state = step_fn.init(params, buffers)
    theirs = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(2):
        state = step_fn(*state, x)
        theirs.zero_grad()
        for part in x.chunk(accum):
            (net(part) / accum).backward()
        theirs.step()
    for key, value in net.named_parameters():
        assert torch.allclose(state[0][key].full_tensor(), value, rtol=0, atol=1e-12), key
    for key, value in net.named_buffers():
        assert torch.allclose(state[1].model_state[key], value, rtol=0, atol=1e-12), key


def _generated() -> list[str]:
    """The generated files whose lines are kept for tracebacks."""
    gc.collect()
    return [name for name in linecache.cache if name.startswith("<fzero program")]


def test_lines_of_a_program_are_kept_as_long_as_it_lives() -> None:
    def asked(x: Tensor, rows: Tensor) -> Tensor:
        return x[rows].tanh()

    inputs = torch.ones(4, 2), torch.tensor([0, 3])
    runs = compile_program(recorded(asked, *inputs))
    runs(*inputs)  # the first call makes another one, in place of what checks its results
    *_, mine = _generated()
    with pytest.raises(IndexError) as told:
        runs(inputs[0], torch.tensor([0, 9]))
    del runs
    lines = "".join(traceback.format_exception(told.value))  # it holds the frames
    assert "index" in lines.split("<fzero program")[1].splitlines()[1]
    assert mine in _generated()
    del told
    gc.collect()
    compile_program(recorded(asked, *inputs))(*inputs)  # the next one drops what is gone
    assert mine not in _generated()


def test_what_an_operator_raises_is_noted_with_the_line() -> None:
    def model_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return nn.functional.embedding(x, params["w"]).sum()

    value = fzero.value_and_grad(model_fn)
    params = fzero.shard({"w": torch.ones(4, 4)})
    with pytest.raises(IndexError) as caught:
        value(params, torch.full((4, 4), 9))
    (said,) = caught.value.__notes__
    assert said.startswith("raised by aten.embedding.default")
    assert "test_codegen.py:" in said
    assert "(4, 4)" in said


_PRODUCTS = {
    "mm": lambda w, x: x @ w,
    "mv": lambda w, x: x @ w[:, 0],
    "addmm": lambda w, x: torch.addmm(w[:1], x, w),
    "linear": lambda w, x: nn.functional.linear(x, w),
    "einsum": lambda w, x: torch.einsum("ij,kj->ik", x, w),
    "bmm": lambda w, x: torch.bmm(x[None], w[None]),
    "conv": lambda w, x: nn.functional.conv1d(x[None], w[:, :, None]),
    "norm": lambda w, x: nn.functional.layer_norm(x, (8,), w[0]),
}


@pytest.mark.parametrize("case", _PRODUCTS)
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_floats_of_several_dtypes_are_told_with_the_line(case: str, precision: Any) -> None:
    with pytest.raises(RuntimeError):  # as torch does
        _PRODUCTS[case](torch.ones(8, 8), torch.ones(8, 8, dtype=torch.float64))

    def model_fn(w: Tensor, x: Tensor) -> Tensor:
        return _PRODUCTS[case](w, x).float().sum()

    cfg = fzero.Config(precision=precision)
    step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(0.1), cfg)
    state = step_fn.init(torch.ones(8, 8))
    with pytest.raises(fzero.FzeroError) as error:
        step_fn(*state, torch.ones(8, 8, dtype=torch.float64))
    assert __file__ in str(error.value)
    assert "float64" in str(error.value) or "double" in str(error.value).lower()
    assert step_fn(*state, torch.ones(8, 8, dtype=torch.bfloat16 if precision else torch.float32))
