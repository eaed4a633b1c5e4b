"""Small modules that have what is hard for an engine, each in its forward or in its outputs."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    """Tied, frozen, unused, scalar, used outside, called several times; 6 columns in, 5 out."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 5)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.inner = nn.Linear(5, 5)
        self.frozen = nn.Linear(5, 6).requires_grad_(False)
        self.tied = nn.Linear(6, 5, bias=False)
        self.tied.weight = self.up.weight
        self.unused = nn.Parameter(torch.randn(3, 2))
        self.outside = nn.Parameter(torch.randn(7))

    def forward(self, x: Tensor, times: int = 3) -> Tensor:
        h = torch.tanh(self.up(x) * self.gain)
        for _ in range(times):
            h = torch.tanh(self.inner(h))
        return self.tied(self.frozen(h))


@dataclass
class Answer:
    loss: Tensor
    hidden: dict[str, Any]


class Structured(nn.Module):
    """Gives a tuple, a dict or a dataclass with tensors at several depths."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.a, self.b = nn.Linear(6, 4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.a(x))
        y = self.b(h)
        loss = y.square().mean()
        if self.kind == "tuple":
            return loss, (h, [y])
        if self.kind == "dict":
            return {"loss": loss, "rest": {"h": h, "y": y, "none": None}}
        return Answer(loss, {"h": h, "all": (y, 3)})


def structured_tuple() -> nn.Module:
    return Structured("tuple")


def structured_dict() -> nn.Module:
    return Structured("dict")


def structured_dataclass() -> nn.Module:
    return Structured("dataclass")


class Experts(nn.Module):
    """Runs what it is told to; 6 columns in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.experts = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

    def forward(self, x: Tensor, which: list[int], reentrant: bool | None = None) -> Tensor:
        x = torch.tanh(self.first(x))
        for i in which:
            if reentrant is None:
                x = x + torch.tanh(self.experts[i](x))
            else:
                x = x + checkpoint(self.experts[i], x, use_reentrant=reentrant)
        return self.last(x)


class Block(nn.Module):
    """Two layers with a frozen one between them, or with an adapter beside a frozen one."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.lora = kind == "lora"
        if kind:
            self.a.requires_grad_(False)
        if kind in ("lora", "frozen"):
            self.b.requires_grad_(False)
        if self.lora:
            self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        low = self.up(self.down(x)) if self.lora else 0.0
        return x + self.b(h) + low


class Checkpointed(nn.Module):
    """Blocks that are computed again in backward, each in a way of its own.

    Args:
        ways: for each block "plain", "re" (re-entrant), "non" (not), "re+non" (the one inside the
            other), and so on.
        kinds: of the blocks.
    """

    def __init__(self, ways: list[str], kinds: list[str] | None = None) -> None:
        super().__init__()
        kinds = kinds or [""] * len(ways)
        self.ways = ways
        self.blocks = nn.ModuleList([Block(kind) for kind in kinds])
        self.shared = nn.Parameter(torch.randn(6))
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        for way, block in zip(self.ways, self.blocks, strict=True):
            x = _through(way.split("+"), lambda h, b=block: b(h) * self.shared, x)
        return self.head(x)


def _through(ways: list[str], block: Any, x: Tensor) -> Tensor:
    if ways[0] == "plain":
        return block(x)
    inner = block if len(ways) == 1 else lambda h: _through(ways[1:], block, h)
    return checkpoint(inner, x, use_reentrant=ways[0] == "re")  # pyright: ignore


class TiledLoss(torch.autograd.Function):
    """The mean square of a head's output, row by row, with its backward inside the forward."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, head: nn.Module) -> Tensor:  # pyright: ignore
        total, grads = h.new_zeros(()), []
        for row in h.detach().split(1):
            with torch.enable_grad():
                row.requires_grad_()
                loss = head(row).square().sum() / h.shape[0]
                loss.backward()
            total += loss.detach()
            grads.append(row.grad)
        ctx.save_for_backward(torch.cat(grads))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        return ctx.saved_tensors[0] * grad, None


class TiledMLP(torch.autograd.Function):
    """A module row by row, whose backward runs forward and backward of every row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mlp: nn.Module, *params: Tensor) -> Tensor:  # pyright: ignore
        ctx.save_for_backward(x)
        ctx.mlp = mlp
        with torch.no_grad():
            return torch.cat([mlp(row) for row in x.split(1)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        (x,) = ctx.saved_tensors
        grads = []
        for row, up in zip(x.detach().split(1), grad.split(1), strict=True):
            with torch.enable_grad():
                row.requires_grad_()
                torch.autograd.backward(ctx.mlp(row), up)
            grads.append(row.grad)
        return (torch.cat(grads), None, *[None for _ in ctx.needs_input_grad[2:]])


class Tiled(nn.Module):
    """An MLP in tiles, then a loss in tiles."""

    def __init__(self, mlp: bool = True, loss: bool = True) -> None:
        super().__init__()
        self.tiles, self.loss = mlp, loss
        self.first, self.mlp, self.head = nn.Linear(6, 6), Block(), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = TiledMLP.apply(h, self.mlp, *self.mlp.parameters()) if self.tiles else self.mlp(h)
        return TiledLoss.apply(h, self.head) if self.loss else self.head(h).square().mean()


class Lost(RuntimeError):
    """What the tests raise on purpose."""


class Raises(nn.Module):
    """Raises where it is told to: in forward, in backward, when it is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.where = ""
        self.calls = 0

    def forward(self, x: Tensor, reentrant: bool | None = None) -> Tensor:
        x = torch.tanh(self.a(x))
        if self.where == "forward":
            raise Lost
        self.calls = 0
        middle = self._middle
        x = middle(x) if reentrant is None else checkpoint(middle, x, use_reentrant=reentrant)  # pyright: ignore
        return self.c(x)

    def _middle(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.where == "again" and self.calls == 2:
            raise Lost
        x = torch.tanh(self.b(x))
        if self.where == "backward" and x.requires_grad:
            x.register_hook(_lose)
        return x


def _lose(grad: Tensor) -> None:
    raise Lost
