"""An engine of a function that builds its module."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.engine.building import build
from fzero.errors import ConfigError, RankMismatchError, ShardError
from tests.ranks import run_ranks


class Model(nn.Module):
    """Tied, frozen and noted parameters, buffers of all kinds, random ones too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.embed.weight
        self.norm.bias.requires_grad_(False)
        self.norm.weight.no_decay = True  # pyright: ignore
        self.register_buffer("noise", torch.randn(6), persistent=False)
        self.register_buffer("same", self.noise)

    def forward(self, tokens: Tensor) -> Tensor:
        x, _ = self.lstm(self.embed(tokens))
        x = self.norm(x.flatten(0, 1)) + self.noise
        return nn.functional.cross_entropy(self.head(x), tokens.flatten())


def _trained(made: Callable[[], nn.Module] | nn.Module, stage: int, rank: int) -> list[Tensor]:
    opt, cfg = fzero.optim.adamw(0.05), fzero.Config(stage=stage)
    engine = fzero.Engine(made, opt, cfg)
    assert engine.module.norm.weight.no_decay  # pyright: ignore
    assert engine.module.same is engine.module.noise
    for step in range(3):
        tokens = (torch.arange(10).view(2, 5) * (rank + 2) + step) % 12
        engine(tokens).backward()
        engine.step()
    full = [x for _, x in sorted(engine.state_dict().items())]
    after = torch.rand(1)  # where the generator is
    return [*full, engine.release()(torch.zeros(2, 5, dtype=torch.int64)).detach(), after]


def _both(stages: list[int]) -> list[str]:
    rank, wrong = torch.distributed.get_rank(), []
    for stage in stages:
        torch.manual_seed(3)
        expected = _trained(Model(), stage, rank)
        torch.manual_seed(3)
        found = _trained(Model, stage, rank)
        if not all(map(torch.equal, found, expected)):
            wrong.append(f"stage {stage}: {found} for {expected}")
    return wrong


def test_a_built_module_trains_as_one_that_was_there_bit_for_bit() -> None:
    assert run_ranks(2, _both, [0, 1, 2, 3], timeout=120) == [[], []]


def test_a_module_is_built_without_its_memory() -> None:
    module = build(lambda: nn.Sequential(nn.Linear(4000, 4000), nn.BatchNorm1d(4))).module
    assert sum(p.untyped_storage().nbytes() for p in module.parameters()) < 100
    assert torch.equal(module[1].running_var, torch.ones(4))  # pyright: ignore


def _seeds_differ() -> str:
    torch.manual_seed(torch.distributed.get_rank())
    try:
        fzero.Engine(lambda: nn.Linear(3, 3))
    except RankMismatchError as error:
        return str(error)
    return ""


def test_ranks_that_would_build_other_values_are_told() -> None:
    assert all("seed" in message.lower() for message in run_ranks(2, _seeds_differ))


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(2, 2), [torch.ones(2)]


def test_what_can_not_be_built_is_refused() -> None:
    with pytest.raises(ShardError, match=r"attribute '0\.table'"):
        fzero.Engine(lambda: nn.Sequential(Keeps()))
    with pytest.raises(ConfigError, match="returned a dict"):
        fzero.Engine(lambda: {"w": torch.ones(2)})  # pyright: ignore
    with pytest.raises(ConfigError, match="broadcast"):
        fzero.Engine(lambda: nn.Linear(2, 2), broadcast=True)


def test_an_engine_is_no_function_that_builds_a_module() -> None:
    engine = fzero.Engine(nn.Linear(2, 1), fzero.optim.sgd(0.1))
    with pytest.raises(ConfigError, match=r"model is an Engine already.*engine\.release\(\)"):
        fzero.Engine(engine, fzero.optim.sgd(0.1))  # pyright: ignore[reportArgumentType]
    assert fzero.Engine(engine.release(), fzero.optim.sgd(0.1)).global_steps == 0
