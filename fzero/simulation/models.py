"""Shapes of well-known language models, as plain modules on the meta device.

Layers are what they are in the originals; values don't matter here. Experts take equally many
tokens each: which token goes where depends on values, and a balanced router is what is trained for.

References: Radford et al., Language models are unsupervised multitask learners, 2019 (GPT-2);
Dubey et al., The Llama 3 herd of models, arXiv:2407.21783, table 3; Yang et al., Qwen3 technical
report, arXiv:2505.09388, table 2.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fzero.errors import ConfigError
from fzero.functional.functionalize import functionalize
from fzero.functional.remat import Policy, remat

_aten = torch.ops.aten
REMAT: Mapping[str, Policy | None] = MappingProxyType(
    {
        "none": None,
        "dots": (
            *(_aten.mm, _aten.bmm, _aten.addmm, _aten._scaled_dot_product_flash_attention),
            _aten._scaled_dot_product_flash_attention_for_cpu,
        ),
        "full": None,
    }
)
"""What is recomputed of each layer: nothing; all but products and attention; everything."""


@dataclass(frozen=True)
class Shape:
    """A decoder's sizes.

    Args:
        layers, width: how many, and of what width.
        heads, kv_heads: of attention.
        hidden: width inside a layer's feed-forward part, or inside an expert.
        vocab: tokens that there are.
        sequence: tokens in a sequence of a batch.
        head_dim: of one head; None: `width / heads`.
        experts, active: how many there are in a layer, and how many a token goes through; 0: the
            feed-forward part is dense.
        gpt2: learned positions, LayerNorm, biases, GELU and a tied head, instead of rotary
            positions, RMSNorm, no biases, SwiGLU and a head of its own.
        normed_heads: whether queries and keys are normalised, head by head.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    sequence: int
    head_dim: int | None = None
    experts: int = 0
    active: int = 0
    gpt2: bool = False
    normed_heads: bool = False


def _gpt2(layers: int, width: int, heads: int) -> Shape:
    return Shape(layers, width, heads, heads, 4 * width, 50257, 1024, gpt2=True)


def _llama3(layers: int, width: int, heads: int, hidden: int) -> Shape:
    return Shape(layers, width, heads, 8, hidden, 128256, 8192)


def _qwen3(layers: int, width: int, heads: int, hidden: int) -> Shape:
    shape = Shape(layers, width, heads, 4, hidden, 151936, 4096)
    return replace(shape, head_dim=128, experts=128, active=8, normed_heads=True)


MODELS: Mapping[str, Shape] = MappingProxyType(
    {
        "gpt2": _gpt2(12, 768, 12),
        "gpt2-medium": _gpt2(24, 1024, 16),
        "gpt2-large": _gpt2(36, 1280, 20),
        "gpt2-xl": _gpt2(48, 1600, 25),
        "llama3-8b": _llama3(32, 4096, 32, 14336),
        "llama3-70b": _llama3(80, 8192, 64, 28672),
        "llama3-405b": _llama3(126, 16384, 128, 53248),
        "qwen3-30b-a3b": _qwen3(48, 2048, 32, 768),
        "qwen3-235b-a22b": _qwen3(94, 4096, 64, 1536),
    }
)


def resolve_model(name: str) -> Shape:
    """The shape of this name.

    Raises:
        ConfigError: there is none.

    >>> resolve_model("llama3-70b").layers
    80
    """
    if name in MODELS:
        return MODELS[name]
    near = difflib.get_close_matches(name, MODELS, 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"model {name!r} is not known.{hint} It must be one of {', '.join(MODELS)}.")


def build(
    shape: Shape,
    rows: int,
    *,
    layers: int | None = None,
    sequence: int | None = None,
    policy: Policy | None = None,
    again: bool = False,
) -> tuple[Callable[[Any, Any], Tensor], dict[str, Tensor], tuple[Tensor, Tensor]]:
    """A model function, its parameters, and a batch of tokens, all on the meta device.

    Args:
        shape: of the model.
        rows: sequences of the batch.
        layers: that it has; None: `shape.layers`.
        sequence: tokens of each; None: `shape.sequence`.
        policy: what a layer that is computed again keeps; see `fzero.remat`.
        again: whether layers are computed again in backward.

    >>> model_fn, params, batch = build(resolve_model("llama3-8b"), rows=1)
    >>> sum(x.numel() for x in params.values())
    8030261248
    """
    shape = replace(shape, layers=layers or shape.layers)
    with torch.device("meta"):
        module = Decoder(shape, sequence or shape.sequence, policy, again)
        tokens = torch.empty(rows, sequence or shape.sequence, dtype=torch.int64)
    apply, params = functionalize(module)

    def model_fn(params: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        return F.cross_entropy(apply(params, tokens).flatten(0, 1).float(), targets.flatten())

    return model_fn, params, (tokens, torch.empty_like(tokens))


# -------------------------------------------------------------------------------------- the modules
def _norm(shape: Shape, width: int | None = None) -> nn.Module:
    kind = nn.LayerNorm if shape.gpt2 else nn.RMSNorm
    return kind(width or shape.width, eps=1e-5)


class Attention(nn.Module):
    """Causal self-attention, with as many heads of keys as there are."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.dim = shape.head_dim or shape.width // shape.heads
        own, keys = shape.heads * self.dim, shape.kv_heads * self.dim
        self.q = nn.Linear(shape.width, own, bias=shape.gpt2)
        self.k = nn.Linear(shape.width, keys, bias=shape.gpt2)
        self.v = nn.Linear(shape.width, keys, bias=shape.gpt2)
        self.out = nn.Linear(own, shape.width, bias=shape.gpt2)
        if shape.normed_heads:
            self.q_norm, self.k_norm = _norm(shape, self.dim), _norm(shape, self.dim)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor] | None) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.dim)) for f in (self.q, self.k, self.v))
        if self.shape.normed_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        if turn is not None:
            q, k = _turned(q, *turn), _turned(k, *turn)
        times = self.shape.heads // self.shape.kv_heads
        if times > 1:
            k, v = k.repeat_interleave(times, 2), v.repeat_interleave(times, 2)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(x.transpose(1, 2).flatten(2))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: Su et al., RoFormer, arXiv:2104.09864; computed in float32."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Dense(nn.Module):
    """The feed-forward part of a layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gated = not shape.gpt2
        self.up = nn.Linear(shape.width, shape.hidden, bias=shape.gpt2)
        if self.gated:
            self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=shape.gpt2)

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            return self.down(F.silu(self.gate(x)) * self.up(x))
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Experts(nn.Module):
    """A layer's experts, each of which takes an equal part of the tokens."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.router = nn.Linear(shape.width, shape.experts, bias=False)
        for name, sizes in (
            ("gate", (shape.width, shape.hidden)),
            ("up", (shape.width, shape.hidden)),
            ("down", (shape.hidden, shape.width)),
        ):
            setattr(self, name, nn.Parameter(torch.empty(shape.experts, *sizes)))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        weights, chosen = self.router(rows).float().softmax(-1).topk(self.shape.active, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        order = chosen.flatten().argsort()
        from_ = order // self.shape.active
        gate, up, down = (getattr(self, name) for name in ("gate", "up", "down"))
        inside = rows[from_].unflatten(0, (self.shape.experts, -1))
        made = torch.bmm(F.silu(torch.bmm(inside, gate)) * torch.bmm(inside, up), down)
        made = made.flatten(0, 1) * weights.flatten()[order][:, None]
        return torch.zeros_like(rows).index_add(0, from_, made).view_as(x)


class Layer(nn.Module):
    """Attention, and what follows it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm, self.norm = _norm(shape), _norm(shape)
        self.attention = Attention(shape)
        self.mlp = Experts(shape) if shape.experts else Dense(shape)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turn)
        return x + self.mlp(self.norm(x))


class Decoder(nn.Module):
    """A language model: tokens in, scores of the next token out."""

    def __init__(
        self, shape: Shape, sequence: int, policy: Policy | None = None, again: bool = False
    ) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab, shape.width)
        if shape.gpt2:
            self.positions = nn.Embedding(sequence, shape.width)
        self.layers = nn.ModuleList([Layer(shape) for _ in range(shape.layers)])
        self.norm = _norm(shape)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        if shape.gpt2:
            self.head.weight = self.embed.weight
        self.policy, self.again = policy, again

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        place = torch.arange(tokens.shape[1], device=tokens.device)
        turn = None
        if self.shape.gpt2:
            x = x + self.positions(place)
        else:
            dim = self.shape.head_dim or self.shape.width // self.shape.heads
            speed = 5e5 ** (torch.arange(0, dim, 2, device=tokens.device) / -dim)
            angle = (place[:, None] * speed)[:, None]
            turn = (angle.cos(), angle.sin())
        for layer in self.layers:
            x = (remat(layer, self.policy) if self.again else layer)(x, turn)
        return self.head(self.norm(x))
