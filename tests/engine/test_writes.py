"""What the caller does to parameters behind an engine's back."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import fzero
from fzero import FzeroError, tree
from fzero.engine.outputs import loss_in


def backward(engine: fzero.Engine, dtype: torch.dtype = torch.float32) -> None:
    engine(torch.ones(1, 2, dtype=dtype)).sum().backward()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_value_written_is_the_value_that_is_updated(stage: int) -> None:
    model = nn.Linear(2, 1, bias=False)
    engine = fzero.Engine(model, fzero.optim.sgd(1.0), fzero.Config(stage=stage))
    with torch.no_grad():
        model.weight.fill_(4.0)
    backward(engine)
    engine.step()
    assert torch.equal(engine.full_params()["weight"], torch.full((1, 2), 3.0))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_master_follows_what_was_written(stage: int) -> None:
    model = nn.Linear(2, 1, bias=False)
    cfg = fzero.Config(stage=stage, precision="bf16")
    engine = fzero.Engine(model, fzero.optim.sgd(1 / 1024), cfg)
    with torch.no_grad():
        model.weight.fill_(4.0)
    for _ in range(2):
        backward(engine)
        engine.step()
    # the second step went on from the master, which holds what bfloat16 rounds off
    (master,) = tree.leaves(fzero.unshard(engine.state[1].master))
    assert torch.equal(master, torch.full((1, 2), 4 - 2 / 1024))


@pytest.mark.parametrize("replace", [nn.Module.double, nn.Module.bfloat16])
def test_other_memory_is_refused(replace: object) -> None:
    model = nn.Linear(2, 1)
    engine = fzero.Engine(model, fzero.optim.sgd(0.1), fzero.Config(stage=1))
    replace(model)  # pyright: ignore
    backward(engine, model.weight.dtype)
    with pytest.raises(fzero.FzeroError, match="'weight' is no longer in the engine's memory"):
        engine.step()


@pytest.mark.parametrize("fields", [{"stage": 0}, {"stage": 3, "precision": "bf16"}])
def test_a_parameter_that_was_exchanged_is_refused(fields: dict[str, Any]) -> None:
    model = nn.Linear(2, 1)
    engine = fzero.Engine(model, fzero.optim.sgd(0.1), fzero.Config(**fields))
    torch.utils.swap_tensors(model.weight, nn.Parameter(torch.ones(1, 2)))
    with pytest.raises(fzero.FzeroError, match="'weight' was exchanged for another tensor"):
        engine(torch.ones(1, 2))


class Outputs:
    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: x,
        lambda x: (x, torch.ones(3)),
        lambda x: {"logits": torch.ones(3), "loss": x},
        Outputs,
    ],
)
def test_a_loss_is_found_where_models_put_it(wrap: object) -> None:
    loss = torch.tensor(2.0, requires_grad=True)
    found = loss_in(wrap(loss))  # pyright: ignore
    assert found is not None
    assert found.item() == 2.0
    assert not found.requires_grad


@pytest.mark.parametrize("out", [torch.ones(3), {"x": 1}, (), None, torch.tensor(1), ["text"]])
def test_no_loss_is_made_up(out: object) -> None:
    assert loss_in(out) is None


def test_the_metric_is_the_mean_of_the_micro_batches() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": self.w * x}

    engine = fzero.Engine(Model(), fzero.optim.sgd(0.1), fzero.Config(accum_steps=2))
    for x in (1.0, 4.0):
        engine(torch.tensor(x))["loss"].backward()
        engine.step()
    assert engine.state[1].metrics["loss"].item() == 2.5


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:  # pyright: ignore
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # pyright: ignore
        raise ValueError("on purpose")


def test_the_loss_of_a_backward_that_raised_is_not_in_the_metric() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    engine = fzero.Engine(model, fzero.optim.sgd(0.1))
    with pytest.raises(ValueError, match="on purpose"):
        engine(Raises.apply(torch.full((1, 1), 9.0, requires_grad=True))).backward()
    engine(torch.full((1, 1), 2.0)).backward()
    engine.step()
    assert engine.state[1].metrics["loss"].item() == 2.0


def test_the_callers_autocast_reaches_the_module() -> None:
    engine = fzero.Engine(nn.Linear(2, 2), fzero.optim.sgd(0.1))
    with torch.autocast("cpu", torch.bfloat16):
        assert engine(torch.ones(1, 2)).dtype == torch.bfloat16
    own = fzero.Config(precision=fzero.Precision(autocast=torch.float16))
    engine = fzero.Engine(nn.Linear(2, 2), fzero.optim.sgd(0.1), own)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(fzero.ConfigError, match="autocast"):
        engine(torch.ones(1, 2))


@pytest.mark.parametrize(
    "fields", [{"stage": 0}, {"stage": 1}, {"stage": 2, "precision": "bf16"}, {"stage": 3}]
)
def test_what_data_is_assigned_counts_wherever_the_engine_is_asked(fields: dict[str, Any]) -> None:
    model = nn.Linear(2, 2, bias=False)
    engine = fzero.Engine(model, fzero.optim.sgd(1.0), fzero.Config(**fields))
    asked = (
        lambda: engine.full_params()["weight"],
        lambda: engine.full_param("weight"),
        lambda: engine.state_dict()["weight"],
        lambda: tree.leaves(fzero.unshard(engine.state[0]))[0],
    )
    for i, ask in enumerate(asked):
        values = torch.arange(4.0).to(model.weight.dtype) + i
        nn.utils.vector_to_parameters(values, model.parameters())
        assert torch.equal(ask().float(), torch.arange(4.0).view(2, 2) + i)
    engine.load_state_dict({"weight": torch.ones(2, 2)})
    assert torch.equal(model.weight.float(), torch.ones(2, 2))
    model.weight.data = torch.eye(2, dtype=model.weight.dtype)
    backward(engine, model.weight.dtype)
    engine.step()
    assert torch.equal(engine.full_params()["weight"], torch.eye(2) - 1)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])  # 3: on one rank all is there
def test_averages_are_swapped_in_and_out(stage: int) -> None:
    model = nn.Linear(2, 1, bias=False)
    engine = fzero.Engine(model, fzero.optim.sgd(1.0), fzero.Config(stage=stage))
    own, average = model.weight.data, torch.full((1, 2), 7.0)
    before = own.clone()
    model.weight.data = average
    assert torch.equal(engine.state_dict()["weight"], average)  # saved while it is in
    model.weight.data = own
    backward(engine)
    engine.step()
    assert torch.equal(engine.full_params()["weight"], before - 1)
    assert torch.equal(average, torch.full((1, 2), 7.0))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_memory_that_is_read_otherwise_is_other_memory(stage: int) -> None:
    model = nn.Linear(2, 2, bias=False)
    engine = fzero.Engine(model, fzero.optim.sgd(1.0), fzero.Config(stage=stage))
    model.weight.data = model.weight.data.T
    expected = model.weight.detach() - torch.tensor([[1.0, 2.0], [1.0, 2.0]])
    engine(torch.tensor([[1.0, 2.0]])).sum().backward()
    engine.step()
    torch.testing.assert_close(model.weight.detach(), expected)
    torch.testing.assert_close(engine.full_params()["weight"], expected)


def test_a_module_that_was_cast_is_not_read_as_it_was() -> None:
    model = nn.Linear(2, 1)
    engine = fzero.Engine(model, fzero.optim.sgd(0.1), fzero.Config(stage=1))
    model.double()
    for ask in (engine.state_dict, engine.full_params, lambda: engine.state):
        with pytest.raises(fzero.FzeroError, match="no longer in the engine's memory"):
            ask()


def _swap(model: Any) -> None:
    model[0], model[1] = model[1], model[0]


def _cut(model: Any) -> None:
    del model[2].tied


MOVES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "pruned": (
        lambda model: prune.identity(model[0], "weight"),
        r"'0\.weight' has become '0\.weight_orig'",
    ),
    "parametrized": (
        lambda model: parametrizations.orthogonal(model[0]),
        r"'0\.weight' has become '0\.parametrizations\.weight\.original'",
    ),
    "changed places": (_swap, r"'1\.weight' has become '0\.weight'"),
    "cut": (_cut, r"'0\.weight' is no longer '2\.tied'"),
}


@pytest.mark.parametrize("how", MOVES)
@pytest.mark.parametrize("stage", [0, 2])
def test_a_parameter_under_another_name_is_refused(stage: int, how: str) -> None:
    def made() -> tuple[Any, fzero.Engine]:
        model: Any = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(3)])
        model[2].tied = model[0].weight
        return model, fzero.Engine(model, fzero.optim.sgd(1.0), fzero.Config(stage))

    move, said = MOVES[how]
    asks = backward, lambda engine: engine.state_dict(), lambda engine: engine.load_state_dict({})
    for ask in asks:
        model, engine = made()
        move(model)
        with pytest.raises(FzeroError, match=said):
            ask(engine)
        assert "1.weight" in engine.full_params()  # what the message names


def test_another_module_may_have_a_parameter_under_its_name() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    engine = fzero.Engine(model, fzero.optim.sgd(1.0), fzero.Config(stage=0))
    other = nn.Linear(2, 2, bias=False)
    other.weight = model[0].weight
    model[0] = other
    backward(engine)
    engine.step()
    assert engine.state_dict().keys() == {"0.weight", "1.weight"}


def test_a_module_that_is_put_around_a_layer_leaves_its_names() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    engine = fzero.Engine(model, fzero.optim.sgd(1.0))
    model[0] = nn.Sequential(model[0], nn.Tanh())
    backward(engine)
    engine.step()
    assert list(engine.full_params()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert torch.equal(engine.full_param("0.weight"), engine.state_dict()["0.0.weight"])
