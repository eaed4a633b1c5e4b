"""What has no derivative is refused where one is asked for, and only there."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.autograd.function import once_differentiable

import fzero
from fzero.errors import FzeroError, TraceError
from fzero.functional.underived import Derived
from tests.ranks import run_ranks

Fn = Callable[[Tensor], Tensor]
X = torch.full((3,), 2.0)
W = {"w": torch.tensor([1.0, 2.0, 3.0])}
EXECUTORS = pytest.mark.parametrize("executor", ["traced", "eager"])


class Once(torch.autograd.Function):
    """A square whose backward has no derivative."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


@pytest.fixture(scope="module")
def ops() -> Iterator[dict[str, Fn]]:
    """A square as an operator: with a kernel alone, and as a custom one with its derivative."""
    lib = torch.library.Library("fzero_test_underived", "DEF")
    lib.define("square(Tensor x) -> Tensor")
    lib.impl("square", lambda x: x * x, "CompositeExplicitAutograd")
    lib.impl("square", torch.empty_like, "Meta")

    def custom(x: Tensor) -> Tensor:
        return x * x

    # annotations of this module are texts to `infer_schema`
    custom.__annotations__ = {"x": Tensor, "return": Tensor}
    op = torch.library.custom_op("fzero_test_underived::custom", custom, mutates_args=())
    op.register_fake(torch.empty_like)
    op.register_autograd(
        lambda ctx, grad: 2 * ctx.saved_tensors[0] * grad,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    yield {"square": torch.ops.fzero_test_underived.square, "custom": op}
    lib._destroy()


def _loss(op: Fn) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    return lambda params, x: (op(params["w"] * 1.0) * x).sum()


def test_a_recorded_gradient_through_a_kernel_alone_is_refused(ops: dict[str, Fn]) -> None:
    with pytest.raises(TraceError, match=r"underived::square at .*py:\d+.* has no derivative"):
        fzero.grad(_loss(ops["square"]))(W, X)
    step_fn = fzero.make_train_step(_loss(ops["square"]), fzero.optim.sgd(1.0))
    state = step_fn.init(dict(W))
    with pytest.raises(TraceError, match="underived::square"):
        step_fn(*state, X)


@EXECUTORS
def test_what_is_detached_or_only_read_may_stay(ops: dict[str, Fn], executor: str) -> None:
    cfg = fzero.Config(executor=executor)

    def loss(params: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        read = ops["square"](params["w"] * 1.0)  # tracked, and in no loss
        return (ops["square"](params["w"].detach()) * params["w"] * x).sum(), read

    grads, read = fzero.grad(loss, cfg, has_aux=True)(W, X)
    assert torch.equal(grads["w"], W["w"] ** 2 * X)
    assert torch.equal(read, W["w"] ** 2)


def test_a_kernel_of_operators_is_differentiated_where_it_runs(ops: dict[str, Fn]) -> None:
    grads = fzero.grad(_loss(ops["square"]), fzero.Config(executor="eager"))(W, X)
    assert torch.equal(grads["w"], 2 * W["w"] * X)


@EXECUTORS
@pytest.mark.parametrize("name", ["square", "custom"])
def test_a_tangent_that_would_end_is_refused(ops: dict[str, Fn], name: str, executor: str) -> None:
    cfg = fzero.Config(executor=executor)
    with pytest.raises(FzeroError, match=f"underived::{name} at .* in forward mode"):
        fzero.jvp(_loss(ops[name]), cfg)(W, W, X)
    still = fzero.jvp(lambda p, x: (ops[name](x) * p["w"]).sum(), cfg)(W, W, X)
    assert still[1] == (X**2 * W["w"]).sum()


def test_a_custom_operator_has_the_gradient_that_it_says(ops: dict[str, Fn]) -> None:
    assert torch.equal(fzero.grad(_loss(ops["custom"]))(W, X)["w"], 2 * W["w"] * X)


@EXECUTORS
def test_a_second_derivative_of_what_has_one_alone_is_refused(executor: str) -> None:
    cfg = fzero.Config(executor=executor)
    loss = _loss(Once.apply)  # pyright: ignore
    with pytest.raises(TraceError, match=r"backward of Once at .* once_differentiable"):
        fzero.hvp(loss, cfg)(W, W, X)
    assert torch.equal(fzero.grad(loss, cfg)(W, X)["w"], 2 * W["w"] * X)


@EXECUTORS
def test_a_derivative_that_does_not_pass_its_backward_twice_is_taken(executor: str) -> None:
    def penalty(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: _loss(Once.apply)(params, x))(x).square().sum()  # pyright: ignore

    grads = fzero.grad(penalty, fzero.Config(executor=executor))(W, X)
    assert torch.equal(grads["w"], 4 * W["w"] ** 3)


class Scaled(torch.autograd.Function):
    """A product whose scale has no gradient."""

    @staticmethod
    def forward(x: Tensor, scale: Tensor) -> Tensor:
        return x * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.saved_tensors[0], None


@EXECUTORS
def test_what_is_given_no_gradient_may_stay(ops: dict[str, Fn], executor: str) -> None:
    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return Scaled.apply(params["w"] * x, ops["square"](params["w"] * 1.0)).sum()  # pyright: ignore

    grads = fzero.grad(loss, fzero.Config(executor=executor))(W, X)
    assert torch.equal(grads["w"], W["w"] ** 2 * X)


@EXECUTORS
def test_inside_a_module_it_is_refused_as_well(executor: str) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(W["w"].clone())

        def forward(self, x: Tensor) -> Tensor:
            return (Once.apply(self.w) * x).sum()  # pyright: ignore

    apply, params = fzero.functionalize(Layer())
    with pytest.raises(TraceError, match=r"backward of Once at .* once_differentiable"):
        fzero.hvp(apply, fzero.Config(executor=executor))(params, params, X)


def _collectives() -> list[str]:
    def broadcast(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return funcol.broadcast(params["w"] * x, 0, dist.group.WORLD).sum() + params["w"].sum()

    def summed(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return funcol.all_reduce(params["w"] * x, "sum", dist.group.WORLD).sum()

    said = []
    for executor in ("traced", "eager"):
        cfg = fzero.Config(stage=0, executor=executor)
        params = fzero.shard(dict(W), cfg)
        with pytest.raises(FzeroError) as error:
            fzero.grad(broadcast, cfg)(params, X)
        said.append(str(error.value))
        with pytest.raises(FzeroError) as error:
            fzero.jvp(summed, cfg)(params, params, X)
        said.append(str(error.value))
    return said


def test_functional_collectives_are_refused_where_they_have_none() -> None:
    for said in run_ranks(2, _collectives):
        assert ["broadcast" in x or "all_reduce" in x for x in said] == [True] * 4
        assert ["in forward mode" in x for x in said] == [False, True] * 2


def test_a_compiled_part_stays_whole(ops: dict[str, Fn]) -> None:
    part = torch.compile(lambda x: ops["custom"](x).sum(), backend="eager", fullgraph=True)
    torch._dynamo.reset()
    with Derived(str):
        assert part(W["w"]) == (W["w"] ** 2).sum()
