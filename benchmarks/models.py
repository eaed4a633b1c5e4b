"""The models that the benchmarks train, and how a step of them is built."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fzero

Batch = tuple[Tensor, Tensor]


class Size(NamedTuple):
    """Of a GPT: vocabulary, width, layers, heads, tokens in a row, rows in a global batch."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    tokens: int
    rows: int


SIZES = {
    "gpt2": Size(1024, 128, 8, 4, 64, 4),  # 1.9M parameters: the host's overhead shows
    "gpt27": Size(8192, 512, 6, 8, 256, 4),  # 27.6M: bound by computation
    "gpt39": Size(1024, 512, 12, 8, 32, 1),  # 38.9M, few tokens: parameters dominate
    "gpt105": Size(2048, 1024, 8, 16, 32, 1),  # 104.9M, the same
}


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        q, k, v = (
            part.view(rows, tokens, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.ln1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, tokens, width))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    """`model(tokens, targets)` is the mean cross-entropy."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tok = nn.Embedding(size.vocabulary, size.width)
        self.pos = nn.Embedding(size.tokens, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.ln = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def batch_of(size: Size, rows: int) -> Batch:
    """Random tokens, and the same one place on."""
    text = torch.randint(0, size.vocabulary, (rows, size.tokens + 1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def fzero_step(size: Size, batch: Batch, opt: Any, cfg: fzero.Config) -> "Step":
    """A step function with its state."""
    torch.manual_seed(0)
    module = GPT(size)
    apply, params = fzero.functionalize(module)
    module.to("meta")  # from here on it is only code: the full parameters go
    step_fn = fzero.make_train_step(lambda params, batch: apply(params, *batch), opt, cfg)
    return Step(step_fn, [*step_fn.init(params)], batch)


class Step:
    """Calls a step function over and over, as a training loop does."""

    def __init__(self, step_fn: fzero.TrainStep, state: list[Any], batch: Batch) -> None:
        self.step_fn, self.batch = step_fn, batch
        self.params, self.opt_state = state

    def __call__(self) -> None:
        self.params, self.opt_state = self.step_fn(self.params, self.opt_state, self.batch)

    def lower(self) -> fzero.Program:
        """The step's Program."""
        return self.step_fn.lower(self.params, self.opt_state, self.batch)


def plain_step(size: Size, batch: Batch) -> Callable[[], None]:
    """The same step in plain torch, with the fused AdamW."""
    torch.manual_seed(0)
    model = GPT(size)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)

    def step() -> None:
        model(*batch).backward()
        opt.step()
        opt.zero_grad()

    return step
