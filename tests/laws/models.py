"""Small models that have every kind of leaf, and the training of them in plain torch.

The reference shares no code with the library: modules, `loss.backward()`, `torch.optim.SGD` and
`clip_grad_norm_`, on the batches of all ranks in one process.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fzero

Batch = tuple[Tensor, Tensor]
CLASSES = 7


class Mixed(nn.Module):
    """Uneven, tied, frozen, unused, scalar, empty and 2-d leaves in one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, 15)
        self.up = nn.Linear(15, 17)
        self.frozen = nn.Linear(17, 16)
        self.down = nn.Linear(16, 15, bias=False)
        self.mix = nn.Parameter(torch.randn(16, 17) / 4)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.unused = nn.Parameter(torch.randn(5, 3))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.dropout = nn.Dropout(0.5).eval()
        self.head = nn.Linear(15, CLASSES, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.up(self.embed(tokens)) * self.gain)
        x = torch.tanh(self.frozen(x) + x @ self.mix.t())
        return self.head(self.dropout(self.down(x))) + self.empty.sum()


class Odd(nn.Module):
    """Leaves of 7 x 15 and 16 x 17, which no world from 2 to 4 divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.randn(CLASSES, 15))
        self.wide = nn.Parameter(torch.randn(16, 17) / 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.pad(self.embed[tokens], (0, 2))
        return torch.tanh(x @ self.wide.t())[:, :CLASSES]


class Normed(nn.Module):
    """BatchNorm between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Embedding(CLASSES, 9)
        self.norm = nn.BatchNorm1d(9)
        self.head = nn.Linear(9, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.up(tokens))))


@dataclass(frozen=True)
class Case:
    """One run of training, on real ranks and in plain torch.

    Args:
        model: makes the module.
        dtype: of its parameters.
        config: fields of `fzero.Config`.
        momentum: of SGD.
        rows: of a micro-batch.
        lr: of SGD.
    """

    model: type[nn.Module]
    dtype: torch.dtype
    config: dict[str, Any]
    momentum: float = 0.9
    rows: int = 3
    lr: float = 0.3

    def module(self) -> nn.Module:
        """The module with the same weights wherever it is made."""
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return self.model().to(self.dtype)

    @property
    def accum_steps(self) -> int:
        """Micro-batches of a step."""
        return self.config.get("accum_steps", 1)

    def batches(self, world: int, step: int) -> list[list[Batch]]:
        """By rank and micro-batch: tokens and classes, all different."""
        generator = torch.Generator().manual_seed(1000 + step)

        def one() -> Batch:
            draw = torch.randint(CLASSES, (2, self.rows), generator=generator)
            return draw[0], draw[1]

        return [[one() for _ in range(self.accum_steps)] for _ in range(world)]


def of_rank(micro: Sequence[Batch]) -> Batch:
    """The batch that one rank passes to a step."""
    return torch.cat([x for x, _ in micro]), torch.cat([y for _, y in micro])


@dataclass
class Trained:
    """What training left: parameters and buffers by name, and the metrics of every step."""

    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    losses: list[float]
    norms: list[float]


def train_ours(case: Case, world: int, rank: int, steps: int, **extra: Any) -> Trained:
    """Training with a step function; full parameters come back. `extra`: more of the config."""
    cfg = fzero.Config(**case.config, **extra)
    model_fn, params, buffers = functional(case.module())
    step_fn = fzero.make_train_step(model_fn, fzero.optim.sgd(case.lr, case.momentum), cfg)
    params, opt_state = step_fn.init(params, buffers or None)
    losses, norms = [], []
    for step in range(steps):
        batch = of_rank(case.batches(world, step)[rank])
        params, opt_state = step_fn(params, opt_state, batch)
        losses.append(opt_state.metrics["loss"].item())
        norms.append(opt_state.metrics["grad_norm"].item())
    return Trained(fzero.unshard(params), opt_state.model_state or {}, losses, norms)


def functional(
    module: nn.Module,
) -> tuple[Callable[..., Any], dict[str, Tensor], dict[str, Tensor]]:
    """A model function for `module`, its parameters, and its buffers if it has any."""
    if not list(module.buffers()):
        apply, params = fzero.functionalize(module)
        return lambda p, batch: F.cross_entropy(apply(p, batch[0]), batch[1]), params, {}
    stateful, params, buffers = fzero.functionalize(module, buffers=True)

    def model_fn(params: Any, state: Any, batch: Batch) -> Any:
        out, new = stateful(params, state, batch[0])
        return F.cross_entropy(out, batch[1]), new

    return model_fn, params, buffers


def train_plain(case: Case, world: int, steps: int) -> Trained:
    """The same with plain torch on all ranks' batches.

    Without BatchNorm that is one forward of the concatenated batch. BatchNorm normalises every
    micro-batch with its own statistics, so there it is one forward per rank and micro-batch, the
    losses averaged; running statistics follow each rank's micro-batches and are then averaged.
    """
    module = case.module()
    cfg = fzero.Config(**case.config)
    named = dict(module.named_parameters())
    for name, p in named.items():
        p.requires_grad_(not cfg.is_frozen(name))
    trained = [p for p in named.values() if p.requires_grad]
    sgd = torch.optim.SGD(trained, case.lr, case.momentum, foreach=False)
    losses, norms = [], []
    for step in range(steps):
        by_rank = case.batches(world, step)
        sgd.zero_grad()
        if list(module.buffers()):
            loss = _by_micro_batch(module, by_rank)
        else:
            x, y = of_rank([of_rank(micro) for micro in by_rank])
            loss = F.cross_entropy(module(x), y)
        loss.backward()
        limit = cfg.clip_norm if cfg.clip_norm is not None else float("inf")
        norms.append(nn.utils.clip_grad_norm_(trained, limit).item())
        sgd.step()
        losses.append(loss.item())
    params = {name: p.detach() for name, p in named.items()}
    return Trained(params, dict(module.named_buffers()), losses, norms)


def _by_micro_batch(module: nn.Module, by_rank: list[list[Batch]]) -> Tensor:
    start = dict(module.named_buffers())
    ends, losses = [], []
    for micro in by_rank:
        ends.append(_with_buffers(module, {k: b.clone() for k, b in start.items()}))
        losses += [F.cross_entropy(module(x), y) for x, y in micro]
    mean = {k: torch.stack([end[k] for end in ends]).double().mean(0) for k in start}
    _with_buffers(module, {k: mean[k].to(b.dtype) for k, b in start.items()})
    return torch.stack(losses).mean()


def _with_buffers(module: nn.Module, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    module.load_state_dict(buffers, strict=False, assign=True)
    return buffers


def error(ours: Trained, plain: Trained) -> float:
    """The largest difference between two runs, relative to the size of what differs."""
    assert ours.params.keys() == plain.params.keys()
    assert ours.buffers.keys() == plain.buffers.keys()
    pairs = [(ours.params[k], plain.params[k]) for k in plain.params]
    pairs += [(ours.buffers[k], plain.buffers[k]) for k in plain.buffers]
    lists = [(ours.losses, plain.losses), (ours.norms, plain.norms)]
    pairs += [
        (torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64))
        for a, b in lists
    ]
    # a maximum that NaN does not get past
    return torch.tensor([_relative(a, b) for a, b in pairs if b.numel()]).max().item()


def _relative(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape, (a.shape, b.shape)
    a, b = a.double(), b.double()
    return ((a - b).abs().max() / b.abs().max().clamp(min=1e-3)).item()
