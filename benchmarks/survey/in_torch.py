"""Subjects: every module of `torch.nn`, each behind a trained scale of its input."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.survey.subjects import Built, Subject, called

LINE, PLANE, SPACE, FLAT = (2, 8, 12), (2, 8, 6, 6), (2, 8, 4, 4, 4), (4, 8)


class Scaled(nn.Module):
    """A module on inputs that a parameter scales, so that each has a gradient."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.tensor(1.5))

    def forward(self, *args: Any) -> Any:
        scaled = [x * self.scale if i == 0 and x.is_floating_point() else x for i, x in
                  enumerate(args)]  # fmt: skip
        return self.inner(*scaled)


class Packed(nn.Module):
    """A recurrent module on a packed sequence."""

    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return self.rnn(packed)[0].data


class Solved(nn.Module):
    """Iterates until it moves no more: a fixed point, as of a deep equilibrium model."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x)
        for _ in range(50):
            following = torch.tanh(0.3 * self.map(state) + x)
            if (following - state).abs().max() < 1e-4:
                break
            state = following
        return state


def _with(make: Callable[[], nn.Module], *shapes: Any) -> Callable[[], Built]:
    """A module on random tensors of these shapes, or on what these functions make."""

    def build() -> Built:
        given = [s() if callable(s) else torch.randn(s) for s in shapes]
        return called(Scaled(make()), *given)

    return build


def _ints(high: int, *shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(high, shape)


def _signs(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(2, shape) * 2.0 - 1.0


def _rand(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.rand(shape)


def _unpool(n: int) -> Callable[[], nn.Module]:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = getattr(nn, f"MaxPool{n}d")(2, return_indices=True)
            self.up = getattr(nn, f"MaxUnpool{n}d")(2)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(*self.down(x))

    return Pooled


ELEMENTWISE = (
    *("CELU", "ELU", "GELU", "GLU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh"),
    *("Identity", "LeakyReLU", "LogSigmoid", "LogSoftmax", "Mish", "PReLU", "ReLU", "ReLU6"),
    *("RReLU", "SELU", "SiLU", "Sigmoid", "Softmax", "Softmin", "Softplus", "Softshrink"),
    *("Softsign", "Tanh", "Tanhshrink", "AlphaDropout", "Dropout", "FeatureAlphaDropout"),
)


def subjects() -> Iterator[Subject]:
    """All of them."""
    made: dict[str, Callable[[], Built]] = {}
    for name in ELEMENTWISE:
        arguments = {"p": 0.0} if "Dropout" in name else {}
        cls = getattr(nn, name)
        made[name] = _with(lambda cls=cls, a=arguments: cls(**a), FLAT)
    for n, shape in ((1, LINE), (2, PLANE), (3, SPACE)):
        for name in ("AdaptiveAvgPool", "AdaptiveMaxPool"):
            made[f"{name}{n}d"] = _with(lambda name=f"{name}{n}d": getattr(nn, name)(2), shape)
        for name in ("AvgPool", "MaxPool"):
            made[f"{name}{n}d"] = _with(lambda name=f"{name}{n}d": getattr(nn, name)(2), shape)
        made[f"LPPool{n}d"] = _with(lambda name=f"LPPool{n}d": getattr(nn, name)(2, 2), shape)
        made[f"MaxUnpool{n}d"] = _with(_unpool(n), shape)
        for name in ("Conv", "ConvTranspose"):
            made[f"{name}{n}d"] = _with(
                lambda name=f"{name}{n}d": getattr(nn, name)(8, 4, 3), shape
            )
            lazy = getattr(nn, f"Lazy{name}{n}d")
            made[f"Lazy{name}{n}d"] = _lazy(lambda c=lazy: c(4, 3), shape)
        for name in ("BatchNorm", "InstanceNorm"):
            cls = getattr(nn, f"{name}{n}d")
            arguments = {"affine": True, "track_running_stats": True}
            made[f"{name}{n}d"] = _with(lambda c=cls, a=arguments: c(8, **a), shape)
            made[f"Lazy{name}{n}d"] = _lazy(getattr(nn, f"Lazy{name}{n}d"), shape)
        for name in ("ReflectionPad", "ReplicationPad", "ZeroPad", "ConstantPad", "CircularPad"):
            more = (0.5,) if name == "ConstantPad" else ()
            cls = getattr(nn, f"{name}{n}d")
            made[f"{name}{n}d"] = _with(lambda c=cls, m=more: c(1, *m), shape)
        cls = getattr(nn, f"Dropout{n}d")
        made[f"Dropout{n}d"] = _with(lambda c=cls: c(0.0), shape)
    made |= {
        "Bilinear": _with(lambda: nn.Bilinear(8, 8, 4), FLAT, FLAT),
        "ChannelShuffle": _with(lambda: nn.ChannelShuffle(2), PLANE),
        "CosineSimilarity": _with(nn.CosineSimilarity, FLAT, FLAT),
        "CrossMapLRN2d": _with(lambda: nn.CrossMapLRN2d(3), PLANE),
        "Embedding": _with(lambda: nn.Embedding(11, 8), _ints(11, 4, 5)),
        "Embedding, max_norm": _with(lambda: nn.Embedding(11, 8, max_norm=1.0), _ints(11, 4, 5)),
        "Embedding, padding_idx": _with(
            lambda: nn.Embedding(11, 8, padding_idx=0), _ints(11, 4, 5)
        ),
        "Embedding, sparse": _with(lambda: nn.Embedding(11, 8, sparse=True), _ints(11, 4, 5)),
        "EmbeddingBag": _with(lambda: nn.EmbeddingBag(11, 8), _ints(11, 4, 5)),
        "EmbeddingBag, max": _with(lambda: nn.EmbeddingBag(11, 8, mode="max"), _ints(11, 4, 5)),
        "Flatten": _with(nn.Flatten, PLANE),
        "Fold": _with(lambda: nn.Fold((5, 5), (2, 2)), (2, 12, 16)),
        "FractionalMaxPool2d": _with(
            lambda: nn.FractionalMaxPool2d(2, (3, 3), _random_samples=torch.rand(2, 8, 2)), PLANE
        ),
        "FractionalMaxPool3d": _with(
            lambda: nn.FractionalMaxPool3d(2, (2, 2, 2), _random_samples=torch.rand(2, 8, 3)),
            SPACE,
        ),
        "GroupNorm": _with(lambda: nn.GroupNorm(2, 8), PLANE),
        "GRU": _with(lambda: nn.GRU(8, 8, 2), (4, 3, 8)),
        "GRU, packed": _packed(nn.GRU),
        "GRUCell": _with(lambda: nn.GRUCell(8, 8), FLAT),
        "LSTM": _with(lambda: nn.LSTM(8, 8, 2), (4, 3, 8)),
        "LSTM, bidirectional, proj": _with(
            lambda: nn.LSTM(8, 8, 2, bidirectional=True, proj_size=4), (4, 3, 8)
        ),
        "LSTM, packed": _packed(nn.LSTM),
        "LSTMCell": _with(lambda: nn.LSTMCell(8, 8), FLAT),
        "RNN": _with(lambda: nn.RNN(8, 8, 2), (4, 3, 8)),
        "RNN, packed": _packed(nn.RNN),
        "RNNCell": _with(lambda: nn.RNNCell(8, 8), FLAT),
        "LayerNorm": _with(lambda: nn.LayerNorm(8), FLAT),
        "LazyLinear": _lazy(lambda: nn.LazyLinear(4), FLAT),
        "Linear": _with(lambda: nn.Linear(8, 4), FLAT),
        "LocalResponseNorm": _with(lambda: nn.LocalResponseNorm(3), PLANE),
        "MultiheadAttention": _with(lambda: nn.MultiheadAttention(8, 2), *[(5, 3, 8)] * 3),
        "PairwiseDistance": _with(nn.PairwiseDistance, FLAT, FLAT),
        "PixelShuffle": _with(lambda: nn.PixelShuffle(2), PLANE),
        "PixelUnshuffle": _with(lambda: nn.PixelUnshuffle(2), PLANE),
        "RMSNorm": _with(lambda: nn.RMSNorm(8), FLAT),
        "Softmax2d": _with(nn.Softmax2d, PLANE),
        "SyncBatchNorm, one rank": _with(lambda: nn.SyncBatchNorm(8).eval(), PLANE),
        "Threshold": _with(lambda: nn.Threshold(0.1, 0.0), FLAT),
        "Transformer": _with(lambda: nn.Transformer(8, 2, 1, 1, 16, 0.0), (5, 3, 8), (4, 3, 8)),
        "TransformerDecoder": _with(
            lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, 0.0), 2),
            *[(5, 3, 8)] * 2,
        ),
        "TransformerEncoder": _with(
            lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0), 2), (5, 3, 8)
        ),
        "Unflatten": _with(lambda: nn.Unflatten(1, (2, 4)), FLAT),
        "Unfold": _with(lambda: nn.Unfold((2, 2)), PLANE),
        "Upsample, nearest": _with(lambda: nn.Upsample(scale_factor=2), PLANE),
        "Upsample, bicubic": _with(lambda: nn.Upsample(scale_factor=2, mode="bicubic"), PLANE),
        "UpsamplingBilinear2d": _with(lambda: nn.UpsamplingBilinear2d(scale_factor=2), PLANE),
        "UpsamplingNearest2d": _with(lambda: nn.UpsamplingNearest2d(scale_factor=2), PLANE),
        "weight_norm": _with(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 4)), FLAT),
        "spectral_norm": _with(
            lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4)), FLAT
        ),
        "spectral_norm, old": _with(lambda: nn.utils.spectral_norm(nn.Linear(8, 4)), FLAT),
        "orthogonal": _with(lambda: nn.utils.parametrizations.orthogonal(nn.Linear(8, 4)), FLAT),
        "a loop until convergence": _with(Solved, FLAT),
        # losses
        "AdaptiveLogSoftmaxWithLoss": _with(
            lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 12, [4, 8]), FLAT, _ints(12, 4)
        ),
        "BCEWithLogitsLoss": _with(nn.BCEWithLogitsLoss, FLAT, _rand(*FLAT)),
        "CosineEmbeddingLoss": _with(nn.CosineEmbeddingLoss, FLAT, FLAT, _signs(4)),
        "CrossEntropyLoss": _with(nn.CrossEntropyLoss, FLAT, _ints(8, 4)),
        "CTCLoss": _with(
            _ctc,
            (6, 2, 8),
            _ints(7, 2, 3),
            lambda: torch.full((2,), 6),
            lambda: torch.full((2,), 3),
        ),
        "GaussianNLLLoss": _with(nn.GaussianNLLLoss, FLAT, FLAT, _rand(*FLAT)),
        "HingeEmbeddingLoss": _with(nn.HingeEmbeddingLoss, FLAT, _signs(*FLAT)),
        "HuberLoss": _with(nn.HuberLoss, FLAT, FLAT),
        "KLDivLoss": _with(lambda: nn.KLDivLoss(reduction="batchmean"), FLAT, _rand(*FLAT)),
        "L1Loss": _with(nn.L1Loss, FLAT, FLAT),
        "LinearCrossEntropyLoss": _with(
            lambda: nn.LinearCrossEntropyLoss(8, 12),
            FLAT,
            _ints(12, 4),  # pyright: ignore
        ),
        "MarginRankingLoss": _with(nn.MarginRankingLoss, FLAT, FLAT, _signs(*FLAT)),
        "MSELoss": _with(nn.MSELoss, FLAT, FLAT),
        "MultiLabelMarginLoss": _with(nn.MultiLabelMarginLoss, FLAT, _ints(8, *FLAT)),
        "MultiLabelSoftMarginLoss": _with(
            nn.MultiLabelSoftMarginLoss, FLAT, lambda: torch.randint(2, FLAT).float()
        ),
        "MultiMarginLoss": _with(nn.MultiMarginLoss, FLAT, _ints(8, 4)),
        "NLLLoss": _with(nn.NLLLoss, FLAT, _ints(8, 4)),
        "NLLLoss2d": _with(nn.NLLLoss, PLANE, _ints(8, 2, 6, 6)),
        "PoissonNLLLoss": _with(nn.PoissonNLLLoss, FLAT, _rand(*FLAT)),
        "SmoothL1Loss": _with(nn.SmoothL1Loss, FLAT, FLAT),
        "SoftMarginLoss": _with(nn.SoftMarginLoss, FLAT, _signs(*FLAT)),
        "TripletMarginLoss": _with(nn.TripletMarginLoss, FLAT, FLAT, FLAT),
        "TripletMarginWithDistanceLoss": _with(nn.TripletMarginWithDistanceLoss, FLAT, FLAT, FLAT),
    }
    for name, build in sorted(made.items()):
        yield Subject(name, "torch", build)


def _ctc() -> nn.Module:
    class Ctc(nn.Module):
        def forward(self, x: Tensor, targets: Tensor, given: Tensor, wanted: Tensor) -> Tensor:
            return nn.functional.ctc_loss(x.log_softmax(-1), targets, given, wanted, blank=7)

    return Ctc()


def _packed(rnn: Any) -> Callable[[], Built]:
    return lambda: called(
        Packed(rnn(8, 8, batch_first=True)), torch.randn(3, 5, 8), torch.tensor([5, 3, 2])
    )


def _lazy(make: Callable[[], nn.Module], shape: Any) -> Callable[[], Built]:
    """A module whose parameters have their shapes once it was called."""

    def build() -> Built:
        x, module = torch.randn(shape), make()
        module(x)
        return called(Scaled(module), x)

    return build
