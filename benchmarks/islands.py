"""Bytes that a step with an opaque part holds, beside the eager executor, which runs all as such.

    torchrun --nproc_per_node 2 -m benchmarks.islands

Three models that read values in the middle: a packed LSTM, a CTC loss, experts chosen by boolean
indices, between layers that stage out; at stage 3, SGD. Tensors alone, by the allocator's events on
rank 0: what is held between steps, and the peak of a step with `opaque="auto"` and with
`executor="eager"`. Losses of both are compared.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fzero
from benchmarks.allocations import measure

WIDTH, ROWS, STEPS = 256, 64, 32
MIB = 2**20


class Packed(nn.Module):
    """An LSTM over rows of several lengths, which the values say."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = 1 + (x[:, :, 0] > 0).sum(1).clamp(max=STEPS - 1)
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
        out, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], True, total_length=STEPS)
        return out


class Aligned(nn.Module):
    """A CTC loss of what a layer says, spread over the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(x).log_softmax(-1).transpose(0, 1)
        targets = (x[:, :8, 0] > 0).long() + 1
        steps, letters = (torch.full((len(x),), n) for n in (STEPS, 8))
        return x + F.ctc_loss(logits, targets, steps, letters)


class Experts(nn.Module):
    """Eight experts, each for the rows whose values choose it."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        chosen, out = x[..., :8].argmax(-1), torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            out[chosen == i] = expert(x[chosen == i])
        return out


class Net(nn.Module):
    """A part that can't be staged out, between blocks that can."""

    def __init__(self, part: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.before, self.part, self.after = self._block(), part(), self._block()

    @staticmethod
    def _block() -> nn.Module:
        wide = [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)]
        return nn.Sequential(*wide, nn.LayerNorm(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.part(self.before(x)))


def step_of(part: Callable[[], nn.Module], options: dict[str, Any]) -> Callable[[], Tensor]:
    """A step that holds its state and gives its loss."""
    torch.manual_seed(0)
    apply, params = fzero.functionalize(Net(part))
    cfg = fzero.Config(stage=3, **options)
    step_fn = fzero.make_train_step(
        lambda params, x: apply(params, x).square().mean(), fzero.optim.sgd(0.01), cfg
    )
    state: list[Any] = list(step_fn.init(params))
    batch = torch.randn(ROWS, STEPS, WIDTH)

    def step() -> Tensor:
        state[:] = step_fn(state[0], state[1], batch)
        return state[1].metrics["loss"]

    return step


def main() -> None:
    """Print one row per model."""
    tell("| part | held | opaque, peak | eager, peak | opaque/eager | losses differ |")
    tell("|---" * 6 + "|")
    for part in (Packed, Aligned, Experts):
        peaks, losses, between = [], [], 0
        for options in ({"opaque": "auto"}, {"executor": "eager"}):
            held, step = measure(functools.partial(step_of, part, options))
            peaks.append(held.peak)
            losses.append(float(step()))
            between = held.between
        sizes = " | ".join(f"{x / MIB:.2f}" for x in (between, *peaks))
        ratio, off = peaks[0] / peaks[1], abs(losses[0] - losses[1])
        tell(f"| {part.__name__} | {sizes} | {ratio:.2f} | {off:.1e} |")


def tell(line: str) -> None:
    """Print it on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        print(line, flush=True)


if __name__ == "__main__":
    main()
