"""`engine.release()`: the module is plain PyTorch again, with what it has learned."""

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fzero
from fzero.errors import BackwardError
from tests.engine import models
from tests.engine.parity import SGD, build, data
from tests.ranks import run_ranks


class Net(nn.Module):
    """A tied weight, a frozen one, an LSTM's flat weights, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rnn = nn.Linear(4, 5), nn.LSTM(5, 4, batch_first=True)
        self.norm, self.last = nn.LayerNorm(4), nn.Linear(5, 4, bias=False)
        self.tied = nn.Linear(4, 5, bias=False)
        self.last.weight = nn.Parameter(self.last.weight.data.clone())
        self.again = nn.Linear(5, 4, bias=False)
        self.again.weight = self.last.weight
        self.tied.weight.requires_grad_(False)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.rnn(torch.tanh(self.first(x)))
        h = self.tied(self.norm(h) * self.scale.to(h.dtype))
        return self.again(torch.tanh(h)) + self.last(h)


def released(stage: int, precision: Any) -> None:
    torch.manual_seed(0)
    rank = dist.get_rank() if dist.is_initialized() else 0
    x = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(rank))
    module = Net()
    before = dict(module.named_parameters())
    asked = {name: p.requires_grad for name, p in before.items()}
    seen: list[str] = []
    module.first.weight.register_hook(lambda grad: seen.append("hook"))
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()]

    cfg = fzero.Config(stage=stage, precision=precision, frozen="rnn.bias*", gather_together="rnn")
    engine = fzero.Engine(module, fzero.optim.sgd(0.1), cfg)
    for _ in range(2):
        engine(x).square().mean().backward()
        engine.step()
    engine(x).square().mean().backward()  # which no step uses
    expected = engine.state_dict()
    assert engine.release() is module

    assert dict(module.named_parameters()) == before  # the very objects
    assert {name: p.requires_grad for name, p in before.items()} == asked
    assert {type(p) for p in before.values()} == {nn.Parameter}
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()]
    assert module.again.weight is module.last.weight
    for name, value in module.state_dict().items():
        assert torch.equal(value, expected[name].to(value.dtype)), name
        assert value.dtype == torch.float32

    seen.clear()
    plain = Net()
    plain.load_state_dict(expected)
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(copy.deepcopy(plain)))]
    for one in (module, plain, *copies):
        opt = torch.optim.AdamW([p for p in one.parameters() if p.requires_grad], lr=0.1)
        loss = one(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(one.parameters(), 0.1)
        opt.step()
    assert seen == ["hook"]
    for name, value in plain.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name
    assert all((p.grad is not None) == p.requires_grad for p in before.values())

    for use in (lambda: engine(x), engine.step, lambda: engine.state, engine.release):
        with pytest.raises(BackwardError, match="released"):
            use()
    module.load_state_dict(expected)  # ranks have gone apart
    other = fzero.Engine(module, fzero.optim.sgd(0.1), cfg)
    other(x).square().mean().backward()
    other.step()
    other.release()


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_module_is_plain_again(stage: int, precision: Any) -> None:
    if stage == 0 or precision:
        released(stage, precision)
    run_ranks(2, released, stage, precision)


def dropped(stage: int) -> None:
    def again(module: nn.Module) -> fzero.Engine:
        return fzero.Engine(module, SGD(), fzero.Config(stage=stage))

    module = build(models.Net)
    engine: Any = again(module)
    with pytest.raises(fzero.ShardError, match=r"another engine.*engine\.release\(\)"):
        again(module)
    engine(data(0)).square().mean().backward()
    engine.step()
    want = engine.state_dict()
    del engine
    gc.collect()
    if stage == 3:
        with pytest.raises(fzero.ShardError, match=r"engine that is gone.*engine\.release\(\)"):
            again(module)
        new = build(models.Net)
        new.load_state_dict(module.state_dict())
        module = new
    engine = again(module)
    assert all(torch.equal(x, want[name]) for name, x in engine.state_dict().items())
    assert again(engine.release()).global_steps == 0


@pytest.mark.parametrize("stage", [2, 3])
def test_a_dropped_engine_is_told_with_the_way_on(stage: int) -> None:
    run_ranks(2, dropped, stage)


def test_not_inside_of_a_pass_or_a_block() -> None:
    engine = fzero.Engine(nn.Linear(2, 1), fzero.optim.sgd(0.1))
    engine.module.register_forward_pre_hook(lambda *_: engine.release() and None)
    with pytest.raises(BackwardError, match="forward"):
        engine(torch.ones(1, 2))
    engine = fzero.Engine(nn.Linear(2, 1), fzero.optim.sgd(0.1))
    with engine.local_forward(), pytest.raises(BackwardError, match="local_forward"):
        engine.release()
    assert engine(torch.ones(1, 2)).shape == (1, 1)


def test_engines_that_are_dropped_leave_no_hooks() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    for _ in range(3):
        engine = fzero.Engine(module, fzero.optim.sgd(0.1))
        engine(torch.ones(1, 2)).sum().backward()
        engine.step()
        del engine
        gc.collect()
        assert not any(getattr(part, table) for part in module.modules() for table in tables)
