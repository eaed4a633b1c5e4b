"""Taking in-place operators out of a Program changes no value, no layout and no effect."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch import Tensor

import fzero
from fzero.errors import TraceError
from fzero.program.codegen import compile_program
from fzero.program.graph import written_operands
from fzero.program.passes import functionalise as functionalising
from fzero.program.passes.functionalise import functionalise
from tests.program.test_codegen import recorded

F64 = torch.float64
Params = dict[str, Tensor]


def written(y: Tensor) -> Tensor:
    y = y.clone()
    y[:, 0] = 0
    return y


def regular(p: Params) -> Tensor:
    return p["w"].T @ p["w"] + torch.eye(4, dtype=F64)


def asserted(p: Params, x: Tensor) -> Tensor:
    torch._assert_async((x > -9).all(), "too small")
    return written(x @ p["w"]).square().mean()


EFFECTS: dict[str, Callable[[Params, Tensor], Tensor]] = {
    "solve": lambda p, x: written(torch.linalg.solve(regular(p), x.T)).square().mean(),
    "solve alone": lambda p, x: torch.linalg.solve(regular(p), x.T).square().mean(),
    "inv": lambda p, x: written(x @ torch.linalg.inv(regular(p))).square().mean(),
    "cholesky": lambda p, x: written(x @ torch.linalg.cholesky(regular(p))).square().mean(),
    "assert": asserted,
}


def step_of(fn: Callable[[Params, Tensor], Tensor]) -> tuple[Any, Any]:
    w = torch.randn(4, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
    step_fn = fzero.make_train_step(fn, fzero.optim.sgd(0.1), fzero.Config(donate=False))
    return step_fn, step_fn.init({"w": w})


@pytest.mark.parametrize("name", EFFECTS)
def test_operators_with_effects_are_staged_out(name: str) -> None:
    x = torch.randn(3, 4, dtype=F64, generator=torch.Generator().manual_seed(1))
    step_fn, (params, opt_state) = step_of(EFFECTS[name])
    w = params["w"].full_tensor().clone().requires_grad_()
    EFFECTS[name]({"w": w}, x).backward()
    assert w.grad is not None
    params, _ = step_fn(params, opt_state, x)
    assert torch.allclose(params["w"].full_tensor(), w - 0.1 * w.grad, rtol=0, atol=1e-12)


def test_an_assertion_still_asserts() -> None:
    step_fn, state = step_of(asserted)
    step_fn(*state, torch.ones(3, 4, dtype=F64))
    with pytest.raises(RuntimeError, match="too small"):
        step_fn(*state, torch.full((3, 4), -10.0, dtype=F64))


def test_a_factorisation_that_fails_still_says_so() -> None:
    def fn(p: Params, x: Tensor) -> Tensor:
        return written(torch.linalg.cholesky(x)).square().mean() * p["w"].mean()

    step_fn, state = step_of(fn)
    step_fn(*state, torch.eye(4, dtype=F64))
    with pytest.raises(torch.linalg.LinAlgError, match="cholesky"):
        step_fn(*state, -torch.eye(4, dtype=F64))


def turn(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def transposed_copy(x: Tensor) -> tuple[Tensor, ...]:
    y = turn(x)
    y.copy_(x * 2)
    return (y.as_strided((6,), (1,)) + 0,)


def gap(x: Tensor) -> tuple[Tensor, ...]:
    y = torch.cat([x, x], 1)[:, ::2]
    y.mul_(x)
    return y.contiguous().view(-1), y.as_strided((6,), (2,)) + 0


def mixed(x: Tensor) -> tuple[Tensor, ...]:
    y = turn(x)
    y.add_(x).lerp_(x, 0.5).clamp_(min=0.1).addcmul_(x, x)
    y[0] = 3
    z = torch.where(y > 1, y, x)
    z.masked_fill_(z > 2, 0.5)
    return z.contiguous().view(-1), y.as_strided((6,), (1,)) + 0


def foreign(x: Tensor) -> tuple[Tensor, ...]:
    y = turn(x)
    y.fill_(2.0)
    z = torch.zeros_like(turn(x))
    z.copy_(x.sum()).zero_().add_(turn(x))
    return y.as_strided((6,), (1,)) * turn(x).as_strided((6,), (1,)), z.as_strided((6,), (1,)) + 1


def swapped(x: Tensor) -> tuple[Tensor, ...]:
    y = x.clone()
    y.t_()
    y.add_(1)
    return (y.contiguous().view(-1),)


def random(x: Tensor) -> tuple[Tensor, ...]:
    y = torch.empty_like(turn(x))
    y.copy_(x)
    y.index_add_(0, torch.tensor([0, 1]), x)
    y.scatter_(1, torch.tensor([[0], [2]]), 7.0)
    y.cumsum_(1).sub_(turn(x))
    return (y.as_strided((6,), (1,)) + 0,)


@pytest.mark.parametrize("fn", [transposed_copy, gap, mixed, foreign, swapped, random])
@pytest.mark.parametrize("lay", [torch.clone, turn], ids=["dense", "transposed"])
def test_values_and_layouts_stay(fn: Callable[[Tensor], Any], lay: Callable[..., Tensor]) -> None:
    x = lay(torch.arange(6.0).view(2, 3))
    wanted = fn(x.clone())
    try:
        program = functionalise(recorded(fn, x))
    except TraceError as error:
        pytest.fail(str(error))
    for a, b in zip(compile_program(program)(x), wanted, strict=True):
        assert torch.equal(a, b)


def programs() -> st.SearchStrategy[list[tuple[Any, ...]]]:
    """Steps of a function of `x`: numbers say which earlier values are read and written."""
    at = st.integers(0, 9)
    step = st.tuples(st.sampled_from(["new", "view", "write", "write", "read"]), at, at, at)
    return st.lists(step, min_size=3, max_size=12)


NEW = [torch.clone, turn, torch.exp, lambda x: x.mean(1, keepdim=True).expand_as(x) + 0]
VIEWS = [lambda x: x[:1], lambda x: x[:, 1:], lambda x: x.view_as(x), lambda x: x.detach()]
WRITES: list[Callable[[Tensor, Tensor], Any]] = [
    lambda y, z: y.add_(0.5),
    lambda y, z: y.mul_(z.mean()),
    lambda y, z: y.add_(y),
    lambda y, z: y.clamp_(max=0.7).sub_(z.sum()),
    lambda y, z: y.copy_(z.mean()),
    lambda y, z: torch._foreach_add_([y], 0.25),
    lambda y, z: torch._foreach_mul_([y, z, y], 0.75),  # some twice, or in each other's memory
    lambda y, z: torch._foreach_add_([y, z], [y.mean(), y]),  # one reads what the other has written
]


def built(steps: list[tuple[Any, ...]]) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """The function of these steps; it returns every value, as it is at the end."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        values, seen = [x + 1], []
        for kind, i, j, k in steps:
            y, z = values[i % len(values)], values[j % len(values)]
            if kind == "new":
                values.append(NEW[k % len(NEW)](y))
            elif kind == "view":
                values.append(VIEWS[k % len(VIEWS)](y))
            elif kind == "write":
                WRITES[k % len(WRITES)](y, z)
            else:
                seen.append(y.sum() + z.mean())
        return tuple(value + 0 for value in (*values, *seen))

    return fn


@settings(max_examples=60)
@given(programs())
def test_writes_count_for_those_who_read_later(steps: list[tuple[Any, ...]]) -> None:
    x = torch.linspace(-1, 1, 6, dtype=F64).view(2, 3)
    fn = built(steps)
    try:
        wanted = fn(x.clone())
    except RuntimeError:  # torch itself refuses it: shapes that don't fit, reads of what is written
        reject()
    program = functionalise(recorded(fn, x))
    assert not any(map(written_operands, program.graph.nodes))
    program.verify()
    for a, b in zip(compile_program(program)(x), wanted, strict=True):
        assert torch.equal(a, b)


def test_a_write_that_nobody_else_sees_needs_no_second_recording(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        y = torch.empty_like(x).bernoulli_(0.5).div_(0.5)
        return (torch.nn.functional.rms_norm(x * y, (3,)),)

    monkeypatch.setattr(functionalising, "recorded_on", None)
    x = torch.rand(2, 3)
    program = functionalise(recorded(fn, x))
    torch.manual_seed(0)
    wanted = fn(x)
    torch.manual_seed(0)
    assert torch.equal(compile_program(program)(x)[0], wanted[0])
