"""What torch takes for everybody, a default device, is nothing to the tensors that fzero makes."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from tests.ranks import run_ranks

FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full"),
    *("linspace", "logspace", "ones", "rand", "randint", "randn", "randperm", "range"),
    *("scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
    *("sparse_coo_tensor", "sparse_csr_tensor"),
}
FREE = {
    "simulation/models.py": "builds models as a user would, inside of torch.device('meta')",
}


def test_every_factory_is_told_its_device() -> None:
    package = Path(fzero.__file__).parent
    found = [
        f"{path}:{call.lineno}: {ast.unparse(call)}"
        for path in package.rglob("*.py")
        if path.relative_to(package).as_posix() not in FREE
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and ast.unparse(call.func.value) == "torch"
        and call.func.attr in FACTORIES
        and not {"device", None} & {keyword.arg for keyword in call.keywords}
    ]
    assert not found, "\n".join(found)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.drop, self.two = nn.Linear(6, 5), nn.Dropout(0.2), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.drop(torch.tanh(self.one(x))))


OPTIMIZERS = {
    "adamw": lambda: fzero.optim.adamw(fzero.optim.cosine(0.1, 10)),
    "injected": lambda: fzero.optim.inject_hyperparams(fzero.optim.sgd)(0.1),
    "clipped": lambda: fzero.optim.chain(
        fzero.optim.clip_by_global_norm(1.0), fzero.optim.sgd(0.1, momentum=0.9)
    ),
}


def _trained(elsewhere: bool, name: str, config: dict[str, Any]) -> list[Tensor]:
    """Parameters after three steps, and the number of steps."""
    ambient = torch.device("meta") if elsewhere else torch.device("cpu")
    torch.manual_seed(0)
    apply, params = fzero.functionalize(Net())
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))

    def model_fn(params: Any, x: Tensor) -> Tensor:
        return apply(params, x).square().mean()

    with ambient:
        step_fn = fzero.make_train_step(model_fn, OPTIMIZERS[name](), fzero.Config(**config))
        state = step_fn.init(params)
    for _ in range(3):
        state = step_fn(*state, x)
    with ambient:
        return [*fzero.unshard(state[0]).values(), state[1].step]


def _engine(elsewhere: bool, config: dict[str, Any]) -> list[Tensor]:
    ambient = torch.device("meta") if elsewhere else torch.device("cpu")
    torch.manual_seed(0)
    net = Net().eval()
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    with ambient:
        engine = fzero.Engine(net, fzero.optim.adamw(0.1), fzero.Config(**config))
    for _ in range(3):
        engine.backward(engine(x).square().mean())
        engine.step()
    with ambient:
        params, opt_state = engine.state
        return [*fzero.unshard(params).values(), opt_state.step]


def _same(config: dict[str, Any]) -> list[str]:
    """Which of all that is made under another default device differs."""
    wrong = []
    for name in OPTIMIZERS:
        pairs = zip(_trained(True, name, config), _trained(False, name, config), strict=True)
        wrong += [f"{name} {i}" for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
    pairs = zip(_engine(True, config), _engine(False, config), strict=True)
    return wrong + [f"engine {i}" for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]


@pytest.mark.parametrize("config", [{"stage": 0}, {"stage": 3, "clip_norm": 1.0}], ids=str)
def test_one_rank_trains_on_its_device(config: dict[str, Any]) -> None:
    assert _same(config) == []


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.quick("3")
def test_ranks_train_on_their_device(stage: int) -> None:
    assert run_ranks(2, _same, {"stage": stage}) == [[], []]
