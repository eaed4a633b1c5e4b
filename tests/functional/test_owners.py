"""Parameters know their modules' classes, and autocast reads it: which leaf travels how."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero import Config, ConfigError, Precision
from fzero.distributed.mesh import resolve_mesh
from fzero.functional.owners import owners_of
from fzero.state.sharding import plan_sharding

BF16 = torch.bfloat16
LINEAR, EMBEDDING = "torch.nn.modules.linear.Linear", "torch.nn.modules.sparse.Embedding"


class Narrow(nn.Linear):
    """A subclass, which is not its base class."""


class Net(nn.Module):
    """A parameter of each kind: safe, not safe, tied over both, a subclass's, and of no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.up, self.narrow = nn.Linear(4, 6), Narrow(6, 4)
        self.norm = nn.LayerNorm(4)
        self.conv = nn.Conv1d(1, 1, 3, padding=1)
        self.head, self.tied = nn.Linear(4, 5, bias=False), nn.Linear(4, 5, bias=False)
        self.tied.weight = self.embed.weight
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.narrow(self.up(self.embed(tokens))))
        x = self.conv(x.unsqueeze(-2)).squeeze(-2)
        return self.gain * (self.head(x) + self.tied(x))


SAFE = {"up.weight", "up.bias", "conv.weight", "conv.bias", "head.weight"}


def low_leaves(params: Any, precision: Precision) -> set[str]:
    """Names of the leaves that a plan gathers and reduces in the autocast dtype."""
    layout = plan_sharding(
        params, Config(precision=precision), resolve_mesh(None, "cpu"), sharded=True
    ).layout
    low = {leaf.name for leaf in layout if leaf.compute == BF16}
    assert low == {leaf.name for leaf in layout if leaf.reduce == BF16}
    return low


def test_functionalize_notes_the_exact_classes() -> None:
    _, params = fzero.functionalize(Net())
    assert owners_of(params["up.bias"]) == (LINEAR,)
    assert owners_of(params["embed.weight"]) == (LINEAR, EMBEDDING)
    assert owners_of(params["narrow.weight"]) == (f"{__name__}.Narrow",)
    assert owners_of(params["gain"]) == (f"{__name__}.Net",)
    assert owners_of(Net().gain) is None


def test_safe_modules_are_matched_by_exact_class() -> None:
    _, params = fzero.functionalize(Net())
    assert low_leaves(params, Precision(autocast=BF16)) == SAFE
    for given, names in (
        ((), set()),
        ((nn.Embedding,), set()),  # its one weight is a Linear's too
        ((nn.Embedding, "torch.nn.Linear"), {*SAFE, "embed.weight"} - {"conv.weight", "conv.bias"}),
        ((f"{__name__}.Narrow",), {"narrow.weight", "narrow.bias"}),
        ((Net,), {"gain"}),
    ):
        assert low_leaves(params, Precision(None, None, None, None, BF16, given)) == names


def test_a_leaf_without_a_note_is_refused_with_the_way_on() -> None:
    _, params = fzero.functionalize(Net())
    params["up.weight"] = params["up.weight"].clone()
    message = r"params\['up\.weight'\].*functionalize.*lower_precision_safe_modules=\(\)"
    with pytest.raises(ConfigError, match=message):
        low_leaves(params, Precision(autocast=BF16))
    assert low_leaves(params, Precision(autocast=BF16, lower_precision_safe_modules=())) == set()
    assert low_leaves(params, Precision()) == set()


@pytest.mark.parametrize(
    "pass_on",
    [
        dict,
        copy.deepcopy,
        lambda params: {"nested": [params]},
        lambda params: fzero.unshard(fzero.shard(params)),
        lambda params: {name: x for name, x in params.items() if "norm" not in name},
    ],
)
def test_notes_stay_with_the_tensors(pass_on: Callable[[Any], Any]) -> None:
    _, params = fzero.functionalize(Net())
    found = low_leaves(pass_on(params), Precision(autocast=BF16))
    assert {name.removeprefix("nested.0.") for name in found} == SAFE


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.quick("True-0", "False-3")
def test_a_step_passes_them_on(stage: int, donate: bool) -> None:
    apply, _ = fzero.functionalize(Net())
    cfg = Config(stage, donate=donate, precision=Precision(autocast=BF16))
    step_fns = [
        fzero.make_train_step(lambda p, x: apply(p, x).square().mean(), fzero.optim.sgd(0.1), cfg)
        for _ in range(2)
    ]
    state = step_fns[0].init(lambda: fzero.functionalize(Net())[1])
    batch = torch.tensor([1, 2, 3])
    for step_fn in step_fns:  # the second one knows nothing but the state
        state = step_fn(*state, batch)
        assert low_leaves(state[0], Precision(autocast=BF16)) == SAFE


def test_a_noted_tensor_is_saved_and_loaded_without_running_code() -> None:
    _, params = fzero.functionalize(Net())
    file = io.BytesIO()
    torch.save(params, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert all(torch.equal(loaded[name], x) for name, x in params.items())
    assert owners_of(loaded["up.bias"]) == (LINEAR,)
