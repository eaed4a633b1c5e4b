"""Every value says which module made it, and where in the user's code."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fzero
from fzero.program.graph import BACKWARD, FORWARD, UPDATE, is_op, phases
from fzero.program.origin import Origin, origin_of
from fzero.program.sites import SITE
from tests.ranks import fake_ranks


class Layer(nn.Module):
    """One line that computes, in a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


class Model(nn.Module):
    """Two layers, something in place, dropout, a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = (self.layers[0](x) + 1).mul_(2)
        x = fzero.remat(lambda x: torch.sin(self.layers[1](x)))(x)
        return torch.dropout(x, 0.5, True).square().mean()


def line_of(owner: Any, text: str) -> str:
    """Where `text` stands in the source of a class."""
    lines, first = inspect.getsourcelines(owner)
    place = next(i for i, line in enumerate(lines) if text in line)
    return f"{Path(__file__)}:{first + place}"


def program(stage: int, world: int = 2) -> fzero.Program:
    apply, params = fzero.functionalize(Model())
    step_fn = fzero.make_train_step(apply, fzero.optim.adam(0.1), fzero.Config(stage=stage))
    with fake_ranks(world):
        return step_fn.lower(*step_fn.init(params), torch.ones(3, 4))


def found(program: fzero.Program, phase: str, *names: str) -> list[Origin]:
    of = phases(program.graph)
    nodes: list[fx.Node] = [n for n in program.graph.nodes if of[n] == phase and is_op(n, *names)]
    return [origin_of(node) for node in nodes]


@pytest.mark.parametrize("stage", [0, 3])
def test_forward_and_backward_are_of_the_module_that_ran(stage: int) -> None:
    traced = program(stage)
    assert "in-place operators removed" in "".join(traced.log)  # a second recording
    where = line_of(Layer, "torch.tanh(")
    layers = ["layers.0", "layers.1"]
    tanh = found(traced, FORWARD, "aten::tanh")
    assert [(x.module, x.where) for x in tanh] == [(name, where) for name in layers]
    again = found(traced, BACKWARD, "aten::tanh")  # what a checkpoint computes again
    assert [(x.module, x.where) for x in again] == [("layers.1", where)]
    linear = found(traced, FORWARD, "aten::addmm")
    assert [x.module for x in linear] == [f"{name}.inner" for name in layers]
    back = found(traced, BACKWARD, "aten::tanh_backward")
    assert [(x.module, x.where) for x in back] == [(name, where) for name in reversed(layers)]
    assert {x.module for x in found(traced, BACKWARD, "aten::mm")} == {
        f"{name}.inner" for name in layers
    }
    (mask,) = [origin_of(node) for node in traced.graph.nodes if SITE in node.meta]
    assert (mask.module, mask.where) == ("", line_of(Model, "torch.dropout("))


def test_a_function_without_modules_has_its_lines() -> None:
    def model_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.sin(x @ params["w"]).mean()

    with fake_ranks(2):
        step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(0.1))
        traced = step_fn.lower(*step_fn.init({"w": torch.ones(4, 4)}), torch.ones(3, 4))
    (sin,) = found(traced, FORWARD, "aten::sin")
    assert (sin.module, sin.function) == ("", "model_fn")
    assert sin.where == line_of(test_a_function_without_modules_has_its_lines, "torch.sin(")
    update = traced.next
    assert update is not None
    lines = [origin_of(n) for n in update.graph.nodes if phases(update.graph)[n] == UPDATE]
    assert {x.module for x in lines} == {""}
    assert {x.where for x in lines} == {""}  # not the line that asks for the Program


def test_autograd_is_followed_through_either_front_end() -> None:
    class Double(torch.autograd.Function):  # the old style, which torch.func refuses
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return torch.sinh(grad)

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer()

        def forward(self, x: Tensor) -> Tensor:
            return Double.apply(self.layer(x)).mean()  # pyright: ignore

    apply, params = fzero.functionalize(Root())
    step_fn = fzero.make_train_step(apply, fzero.optim.sgd(0.1))
    traced = step_fn.lower(*step_fn.init(params), torch.ones(3, 4))
    assert "torch.autograd.grad" in traced.log[1]
    (back,) = found(traced, BACKWARD, "aten::tanh_backward")
    assert back.module == "layer"
    assert found(traced, BACKWARD, "aten::sinh")[0].where == line_of(Double, "x * 2")


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_a_line_is_the_users_where_torch_calls_a_function_deprecated() -> None:
    def summed(tree: dict[str, Tensor], x: Tensor) -> Tensor:
        out = x.new_empty(2 * len(x))
        torch.distributed.all_gather_into_tensor(out, x)
        return out

    with fake_ranks(2), pytest.raises(fzero.TraceError, match=rf"at {__file__}:\d+, which can't"):
        fzero.jit(summed, fzero.Config(stage=0))({"w": torch.ones(2)}, torch.ones(2))
