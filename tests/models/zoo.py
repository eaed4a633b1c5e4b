"""Real architectures at toy size, with random weights: what the library has to take as it is.

Each `Case` builds a module, a batch, and the loss that its own library computes. `call` stands for
the module itself (plain torch) or for `apply` with parameters bound (fzero), so that both sides run
the same lines.
"""

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = dict[str, Tensor]
Call = Callable[..., Any]

ROWS, LENGTH, WORDS = 4, 8, 61
WIDTH, HEADS, LAYERS = 32, 4, 2


class Case(NamedTuple):
    """One model, and what a train step needs of it.

    Attributes:
        name: for tables and test ids.
        build: makes the module; called after `torch.manual_seed`.
        batch: rows and a generator to a batch whose loss is a mean over rows.
        loss: `(call, batch) -> loss`.
        frozen: globs over parameter names, for `Config.frozen`.
        mixes_rows: whether a row's loss depends on the other rows of its rank (BatchNorm).
        stages_out: whether a Program can hold it.
        library: what must be installed beside torch.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], Batch]
    loss: Callable[[Call, Batch], Tensor]
    frozen: tuple[str, ...] = ()
    mixes_rows: bool = False
    stages_out: bool = True
    library: str = "torch"

    @property
    def installed(self) -> bool:
        """Whether the case can be built here."""
        return importlib.util.find_spec(self.library) is not None


# ---------------------------------------------------------------------------------- transformers
def _transformers(config: str, model: str, **fields: Any) -> nn.Module:
    import transformers

    return getattr(transformers, model)(getattr(transformers, config)(**fields))


_GPT2 = partial(
    _transformers,
    "GPT2Config",
    "GPT2LMHeadModel",
    vocab_size=WORDS,
    n_positions=16,
    n_embd=WIDTH,
    n_layer=LAYERS,
    n_head=HEADS,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
)
_DECODER = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 2,
    "max_position_embeddings": 16,
}
_ENCODER = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_LLAMA = partial(_transformers, "LlamaConfig", "LlamaForCausalLM", **_DECODER)
_QWEN3 = partial(_transformers, "Qwen3Config", "Qwen3ForCausalLM", **_DECODER, head_dim=8)
_BERT = partial(_transformers, "BertConfig", "BertForMaskedLM", **_ENCODER, vocab_size=WORDS)
_VIT = partial(
    _transformers,
    "ViTConfig",
    "ViTForImageClassification",
    **_ENCODER,
    image_size=16,
    patch_size=4,
    num_labels=5,
)
_T5 = partial(
    _transformers,
    "T5Config",
    "T5ForConditionalGeneration",
    vocab_size=WORDS,
    d_model=WIDTH,
    d_kv=8,
    d_ff=2 * WIDTH,
    num_layers=LAYERS,
    num_heads=HEADS,
    dropout_rate=0.0,
    decoder_start_token_id=0,
)
_WHISPER = partial(
    _transformers,
    "WhisperConfig",
    "WhisperForConditionalGeneration",
    vocab_size=WORDS,
    d_model=WIDTH,
    encoder_layers=LAYERS,
    decoder_layers=LAYERS,
    encoder_attention_heads=HEADS,
    decoder_attention_heads=HEADS,
    encoder_ffn_dim=2 * WIDTH,
    decoder_ffn_dim=2 * WIDTH,
    num_mel_bins=8,
    max_source_positions=8,
    max_target_positions=16,
    dropout=0.0,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
)


def _ids(rows: int, rng: torch.Generator) -> Tensor:
    return torch.randint(3, WORDS, (rows, LENGTH), generator=rng)


def _text(rows: int, rng: torch.Generator) -> Batch:
    ids = _ids(rows, rng)
    return {"input_ids": ids, "labels": ids}


def _padded(rows: int, rng: torch.Generator) -> Batch:
    mask = torch.ones(rows, LENGTH, dtype=torch.int64)
    mask[::2, -2:] = 0
    return {**_text(rows, rng), "attention_mask": mask}


def _pairs(rows: int, rng: torch.Generator) -> Batch:
    return {"input_ids": _ids(rows, rng), "labels": _ids(rows, rng)}


def _images(rows: int, rng: torch.Generator) -> Batch:
    pixels = torch.randn(rows, 3, 16, 16, generator=rng)
    return {"pixel_values": pixels, "labels": torch.randint(5, (rows,), generator=rng)}


def _speech(rows: int, rng: torch.Generator) -> Batch:
    return {
        "input_features": torch.randn(rows, 8, 16, generator=rng),
        "labels": _ids(rows, rng),
    }


def _own_loss(call: Call, batch: Batch) -> Tensor:
    return call(**batch).loss


# ----------------------------------------------------------------------------------------- torch
class Convolutions(nn.Module):
    """Two convolutions with BatchNorm; returns logits."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Recurrent(nn.Module):
    """A two-layer LSTM over embeddings; `lengths` packs the sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, LAYERS, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        if lengths is None:
            return self.head(self.rnn(x)[0])
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
        out, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.head(out)


class Encoder(nn.Module):
    """`nn.TransformerEncoder` under a causal mask, with tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.body(self.embed(ids), mask=mask, is_causal=True))


class LowRank(nn.Module):
    """A frozen linear map beside a trained one of low rank (LoRA, arXiv:2106.09685)."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.up = nn.Parameter(torch.randn(base.out_features, rank) / rank)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def _lora() -> nn.Module:
    model = Encoder()
    for layer in model.body.layers:
        assert isinstance(layer, nn.TransformerEncoderLayer)
        layer.linear1 = LowRank(layer.linear1)  # pyright: ignore[reportAttributeAccessIssue]
        layer.linear2 = LowRank(layer.linear2)  # pyright: ignore[reportAttributeAccessIssue]
    return model


def _lora_frozen() -> tuple[str, ...]:
    names = [name for name, _ in _lora().named_parameters()]
    return tuple(n for n in names if not n.endswith(("down", "up")))


def _next_token(call: Call, batch: Batch) -> Tensor:
    logits = call(batch["input_ids"])
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def _classes(call: Call, batch: Batch) -> Tensor:
    return F.cross_entropy(call(batch["pixel_values"]), batch["labels"])


class Gated(nn.Module):
    """Operators whose backward is another one in grad mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.GroupNorm(4, 2 * WIDTH), nn.Mish()
        )
        self.head = nn.Linear(2 * WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class _Doubled(torch.autograd.Function):
    """Identity whose gradient is doubled, without `setup_context`: `torch.func` refuses it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore
        return 2 * grad


class OldStyle(Recurrent):
    """An LSTM, an old-style autograd Function and a hook on a tensor."""

    def forward(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        x = self.rnn(self.embed(ids))[0]
        x.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        return self.head(_Doubled.apply(x))


# ----------------------------------------------------------------------- what no Program can hold
class Branching(nn.Module):
    """Reads a value to decide what to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 5), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x.square().mean().item() > 0.1 else self.b(x)


class InNumpy(nn.Module):
    """Computes a feature outside torch."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        import numpy as np

        return self.head(torch.from_numpy(np.tanh(x.numpy())))


class Experts(nn.Module):
    """Sends each row to one expert by a boolean index."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, 5) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.gate(x).softmax(-1).max(-1)
        out = x.new_zeros(x.shape[0], 5)
        for i, expert in enumerate(self.experts):
            out[choice == i] = expert(x[choice == i])
        return out * weight[:, None]


def _features(rows: int, rng: torch.Generator) -> Batch:
    x = torch.randn(rows, WIDTH, generator=rng)
    return {"pixel_values": x, "labels": torch.randint(5, (rows,), generator=rng)}


def _packed(rows: int, rng: torch.Generator) -> Batch:
    lengths = torch.full((rows,), LENGTH)
    lengths[1::2] -= 2
    return {**_text(rows, rng), "lengths": lengths}


def _packed_loss(call: Call, batch: Batch) -> Tensor:
    logits = call(batch["input_ids"], batch["lengths"])
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def _ctc(call: Call, batch: Batch) -> Tensor:
    logits = call(batch["input_ids"]).log_softmax(-1).transpose(0, 1)
    rows = logits.shape[1]
    lengths = torch.full((rows,), LENGTH)
    return F.ctc_loss(logits, batch["labels"][:, :3], lengths, torch.full((rows,), 3))


HF = "transformers"
CASES = (
    Case("GPT-2", _GPT2, _text, _own_loss, library=HF),
    Case("GPT-2, padded", _GPT2, _padded, _own_loss, library=HF),
    Case("Llama", _LLAMA, _text, _own_loss, library=HF),
    Case("Llama, padded", _LLAMA, _padded, _own_loss, library=HF),
    Case("Qwen3", _QWEN3, _padded, _own_loss, library=HF),
    Case("BERT", _BERT, _padded, _own_loss, library=HF),
    Case("T5", _T5, _pairs, _own_loss, library=HF),
    Case("ViT", _VIT, _images, _own_loss, library=HF),
    # Its sinusoidal positions are parameters that ask for no gradient.
    Case("Whisper", _WHISPER, _speech, _own_loss, ("*.encoder.embed_positions.*",), library=HF),
    Case("CNN with BatchNorm", Convolutions, _images, _classes, mixes_rows=True),
    Case("nn.LSTM", Recurrent, _text, _next_token),
    Case("nn.TransformerEncoder, tied", Encoder, _text, _next_token),
    Case("SiLU, GroupNorm, Mish", Gated, _features, _classes),
    Case("old-style autograd.Function", OldStyle, _text, _next_token),
    Case("LoRA", _lora, _text, _next_token, frozen=_lora_frozen()),
    Case(".item() in a branch", Branching, _features, _classes, stages_out=False),
    Case("numpy in forward", InNumpy, _features, _classes, stages_out=False),
    Case("boolean index (experts)", Experts, _features, _classes, stages_out=False),
    Case("packed nn.LSTM", Recurrent, _packed, _packed_loss, stages_out=False),
    Case("CTC loss", Recurrent, _text, _ctc, stages_out=False),
)
