"""The module of a program: pieces in a row, each of which maps (rows, width) to the same."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.fuzz.sources import SOURCES
from benchmarks.fuzz.values import VALUES, number, use

Batch = tuple[Tensor, Tensor, Tensor]  # (rows, width) floats, (rows,) ids, (rows, width) targets


class Rerun(torch.autograd.Function):
    """A checkpoint as Megatron writes it: backward runs the module again."""

    @staticmethod
    def forward(ctx: Any, fn: Any, x: Tensor, *params: Tensor) -> Tensor:
        ctx.fn, ctx.params = fn, params
        ctx.save_for_backward(x)
        with torch.no_grad():
            return fn(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.fn(x)
        wanted = [p for p in ctx.params if p.requires_grad]
        found = torch.autograd.grad(y, (x, *wanted), grads[0], allow_unused=True)
        each = dict(zip(map(id, wanted), found[1:], strict=True))
        return None, found[0], *(each.get(id(p)) for p in ctx.params)


class ScaleGradient(torch.autograd.Function):
    """Reads from outside in backward only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, read: Any) -> Tensor:
        ctx.read = read
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * number(ctx.read()) * 8, None


class Block(nn.Module):
    """Two layers with a residual."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Transposed(nn.Module):
    """A leaf that isn't contiguous."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, hidden).mul_(0.3).t())
        self.every = nn.Parameter(torch.randn(2 * width)[::2])
        self.point = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh((x @ self.weight.t()) @ self.weight) * self.point + self.every


class ChannelsLast(nn.Module):
    """A convolution whose weight lies in memory as images do."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, 3, 2).to(memory_format=torch.channels_last)  # pyright: ignore

    def forward(self, x: Tensor) -> Tensor:
        image = x[:, :, None, None] * torch.ones(2, 2, dtype=x.dtype)
        y = self.conv(image).flatten(1)
        return x + F.pad(y, (0, x.shape[1] - 3)).tanh()


class Modes(nn.Module):
    """Computes one thing in training and another in evaluation."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(x) * self.gain
        return x.sin() if self.training else x.tanh() * 0.5


class Normed(nn.Module):
    """Batch norm, of a transpose or not."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width, momentum=None if hidden == 5 else 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(x.t().contiguous().t()) * 0.5


class Statistics(nn.Module):
    """Buffers of three kinds: an average, a count, one that is replaced by another tensor."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(width))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("last", torch.ones(width), persistent=False)
        self.gain = nn.Parameter(torch.ones(width))
        self.average: Tensor
        self.count: Tensor
        self.last: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.gain + (self.average - 0.1 * self.last).to(x.dtype)
        if self.training:
            with torch.no_grad():
                self.average.lerp_(x.mean(0).to(self.average.dtype), 0.3)
                self.count.add_(1)
                self.last = x.mean(0).tanh().to(self.average.dtype)
        return y + 0.05 * self.count


class Words(nn.Module):
    """An embedding that is added, and read out again by its own weight."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        norm = 0.8 if hidden % 3 == 0 else None
        self.embed = nn.Embedding(7, width, max_norm=norm, padding_idx=0 if hidden % 2 else None)
        self.out = nn.Linear(width, 7, bias=False)
        self.out.weight = self.embed.weight
        self.ids: Tensor | None = None

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        y = x + self.embed(ids)
        return x + (torch.tanh(self.out(y)) @ self.embed.weight) * 0.3


class Teacher(nn.Module):
    """A frozen copy that follows the trained layer, written in forward."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.net = nn.Linear(width, width)
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for p, q in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                    p.mul_(0.5).add_(q, alpha=0.5)
        return self.net(x) - self.teacher(x).detach() * 0.5


class Frozen(nn.Module):
    """Half of the leaves are frozen."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.low, self.high = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x)) + self.high(self.low(x))


class Symmetric(nn.Module):
    """A matrix of its upper half."""

    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT


class Weighted(nn.Module):
    """A parametrised layer: the weight is computed by another module at each read."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        how = nn.utils.parametrizations
        layer = nn.Linear(width, width)
        if hidden % 2:
            self.layer = how.weight_norm(layer)
        else:
            nn.utils.parametrize.register_parametrization(layer, "weight", Symmetric())
            self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) + x


class Recurrent(nn.Module):
    """Weights that a flat buffer holds."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.cell = nn.GRU(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.cell(x[None])[0][0]


class Counting(nn.Module):
    """Python state that forward changes."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.calls = 0
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        return x * self.gain  # what it counts is never used


class Experts(nn.Module):
    """A list of layers of which an attribute says which one runs; its order may change."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.which = 0

    def forward(self, x: Tensor) -> Tensor:
        rest = sum(layer(x).sin() for layer in self.layers)
        return self.layers[self.which](x).tanh() + 0.1 * rest


class Reader(nn.Module):
    """Reads a value from one of the sources at one of several places."""

    def __init__(self, width: int, spec: dict[str, Any]) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.place = spec["place"]
        read, self.__dict__["write"] = SOURCES[spec["source"]](self, VALUES[spec["value"]]())
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.gain
        if self.place == "backward":
            return ScaleGradient.apply(x, self.read)  # pyright: ignore
        if self.place == "tensor hook":
            x = x * 1
            if x.requires_grad:  # it doesn't while a re-entrant checkpoint runs it first
                x.register_hook(lambda grad: grad * number(self.read()) * 8)
            return x
        return use(x, self.read())


KINDS: dict[str, Callable[..., nn.Module]] = {
    "block": Block, "transposed": Transposed, "channels last": ChannelsLast, "modes": Modes,
    "normed": Normed, "statistics": Statistics, "words": Words, "teacher": Teacher,
    "frozen": Frozen, "weighted": Weighted, "recurrent": Recurrent, "counting": Counting,
    "experts": Experts, "reader": Reader,
}  # fmt: skip


class Net(nn.Module):
    """The pieces, then the loss."""

    def __init__(self, program: dict[str, Any]) -> None:
        super().__init__()
        width = program["width"]
        self.wraps = [piece["wrap"] for piece in program["pieces"]]
        made = []
        for piece in program["pieces"]:
            kind = KINDS[piece["kind"]]
            made.append(
                kind(width, piece) if kind is Reader else kind(width, piece.get("hidden", 3))
            )
        self.pieces = nn.ModuleList(made)
        if program.get("tie"):
            blocks = [m for m in made if isinstance(m, Block)]
            for other in blocks[1:]:
                if other.up.weight.shape == blocks[0].up.weight.shape:
                    other.up.weight = blocks[0].up.weight

    def forward(self, x: Tensor, ids: Tensor, targets: Tensor) -> Tensor:
        for piece, wrap in zip(self.pieces, self.wraps, strict=True):
            fn = (lambda x, p=piece: p(x, ids)) if isinstance(piece, Words) else piece
            if wrap == "re-entrant":
                x = checkpoint(
                    fn, x if x.requires_grad else x.detach().requires_grad_(), use_reentrant=True
                )  # pyright: ignore
            elif wrap == "not re-entrant":
                x = checkpoint(fn, x, use_reentrant=False)  # pyright: ignore
            elif wrap == "function":
                x = Rerun.apply(fn, x, *piece.parameters())  # pyright: ignore
            else:
                x = fn(x)
        return (x - targets).square().mean()


def build(program: dict[str, Any], dtype: torch.dtype) -> Net:
    """The same module each time, as the same program gives it."""
    torch.manual_seed(program["seed"])
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return Net(program).to(dtype)
    finally:
        torch.set_default_dtype(before)


def batch(program: dict[str, Any], step: int, micro: int, rank: int, dtype: torch.dtype) -> Batch:
    """Rows of this step, micro-batch and rank; no two are alike."""
    draw = torch.Generator().manual_seed(((program["seed"] * 31 + step) * 7 + micro) * 5 + rank + 1)
    rows, width = 3 + (step in program["longer"]), program["width"]
    x = torch.randn(rows, width, generator=draw, dtype=torch.float64)
    y = torch.randn(rows, width, generator=draw, dtype=torch.float64)
    ids = torch.randint(0, 7, (rows,), generator=draw)
    return x.to(dtype), ids, y.to(dtype)
