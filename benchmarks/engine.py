"""What `fzero.Engine` costs: its hooks beside a plain backward, and its collectives at stage 3.

    python -m benchmarks.engine                      # all three tables
    python -m benchmarks.engine --only hooks --rounds 200

hooks: `loss.backward()` through the engine at world 1 over the same on the bare module. Each round
times both, one after the other, in changing order; the ratio is the median over rounds, with the
quartiles behind it. Times are the process's processor time on one thread, which the machine's other
work hardly enters. Forward, and dropping the gradients, are not timed. An engine reads each
gradient in backward, which makes a Python object; plain PyTorch's optimizers do so afterwards. The
last column is the ratio with one read of each `param.grad` on the plain side.

parameters: what a backward takes longer with the engine, per parameter tensor of 8x8. At world 2
(one process plays one rank, a fake process group) gradients are packed, reduced and unpacked too.

collectives: calls of one step at stage 3 and the closed form for N equal units: N gathers in
forward, N - 1 in backward, whose first block is still there, and N reduce-scatters. With
`prefetch=1` forward's last gather is followed by the one that backward will need next.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fzero
from benchmarks.memory import one_rank_of
from benchmarks.models import Block

WIDTH, HEADS, TOKENS, ROWS = 128, 4, 64, 4
GATHERS = ("all_gather_into_tensor", "all_gather_into_tensor_out")
SCATTER = "reduce_scatter_tensor"


class Layer(nn.Module):
    """Pre-norm attention and MLP without biases: six tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out, self.up, self.down = (
            nn.Linear(a * WIDTH, b * WIDTH, bias=False) for a, b in ((1, 3), (1, 1), (1, 4), (4, 1))
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).transpose(1, 3).unbind(2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """24 layers, 147 tensors: `model(tokens)` is the mean cross-entropy of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1024, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(24)))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 1024, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.norm(self.layers(self.embed(tokens[:, :-1]))))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Matrices(nn.Module):
    """Residual layers of one square matrix each: hardly any work for each parameter tensor."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        start = (torch.randn(width, width) / width**0.5 for _ in range(count))
        self.weights = nn.ParameterList(start)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.add(x, torch.tanh(x @ weight), alpha=0.05)
        return x.square().mean()


class Pair(NamedTuple):
    """One model twice, and the input of both."""

    plain: nn.Module
    engine: fzero.Engine
    batch: Tensor

    @classmethod
    def of(cls, build: Callable[[], nn.Module], batch: Tensor, stage: int = 3) -> "Pair":
        """The same weights without an engine and with one."""
        torch.manual_seed(0)
        plain = build()
        torch.manual_seed(0)
        return cls(plain, fzero.Engine(build(), cfg=fzero.Config(stage=stage)), batch)

    def rounds(self, count: int) -> list[tuple[float, float, float]]:
        """Seconds of a plain backward, of one with the engine, of reads of the plain one's."""
        times: list[tuple[float, float, float]] = []
        for i in range(count + 3):
            engine = _backward(self.engine, self.batch)[0] if i % 2 else 0.0
            plain, read = _backward(self.plain, self.batch)
            engine = engine or _backward(self.engine, self.batch)[0]
            times.append((plain, engine, read))
        return times[3:]


def _backward(model: Any, batch: Tensor) -> tuple[float, float]:
    loss, params = model(batch), [*model.parameters()]
    start = time.process_time()
    loss.backward()
    end = time.process_time()
    for param in params:
        _ = param.grad
    read = time.process_time() - end
    model.zero_grad()
    return end - start, read


def hooks(rounds: int) -> None:
    """Ratio of the engine's backward to the plain one."""
    tokens, row = torch.randint(0, 1024, (ROWS, TOKENS + 1)), torch.randn(16, 64)
    cases: list[tuple[str, Callable[[], nn.Module], Tensor]] = [
        ("transformer, 24 layers", Transformer, tokens),
        ("1,000 matrices of 64x64", lambda: Matrices(1000, 64), row),
    ]
    _header("model", "tensors", "plain ms", "engine ms", "read ms", "engine / plain", "plain reads")
    for name, build, batch in cases:
        pair = Pair.of(build, batch)
        times = pair.rounds(rounds)
        ratios = [_quartiles([b / a for a, b, _ in times])]
        ratios += [_quartiles([b / (a + c) for a, b, c in times])]
        medians = [f"{statistics.median(column) * 1e3:.2f}" for column in zip(*times, strict=True)]
        tensors = len(list(pair.plain.parameters()))
        _row(name, tensors, *medians, *ratios)


def _quartiles(values: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"


def parameters(rounds: int, counts: Sequence[int]) -> None:
    """Microseconds per parameter tensor that the engine adds to a backward."""
    _header("tensors", "world 1, us each", "world 2, stage 2, us each")
    for count in counts:
        figures: list[str] = []
        for world, stage in ((1, 3), (2, 2)):
            with one_rank_of(world):
                pair = Pair.of(lambda: Matrices(count, 8), torch.randn(16, 8), stage)  # noqa: B023
                added = [b - a for a, b, _ in pair.rounds(max(rounds * 250 // count, 20))]
            low, middle, high = (1e6 * x / count for x in statistics.quantiles(added, n=4))
            figures.append(f"{middle:.2f} [{low:.2f}, {high:.2f}]")
        _row(count, *figures)


def collectives(worlds: Sequence[int], blocks: Sequence[int]) -> None:
    """Collectives of a step at stage 3, counted and by the closed form."""
    columns = ["gathers: forward", "backward", "reduce-scatters", "closed form"]
    _header("world", "blocks", "prefetch", *columns)
    for world, count, prefetch in itertools.product(worlds, blocks, (0, 1)):
        with one_rank_of(world):
            model = nn.Sequential(*(Block(WIDTH, HEADS) for _ in range(count)))
            # a bound of one block: by default small ones share a unit, and N is that of units
            mb = sum(p.nbytes for p in model[0].parameters()) / 2**20
            cfg = fzero.Config(prefetch=prefetch, bucket_mb=mb)
            engine = fzero.Engine(model, fzero.optim.sgd(0.1), cfg)
            x = torch.randn(2, TOKENS, WIDTH)
            calls: list[int] = []
            for _ in range(2):  # the second step is like all later ones
                loss, (forward, _) = _counted(lambda: engine(x).square().mean())  # noqa: B023
                _, (backward, scatters) = _counted(loss.backward)
                _, (in_update, _) = _counted(engine.step)
                calls = [forward, backward, scatters]
                assert not in_update, "the update gathered parameters"
        _row(world, count, prefetch, *calls, f"{count}, {count - 1}, {count}")


def _counted(fn: Callable[[], Any]) -> tuple[Any, list[int]]:
    """What a call returns; how many gathers and reduce-scatters it ran."""
    ops = torch.ops._c10d_functional
    wrapped = {kind: mock.Mock(wraps=getattr(ops, kind)) for kind in (*GATHERS, SCATTER)}
    with mock.patch.multiple(ops, **wrapped):
        out = fn()
    *gathers, scatters = [counter.call_count for counter in wrapped.values()]
    return out, [sum(gathers), scatters]


def _header(*columns: str) -> None:
    print("\n| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|", flush=True)


def _row(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    tables = ["hooks", "parameters", "collectives"]
    parser.add_argument("--only", nargs="+", choices=tables, default=tables)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--tensors", nargs="+", type=int, default=[250, 1000, 4000])
    parser.add_argument("--worlds", nargs="+", type=int, default=[2, 8])
    parser.add_argument("--blocks", nargs="+", type=int, default=[2, 8, 24])
    args = parser.parse_args()
    torch.set_num_threads(1)
    if "hooks" in args.only:
        hooks(args.rounds)
    if "parameters" in args.only:
        parameters(args.rounds, args.tensors)
    if "collectives" in args.only:
        collectives(args.worlds, args.blocks)


if __name__ == "__main__":
    main()
