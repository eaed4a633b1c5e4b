"""Rematerialisation by the names of modules: the same results, and kept what the globs say."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.errors import ConfigError
from fzero.functional.remat_modules import rule_of

ROWS, WIDTH = 16, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.q(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.up = Attention(), nn.Linear(WIDTH, 4 * WIDTH)
        self.down, self.dropout = nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.dropout(self.down(torch.tanh(self.up(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def trained(remat: Any, wrap: bool = False, **options: Any) -> tuple[list[Tensor], fzero.Program]:
    """Losses and parameters of two steps, and their Program."""
    torch.manual_seed(0)
    module = Net()
    apply, params = fzero.functionalize(module)
    if wrap:
        for block in module.blocks:
            block.forward = fzero.remat(block.forward)

    def model_fn(params: Any, x: Tensor) -> Tensor:
        return apply(params, x).square().mean()

    cfg = fzero.Config(remat=remat, **options)
    step_fn = fzero.make_train_step(model_fn, fzero.optim.adam(0.1), cfg)
    params, state = step_fn.init(params)
    batch = torch.randn(ROWS, WIDTH)
    program = step_fn.lower(params, state, batch)
    program.verify()
    losses = []
    for _ in range(2):
        params, state = step_fn(params, state, batch)
        losses.append(state.metrics["loss"])
    return [*losses, *fzero.unshard(params).values()], program


def again(program: fzero.Program) -> int:
    """FLOPs of products that backward computes again, in products of WIDTH x WIDTH."""
    return program.cost().recomputed // (2 * ROWS * WIDTH * WIDTH)


@pytest.mark.parametrize(
    ("remat", "products"),
    [
        ({}, 0),
        ({"*": "everything"}, 0),
        # what nothing in backward reads is not computed again: the last product of a block
        ({"blocks.*": "nothing"}, 2 * (2 + 4)),
        ({"blocks.*": "dots"}, 0),
        ({"blocks.*.attn": "everything", "blocks.*": "nothing"}, 2 * 4),
        ({"blocks.*.attn": "everything", "*": "nothing"}, 2 * 4),
        ({"blocks.0": "nothing"}, 2 + 4),
        ({"blocks.*.attn": "nothing"}, 2 * 1),
        ({"blocks.1.up": [torch.ops.aten.addmm], "*": "nothing"}, 2 * 2 + 4),
    ],
)
@pytest.mark.quick("remat1-0", "remat8-8", "remat7-2", "remat2-12")
def test_the_globs_say_what_is_computed_again_and_change_no_bit(remat: Any, products: int) -> None:
    plain, _ = trained({})
    found, program = trained(remat)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert again(program) == products


def test_a_glob_is_remat_around_the_module() -> None:
    by_glob, by_hand = trained({"blocks.*": "nothing"}), trained({}, wrap=True)
    assert all(torch.equal(a, b) for a, b in zip(by_glob[0], by_hand[0], strict=True))
    assert by_glob[1].peak_bytes() == by_hand[1].peak_bytes()
    assert again(by_glob[1]) == again(by_hand[1])


def test_a_glob_that_matches_nothing_is_an_error_with_names_that_are_there() -> None:
    with pytest.raises(ConfigError, match=r"'block\.\*' matches no module.*'blocks"):
        trained({"block.*": "nothing"})


def test_the_first_glob_that_matches_a_module_or_one_around_it_counts() -> None:
    rules = [("a.*.x", "dots"), ("a.1", "everything"), ("*", "nothing")]
    names = {"a.0.x.y": "dots", "a.1.x": "dots", "a.1.z": "everything", "b": "nothing"}
    assert {name: rule_of(name, rules) for name in names} == names


def test_an_engine_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ConfigError, match="remat"):
        fzero.Engine(Net(), fzero.optim.sgd(0.1), fzero.Config(remat={"blocks.*": "nothing"}))
